"""The modules of scripts/gpu_check."""
