"""Writes tests/parallel_state/rank_groups_golden.json: every group that Megatron Core creates in
initialize_model_parallel, and its pipeline getters, for varied sizes of a job.

torch.distributed.new_group is replaced by one that only records the ranks, so one process can be
any rank of any world. Run it with torch, numpy, einops and megatron-core 0.16.1:
python scripts/golden/rank_groups.py
"""

import contextlib
import json
import pathlib
import random
from unittest import mock

import torch
from megatron.core import parallel_state as mpu

# Kind in `lockstep plan groups` -> group_desc in Megatron Core.
KINDS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "dp-cp": "DATA_PARALLEL_GROUP_WITH_CP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "tp-pp": "MODEL_PARALLEL_GROUP",
    "tp-dp": "TENSOR_AND_DATA_PARALLEL_GROUP",
    "tp-cp": "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "tp-dp-cp": "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "expert-tp": "EXPERT_TENSOR_PARALLEL_GROUP",
    "expert-dp": "EXPERT_DATA_PARALLEL_GROUP",
    "tp-ep": "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "tp-ep-pp": "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "embedding": "EMBEDDING_GROUP",
    "position-embedding": "POSITION_EMBEDDING_GROUP",
    "intra-dp-cp": "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "intra-expert-dp": "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0",
    "inter-optimizer": "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1",
    "intra-optimizer": "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
}
LARGEST_LISTED = 12  # ranks; for larger worlds each kind's lists are hashed
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-cp-pp-ep-dp", "tp-pp-dp", "dp-tp-pp",
          "ep-tp-cp-dp-pp", "cp-tp-dp-ep-pp", "tp-ep-dp-pp", "cp-dp-tp-pp", "tp-dp-pp", "ep-dp-pp",
          "pp-dp-cp-tp-ep")


def fnv1a(text):
    """The 64-bit FNV-1a hash, in hexadecimal digits."""
    result = 0xcbf29ce484222325
    for byte in text.encode():
        result = (result ^ byte) * 0x100000001b3 % 2**64
    return f"{result:016x}"


class Group:
    """A stand-in for a process group: its ranks, seen by one of them."""

    def __init__(self, ranks, me):
        self.ranks, self.me = list(ranks), me

    def size(self):
        return len(self.ranks)

    def rank(self):
        return self.ranks.index(self.me) if self.me in self.ranks else -1


@contextlib.contextmanager
def megatron(case, rank):
    """Initializes Megatron Core as `rank`; yields the ranks of all groups by description."""
    created = {}

    def new_group(ranks=None, group_desc=None, **_):
        created.setdefault(group_desc, []).append([int(r) for r in ranks])
        return Group(ranks, rank)

    with mock.patch.multiple(torch.distributed, new_group=new_group, is_initialized=lambda: True,
                             get_rank=lambda group=None: rank if group is None else group.rank(),
                             get_world_size=lambda group=None: case["world_size"] if group is None
                             else group.size()):
        try:
            mpu.initialize_model_parallel(
                case["tensor"], case["pipeline"], case["virtual_pipeline"],
                context_parallel_size=case["context"],
                hierarchical_context_parallel_sizes=case["hierarchical_context"] or None,
                expert_model_parallel_size=case["expert"],
                expert_tensor_parallel_size=case["expert_tensor"],
                num_distributed_optimizer_instances=case["optimizer_instances"],
                order=case["order"], create_gloo_process_groups=False)
            yield created
        finally:
            mpu.destroy_model_parallel()
            mpu._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = None


def make_case(world_size, **sizes):
    case = {"tensor": 1, "pipeline": 1, "virtual_pipeline": None, "context": 1, "expert": 1,
            "expert_tensor": None, "order": ORDERS[0], "optimizer_instances": 1,
            "hierarchical_context": []}
    return {"world_size": world_size} | case | sizes


def groups_of(case):
    with megatron(case, 0) as created:
        groups = {kind: created.get(desc, []) for kind, desc in KINDS.items()}
        if case["optimizer_instances"] == 1:  # these are the same objects in Megatron Core
            groups["intra-dp-cp"] = groups["dp-cp"]
            groups["intra-expert-dp"] = groups["expert-dp"]
        for level in range(len(case["hierarchical_context"])):
            groups[f"cp-level-{level}"] = created[f"HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L{level}"]
    if case["world_size"] <= LARGEST_LISTED:
        return groups
    return {kind: fnv1a(json.dumps(lists, separators=(",", ":"))) for kind, lists in groups.items()}


def pipeline_of(case, rank):
    """[stage, previous, next, first, last rank, in position-embedding group, in embedding group],
    then for each chunk [is first, is last, in embedding group]."""
    with megatron(case, rank):
        chunks = case["virtual_pipeline"] or 1
        return [mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_prev_rank(),
                mpu.get_pipeline_model_parallel_next_rank(),
                mpu.get_pipeline_model_parallel_first_rank(),
                mpu.get_pipeline_model_parallel_last_rank(),
                mpu.is_rank_in_position_embedding_group(), mpu.is_rank_in_embedding_group(),
                [[mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=c),
                  mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=c),
                  mpu.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=c)]
                 for c in range(chunks)]]


def random_case(rng):
    size = lambda *choices: rng.choice(choices)
    context = size(1, 1, 1, 2, 3, 4)
    return make_case(
        rng.choice((4, 6, 8, 8, 12, 12, 16, 24, 32, 48, 64, 96, 128)), tensor=size(1, 1, 2, 3, 4),
        pipeline=size(1, 2, 3, 4), context=context, expert=size(1, 2, 3, 4),
        expert_tensor=size(None, 1, 2), order=rng.choice(ORDERS),
        optimizer_instances=size(1, 1, 2, 3),
        hierarchical_context=[2, 2] if context == 4 else [])


def main():
    cases = [make_case(8), make_case(8, tensor=2, pipeline=4),
             make_case(12, tensor=2, pipeline=3, virtual_pipeline=2),
             make_case(8, pipeline=4, virtual_pipeline=3, order="pp-dp"),
             make_case(16, context=16, hierarchical_context=[2, 2, 4]),
             make_case(12, context=12, hierarchical_context=[2, 3, 2]),
             make_case(12, context=3, optimizer_instances=6),  # instances cut across contexts
             make_case(8, expert=2, optimizer_instances=2),
             make_case(1024, tensor=8, pipeline=4, context=2, expert=4, expert_tensor=2,
                       optimizer_instances=4)]
    documents, rng = [], random.Random(1)
    for case in cases:
        documents.append({"sizes": case, "groups": groups_of(case)})
    while len(documents) < 120:
        case = random_case(rng)
        if case in [document["sizes"] for document in documents]:
            continue
        with contextlib.suppress(AssertionError, RuntimeError, ValueError):
            documents.append({"sizes": case, "groups": groups_of(case)})
    for document in documents[:40]:  # not all, to keep the file small
        if document["sizes"]["world_size"] <= LARGEST_LISTED:
            document["pipeline"] = [pipeline_of(document["sizes"], rank)
                                    for rank in range(document["sizes"]["world_size"])]
    path = pathlib.Path(__file__).resolve().parents[2] / "tests/parallel_state"
    with open(path / "rank_groups_golden.json", "w", encoding="utf-8") as file:
        lines = ",\n".join(json.dumps(d, separators=(",", ":")) for d in documents)
        file.write('{"made_by":"scripts/golden/rank_groups.py","megatron_core":"0.16.1",\n'
                   f'"cases":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
