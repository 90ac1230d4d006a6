"""Writes tests/datasets/sample_index_golden.json: the indices of Megatron Core's GPTDataset and
BlendedDataset for varied documents, lengths and weights.

Run it with torch, numpy and megatron-core 0.16.1:
python scripts/golden/sample_index.py
"""

import json
import pathlib
import random
from types import SimpleNamespace

import numpy
from megatron.core.datasets import helpers_cpp
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix, parse_and_normalize_split)
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split, normalize

SOURCE = pathlib.Path(__file__).resolve().parents[2]


class Indices(GPTDataset):
    """A GPTDataset that only builds its indices."""

    def __init__(self, case):
        self.config = SimpleNamespace(
            defer_npy_index_mmap=False, path_to_cache=None, mock=True, fast_cache_load=False,
            sequence_length=case["seq_length"], add_extra_token_to_sequence=case["extra_tokens"],
            random_seed=case["seed"], drop_last_partial_validation_sequence=case["drop_last"])
        self.index_split = Split.valid
        self.num_samples = case["num_samples"] or None
        self.indices = numpy.arange(*case["range"], dtype=numpy.int32)
        self.dataset = SimpleNamespace(sequence_lengths=numpy.array(case["lengths"], numpy.int32))


def sample_case(rng):
    while True:
        lengths = [rng.choice([0, 1, rng.randint(0, 30)]) for _ in range(rng.randint(1, 12))]
        begin = rng.randint(0, len(lengths) - 1)
        case = {"lengths": lengths, "range": [begin, rng.randint(begin + 1, len(lengths))],
                "seq_length": rng.randint(2, 12), "seed": rng.randrange(2**32),
                "num_samples": rng.choice([0, rng.randint(1, 40)]),
                "extra_tokens": rng.choice([1, 1, 0]), "drop_last": rng.random() < 0.8}
        # Megatron asserts > 1 sample an epoch, and no empty document if the last sample is partial.
        if sum(lengths[slice(*case["range"])]) <= 2 * case["seq_length"]:
            continue
        if not case["drop_last"] and 0 in lengths:
            continue
        documents, starts, order = Indices(case)._build_document_sample_shuffle_indices()
        return case | {"documents": documents.tolist(), "starts": starts.tolist(),
                       "order": order.tolist()}


class EndlessDataset:
    """What BlendedDataset asks of a data set."""

    index_split = Split.train
    unique_identifiers = {}

    def __len__(self):
        return 1 << 40


def blended(weights, size):
    """As BlendedMegatronDatasetBuilder makes it, which normalizes the weights before the class
    does."""
    config = SimpleNamespace(defer_npy_index_mmap=False, path_to_cache=None)
    blend = BlendedDataset([EndlessDataset() for _ in weights], normalize(weights), size, config)
    return {"weights": weights, "shares": blend.weights, "datasets": blend.dataset_index.tolist(),
            "samples": blend.dataset_sample_index.tolist()}


def blend_case(rng, count):
    weights = [rng.choice([0.1, rng.random(), rng.randint(1, 100)]) for _ in range(count)]
    weights[0] += 1
    return blended(weights, rng.randint(20, 60))


def tied_blend_cases():
    """Weights of one or two decimals, where rounding decides between data sets that lag equally."""
    rng = random.Random(7)
    cases = [[0.6, 0.3, 0.1], [0.15, 0.12], [0.12, 0.11, 0.02], [1.1, 1.3, 0.2]]
    for count in (2, 3, 4, 5, 7):
        cases.append([rng.randint(1, 99) / rng.choice([10, 100]) for _ in range(count)])
    return [blended(weights, 80) for weights in cases]


def blend_all_case(rng):
    sizes = [rng.randint(0, 12) for _ in range(rng.randint(1, 6))]
    sizes[0] += 1
    sizes = [s for s in sizes if s]  # Megatron loops forever on an empty one
    total = sum(sizes)
    datasets, samples = numpy.zeros(total, numpy.int16), numpy.zeros(total, numpy.int64)
    helpers_cpp.build_exhaustive_blending_indices(datasets, samples,
                                                  numpy.array(sizes, numpy.int64), len(sizes))
    return {"sizes": sizes, "datasets": datasets.tolist(), "samples": samples.tolist()}


def split_documents(split, documents):
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    ranges = [r and [int(round(b * float(documents))) for b in r] for r in matrix]
    return {"split": split, "documents": documents, "ranges": ranges}


def split_case(rng):
    shares = [rng.choice([0, rng.randint(1, 999), round(rng.random(), 3)])
              for _ in range(rng.randint(1, 3))]
    shares[0] += 1
    shares += [0] * (2 - len(shares))
    return split_documents(",".join(map(str, shares)), rng.randint(0, 200))


def tied_split_cases():
    """Shares whose bounds lie in the middle between two documents."""
    return [split_documents(split, documents)
            for split in ("70,20,10", "0.6,0.3,0.1", "90,10", "0.35,0.65", "1.4,0.2,0.4")
            for documents in (5, 15, 25, 110)]


def shuffle_case(rng):
    seed, sizes = rng.randrange(2**32), [rng.randint(0, 70) for _ in range(3)]
    state, results = numpy.random.RandomState(seed), []
    for size in sizes:
        values = numpy.arange(size)
        state.shuffle(values)
        results.append(values.tolist())
    return {"seed": seed, "results": results}


def main():
    rng = random.Random(12)
    golden = {"samples": [sample_case(rng) for _ in range(60)],
              "blends": [blend_case(rng, n) for n in (1, 2, 3, 5, 8, 9, 17, 40, 150)]
              + tied_blend_cases(),
              "exhaustive": [blend_all_case(rng) for _ in range(12)],
              "splits": [split_case(rng) for _ in range(30)] + tied_split_cases(),
              "shuffles": [shuffle_case(rng) for _ in range(5)]}
    text = json.dumps(golden, separators=(",", ":"))
    target = SOURCE / "tests/datasets/sample_index_golden.json"
    target.write_text(text.replace('},{"', '},\n{"') + "\n")


if __name__ == "__main__":
    main()
