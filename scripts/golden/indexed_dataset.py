"""Writes tests/datasets/indexed_dataset_golden.json: data sets that Megatron Core's
IndexedDatasetBuilder writes. Each entry has the builder's input and the bytes of both files.

Run it with torch, numpy and megatron-core 0.16.1:
python scripts/golden/indexed_dataset.py
"""

import json
import pathlib
import random
import tempfile

import numpy
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

SOURCE = pathlib.Path(__file__).resolve().parents[2]
TORCH_DTYPES = {"uint16": torch.int32}  # torch.tensor has no uint16 that numpy converts everywhere


def build(folder, name, dtype, documents, modes=None):
    """`documents`: lists of sequences; `modes` has the same shape."""
    prefix = str(folder / name)
    numpy_type = getattr(numpy, dtype)
    builder = IndexedDatasetBuilder(prefix + ".bin", numpy_type, multimodal=modes is not None)
    for d, document in enumerate(documents):
        for s, sequence in enumerate(document):
            tensor = torch.tensor(sequence, dtype=TORCH_DTYPES.get(dtype, getattr(torch, dtype, None)))
            builder.add_item(tensor, modes[d][s] if modes else 0)
        builder.end_document()
    builder.finalize(prefix + ".idx")
    if any(map(len, sum(documents, []))):  # the reader cannot map an empty file
        read = IndexedDataset(prefix, multimodal=modes is not None)
        assert len(read) == sum(map(len, documents))
    return {"name": name, "dtype": dtype, "documents": documents, "modes": modes,
            "idx": pathlib.Path(prefix + ".idx").read_bytes().hex(),
            "bin": pathlib.Path(prefix + ".bin").read_bytes().hex()}


def main():
    rng = random.Random(9)
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        cases.append(build(folder, "two documents", "uint16", [[[1, 2, 3]], [[4, 5]]]))
        cases.append(build(folder, "no document", "int32", []))
        cases.append(build(folder, "empty ones", "int32", [[], [[]], [[7], [], [8, 9]], []]))
        cases.append(build(folder, "modes", "uint16", [[[1, 2], [3]], [[4]]], [[0, 1], [-3]]))
        for dtype in DType.__members__:
            if dtype.startswith("float"):
                low, high = -2**20, 2**20
            else:
                low, high = numpy.iinfo(dtype).min, numpy.iinfo(dtype).max
            documents = [[[rng.randint(low, high) for _ in range(rng.randint(0, 6))]
                          for _ in range(rng.randint(1, 3))] for _ in range(4)]
            documents.append([[low, high, 0]])
            cases.append(build(folder, f"random {dtype}", dtype, documents))
    target = SOURCE / "tests/datasets/indexed_dataset_golden.json"
    target.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
