"""Paths of the installed Lockstep. Training runs in the program `lockstep`, not in Python."""

import os

from lockstep._build import cuda_architectures, torch_version, version as __version__

__all__ = ["__version__", "cmake_prefix_path", "cuda_architectures", "program", "torch_version"]

# For CMake's find_package(Lockstep).
cmake_prefix_path = os.path.dirname(os.path.abspath(__file__))
program = os.path.join(cmake_prefix_path, "bin", "lockstep")
