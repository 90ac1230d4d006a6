"""Answers megatron_data_test.py's questions to Megatron Core: reads a list of requests as JSON from
standard input and writes the list of answers to the file that the argument names. Needs a Python
with megatron-core 0.16.1."""

import json
import sys
from types import SimpleNamespace

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDataset, GPTDatasetConfig, _get_ltor_masks_and_position_ids)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def write(prefix, dtype, documents):
    """`documents`: lists of sequences, each a list of ids."""
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, dtype))
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(prefix + ".idx")


def write_documents(prefix, dtype, documents):
    """Like preprocess_data.py: `documents` are lists of ids, each a sequence unless it is empty."""
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, dtype))
    for ids in documents:
        builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(prefix + ".idx")


def merge(prefix, dtype, parts):
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, dtype))
    for part in parts:
        builder.add_index(part)
    builder.finalize(prefix + ".idx")


def read(prefix):
    dataset = IndexedDataset(prefix)
    return {"sequences": [dataset[i].tolist() for i in range(len(dataset))],
            "documents": dataset.document_indices.tolist(),
            "dtype": numpy.dtype(dataset.index.dtype).name}


def parts_of(dataset):
    """Returns the data sets of a blend, or the only one."""
    return getattr(dataset, "datasets", [dataset])


def samples(prefixes, weights, split, seq_length, seed, num_samples):
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, blend=(prefixes, weights), split=split,
        num_dataset_builder_threads=1, path_to_cache=None, mmap_bin_files=True,
        tokenizer=SimpleNamespace(vocab_size=None, eod=-1, pad=-1, unique_identifiers={"n": "t"}),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False, mid_level_dataset_surplus=0.005)
    training = BlendedMegatronDatasetBuilder(
        GPTDataset, [num_samples, 0, 0], lambda: True, config).build()[0]
    first = parts_of(training)[0]
    rows = []
    for k in range(num_samples):
        row = training[k]
        rows.append(row["tokens"].tolist() + [row["labels"][-1].item()])
    return {"samples": rows, "documents": first.document_index.tolist(),
            "starts": first.sample_index.tolist(), "order": first.shuffle_index.tolist()}


def marks(samples, end_of_document):
    """Returns the masks and positions of each sample; its last id is only a label."""
    answers = []
    for ids in samples:
        mask, loss, positions = _get_ltor_masks_and_position_ids(
            torch.tensor(ids[:-1]), end_of_document, True, True, True, True)
        answers.append({"hidden": mask[0].tolist(), "loss": loss.tolist(),
                        "positions": positions.tolist()})
    return answers


def main():
    answers = []
    for request in json.load(sys.stdin):
        function = globals()[request.pop("call")]
        answers.append(function(**request))
    with open(sys.argv[1], "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
