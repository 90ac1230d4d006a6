"""Writes tests/core/recomputed_layers_golden.json: the layers of a pipeline stage or chunk that
Megatron Core recomputes together.

Run it with torch and megatron-core 0.16.1: python scripts/golden/recomputed_layers.py
"""

import json
import pathlib
import types

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock

SOURCE = pathlib.Path(__file__).resolve().parents[2]


def pieces(method, count, layers):
    """Returns the number of layers in each checkpoint; layers outside of checkpoints come last."""
    ran, checkpoints = [], []

    def layer(index):
        def run(hidden_states, **unused):
            ran.append(index)
            return hidden_states, None
        return run

    def checkpoint(function, distribute, *inputs):
        before = len(ran)
        result = function(*inputs)
        assert ran == list(range(len(ran))) and before == sum(checkpoints)
        checkpoints.append(len(ran) - before)
        return result

    block = types.SimpleNamespace(
        config=types.SimpleNamespace(
            recompute_method=method, recompute_num_layers=count, fp8=None, fp4=None,
            distribute_saved_activations=False),
        num_layers_per_pipeline_rank=layers, _get_layer=layer)
    kept, tensor_parallel.checkpoint = tensor_parallel.checkpoint, checkpoint
    try:
        TransformerBlock._checkpointed_forward(
            block, torch.zeros(1), None, None, None, None, None, None, False)
    finally:
        tensor_parallel.checkpoint = kept
    assert ran == list(range(layers))
    return checkpoints


def main():
    cases = []
    for layers in range(1, 9):
        for count in range(1, 11):
            cases.append(["block", count, layers, pieces("block", count, layers)])
            if layers % count == 0:  # else Megatron Core asks for a layer that does not exist
                cases.append(["uniform", count, layers, pieces("uniform", count, layers)])
    target = SOURCE / "tests/core/recomputed_layers_golden.json"
    target.write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main()
