"""Writes tests/optimizer/muon_split_qkv_golden.json: Megatron Core's direction of a Muon step for
the fused weight of queries, keys and values, in fp64.

Megatron Core splits the weight. It leaves the arithmetic to emerging_optimizers; here the same
polynomials of the singular values replace it.

Run it with torch and megatron-core 0.16.1: python scripts/golden/muon_split_qkv.py
"""

import json
import math
import pathlib
import types

import torch
from megatron.core.optimizer.muon import TensorParallelMuon

SOURCE = pathlib.Path(__file__).resolve().parents[2]
QUINTICS = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]


def scaled_orthogonalize(matrix, tp_group, partition_dim):
    assert tp_group is None and partition_dim is None
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / torch.linalg.vector_norm(matrix)
    for a, b, c in QUINTICS:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v * math.sqrt(max(matrix.shape))


def case(heads, groups, channels, columns, split):
    shapes = [heads // groups * channels, channels, channels]
    rows = groups * sum(shapes)
    optimizer = types.SimpleNamespace(
        pg_collection=None, mode="duplicated", split_qkv=split, is_qkv_fn=lambda p: True,
        qkv_split_shapes=shapes, scaled_orthogonalize_fn=scaled_orthogonalize)
    i = torch.arange(rows * columns, dtype=torch.float64)
    matrix = torch.sin(i * i * 0.7).view(rows, columns)
    result = TensorParallelMuon.orthogonalize(optimizer, torch.nn.Parameter(matrix), matrix)
    return {"heads": heads, "groups": groups, "channels": channels, "columns": columns,
            "split": split, "direction": result.flatten().tolist()}


def main():
    cases = [case(heads, groups, channels, columns, split)
             for heads, groups, channels, columns in
             [(4, 4, 2, 6), (4, 2, 2, 6), (4, 1, 3, 8), (6, 2, 1, 20)]
             for split in (True, False)]
    target = SOURCE / "tests/optimizer/muon_split_qkv_golden.json"
    target.write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main()
