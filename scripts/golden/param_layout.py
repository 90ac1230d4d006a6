"""Writes tests/distributed/param_layout_golden.json: the places of parameters and buckets in
Megatron Core's _ParamAndGradBuffer, and the ranges of its DistributedOptimizer, in varied cases.

Buffers are made on the meta device, which replaces the current CUDA device, so nothing is
allocated. A group is its size and rank. Run it with torch and megatron-core 0.16.1:
python scripts/golden/param_layout.py
"""

import json
import pathlib
import random
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

NUM_CASES = 120
MOST_RANGES = 60  # cases with more listed ranges are skipped, which keeps the file small
RANGES = ("gbuf_world", "gbuf_world_in_bucket", "gbuf_local", "param")


class Group:
    """A stand-in for the data-parallel group."""

    def __init__(self, size):
        self.ranks, self.me = size, 0

    def size(self):
        return self.ranks

    def rank(self):
        return self.me


def make_case(numels, ranks, shared=(), bucket_size=None, distributed=True, high_bandwidth=False):
    return {"numels": list(numels), "shared": list(shared), "data_parallel": ranks,
            "bucket_size": bucket_size, "distributed_optimizer": distributed,
            "high_bandwidth": high_bandwidth}


def megatron_buffer(case, params, group):
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=case["distributed_optimizer"],
        pad_buckets_for_high_nccl_busbw=case["high_bandwidth"])
    with mock.patch.object(torch.cuda, "current_device", lambda: "meta"), \
            mock.patch.object(param_and_grad_buffer, "log_on_each_pipeline_stage"):
        return param_and_grad_buffer._ParamAndGradBuffer(
            config, torch.float32, torch.float32, params, group, case["bucket_size"],
            {param: str(i) for i, param in enumerate(params)}, 1.0, list(range(len(params))),
            nccl_ub=False, pg_collection=SimpleNamespace(tp=group, dp_cp=group))


def ranges_of(buffer, group, rank, index_of):
    """[bucket, rank, parameter, length, then the start of each of RANGES]"""
    group.me = rank
    rows = []
    [per_bucket] = DistributedOptimizer._build_gbuf_range_map(buffer).values()
    for bucket, ranges in enumerate(per_bucket):
        for param, own in ranges["param_map"].items():
            assert len({len(own[name]) for name in RANGES}) == 1
            rows.append([bucket, rank, index_of[param], len(own["param"]),
                         *(own[name].start for name in RANGES)])
    return rows


def answer_of(case, rng):
    params = [torch.nn.Parameter(torch.empty(numel, device="meta")) for numel in case["numels"]]
    for index in case["shared"]:
        params[index].shared_embedding = True
    index_of = {param: i for i, param in enumerate(params)}
    group = Group(case["data_parallel"])
    buffer = megatron_buffer(case, params, group)
    answer = {"numel": buffer.numel, "numel_unpadded": buffer.numel_unpadded,
              "slots": [buffer.param_index_map[param] for param in params],
              "buckets": [[bucket.offset, bucket.offset + bucket.grad_data.numel(),
                           bucket.numel_unpadded, [index_of[p] for p in bucket.params_list]]
                          for bucket in buffer.buckets]}
    if case["distributed_optimizer"]:
        answer["ranks"] = sorted(rng.sample(range(group.size()), min(group.size(), 3)))
        answer["ranges"] = [row for rank in answer["ranks"]
                            for row in ranges_of(buffer, group, rank, index_of)]
        if len(answer["ranges"]) > MOST_RANGES:
            return None
    return answer


def random_case(rng):
    count = rng.choice((1, 2, 3, 5, 8, 12))
    largest = rng.choice((50, 700, 20_000, 3_000_000, 5_000_000_000))
    numels = [rng.randint(1, largest) if rng.random() < 0.7 else 64 * rng.randint(1, 40)
              for _ in range(count)]
    return make_case(numels, rng.choice((1, 2, 3, 4, 6, 7, 8, 16, 33, 96, 128, 1000)),
                     [i for i in range(count) if rng.random() < 0.15],
                     rng.choice((None, rng.randint(1, 2 * sum(numels)), rng.choice(numels),
                                 sum(numels) // count, sum(numels))),
                     rng.random() < 0.75, rng.random() < 0.2)


def main():
    rng = random.Random(1)
    documents = []
    while len(documents) < NUM_CASES:
        case = random_case(rng)
        answer = answer_of(case, rng)
        if answer is not None:
            documents.append(case | answer)
    path = pathlib.Path(__file__).resolve().parents[2] / "tests/distributed"
    with open(path / "param_layout_golden.json", "w", encoding="utf-8") as file:
        lines = ",\n".join(json.dumps(d, separators=(",", ":")) for d in documents)
        file.write('{"made_by":"scripts/golden/param_layout.py","megatron_core":"0.16.1",\n'
                   f'"cases":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
