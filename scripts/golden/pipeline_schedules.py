"""Writes tests/pipeline/pipeline_golden.json: the order in which Megatron Core's schedules run the
micro-batches on each pipeline rank, and how it splits layers into stages.

Its forward_backward functions run with steps that only record the calls and a communicator that
sends nothing, so one process can be any rank of any pipeline. Run it with torch and megatron-core
0.16.1: python scripts/golden/pipeline_schedules.py
"""

import json
import pathlib
import random
import types
from unittest import mock

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

LARGEST_LISTED = 24  # tasks of a rank; longer schedules are hashed


def fnv1a(text):
    """The 64-bit FNV-1a hash, in hexadecimal digits."""
    result = 0xcbf29ce484222325
    for byte in text.encode():
        result = (result ^ byte) * 0x100000001b3 % 2**64
    return f"{result:016x}"


class Group:
    def __init__(self, size=1, rank=0):
        self.sizes = size, rank

    def size(self):
        return self.sizes[0]

    def rank(self):
        return self.sizes[1]


class Communicator:
    """Answers every call; the received values do not matter."""

    def __init__(self, config, pipeline, rank):
        self.config, self.pp_group = config, Group(pipeline, rank)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def __getattr__(self, name):
        received = name.count("recv") and 1 + name.count("recv_forward_backward")
        return lambda *_, **__: (object(), object()) if received == 2 else object()


class Chunk(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.model_type = config, None


def megatron_config(shape):
    class Config(types.SimpleNamespace):
        def __getattr__(self, name):  # all other fields are unset
            if name.startswith("__"):
                raise AttributeError(name)
            return None
    return Config(virtual_pipeline_model_parallel_size=shape["virtual"] if shape["virtual"] > 1
                  else None, microbatch_group_size_per_vp_stage=shape["group"], hidden_size=1,
                  cuda_graph_scope=[])


def order_of(shape, rank, forward_only):
    """Returns the tasks of one rank, and Megatron Core's number of warm-up micro-batches."""
    tasks, config = [], megatron_config(shape)

    def forward_step(*_, current_microbatch, vp_stage=None, **__):
        made = types.SimpleNamespace(name=f"{current_microbatch}.{vp_stage or 0}")
        tasks.append("F" + made.name)
        return ([made] if shape["virtual"] == 1 else made), 0

    def backward_step(_, output, *__):
        made = output[0] if shape["virtual"] == 1 else output
        tasks.append("B" + made.name)

    groups = types.SimpleNamespace(tp=Group(), cp=Group(), pp=None, dp_cp=None, embd=None,
                                   pos_embd=None)
    communicator = Communicator(config, shape["pipeline"], rank)
    chunks = [Chunk(config) for _ in range(shape["virtual"])]
    run = (schedules.forward_backward_pipelining_with_interleaving if shape["virtual"] > 1
           else schedules.forward_backward_pipelining_without_interleaving)
    zeros = torch.zeros
    with mock.patch.multiple(schedules, forward_step=forward_step, backward_step=backward_step,
                             deallocate_output_tensor=lambda *_: None,
                             create_cudagraphs=lambda: None), \
            mock.patch.object(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k)):
        run(forward_step_func=None, data_iterator=[None] * shape["virtual"], model=chunks,
            num_microbatches=shape["microbatches"], seq_length=1, micro_batch_size=1,
            forward_only=forward_only, p2p_communicator=communicator, pg_collection=groups)
    warmup = schedules.get_pp_rank_microbatches(
        shape["microbatches"], shape["virtual"], shape["group"], forward_only=forward_only,
        p2p_communicator=communicator)[2]
    return " ".join(tasks), warmup


def schedule_document(shape, forward_only=False):
    orders, warmup = zip(*(order_of(shape, rank, forward_only)
                           for rank in range(shape["pipeline"])))
    listed = len(orders[0].split()) <= LARGEST_LISTED
    return shape | {"forward_only": forward_only, "warmup": list(warmup),
                    "order": list(orders) if listed else [fnv1a(order) for order in orders]}


def shape_of(pipeline, virtual, microbatches, group):
    return {"pipeline": pipeline, "virtual": virtual, "microbatches": microbatches, "group": group}


def schedule_documents():
    shapes = [shape_of(p, 1, m, p) for p in (2, 3, 4, 7, 16) for m in (1, 2, 3, 4, 8, 15, 16, 64)]
    shapes += [shape_of(2, 2, 4, 2), shape_of(4, 2, 8, 4), shape_of(4, 2, 4, 4),
               shape_of(2, 2, 5, 3), shape_of(16, 4, 64, 16)]
    rng = random.Random(1)
    while len(shapes) < 200:
        shape = shape_of(rng.randint(2, 16), rng.randint(2, 4), rng.randint(2, 64),
                         rng.randint(2, 64))
        if shape["group"] > rng.randint(2, 64) and rng.random() < 0.7:
            shape["group"] = shape["pipeline"]
        try:
            order_of(shape, 0, False)
        except (RuntimeError, ValueError):  # Megatron Core refuses the group size
            continue
        if shape not in shapes:
            shapes.append(shape)
    return ([schedule_document(shape) for shape in shapes] +
            [schedule_document(shape, True) for shape in shapes[10:60:5]])


def refusals():
    """Returns Megatron Core's allowed group sizes for each pair of ranks and micro-batches."""
    taken = []
    for pipeline in (2, 3, 5, 8):
        for microbatches in (1, 4, 7, 12, 16, 23):
            sizes = []
            for group in range(1, 26):
                try:
                    order_of(shape_of(pipeline, 2, microbatches, group), 0, True)
                    sizes.append(group)
                except (RuntimeError, ValueError):
                    pass
            taken.append([pipeline, microbatches, sizes])
    return taken


LETTERS = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m",
           LayerType.loss: "L"}
LAYOUTS = [("Et|t*4|t|tL", 4), ("E|t*6|t|L", 4), ("E|t|t*2|t||(t|)*2,t*2,L", 4),
           ("Et*3|(tt|)*29,m|L", 16), ("E|t|tt|t||t|t|ttL", 4), ("(E)*1(t|)*3,tL", 2),
           ("EtttL", 1), ("E|(t,t|)*2(|t)*2tL", 3)]


def layout_documents():
    documents = []
    for text, stages in LAYOUTS:
        layout = PipelineParallelLayerLayout(text, stages)
        documents.append({
            "text": text, "pipeline": stages,
            "virtual": layout.virtual_pipeline_model_parallel_size,
            "stages": [["".join(LETTERS[kind] for kind in chunk) for chunk in rank]
                       for rank in layout.layout]})
    return documents


def split_document(split):
    """Returns each chunk's first layer and number of layers on each rank; None if refused."""
    config = types.SimpleNamespace(
        num_layers=split["layers"], pipeline_model_parallel_size=split["pipeline"],
        virtual_pipeline_model_parallel_size=split["virtual"] if split["virtual"] > 1 else None,
        num_layers_in_first_pipeline_stage=split["first"],
        num_layers_in_last_pipeline_stage=split["last"], pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=split["embedding"],
        account_for_loss_in_pipeline_split=split["loss"])
    chunks = range(split["virtual"])
    try:
        return split | {"stages": [
            [[get_transformer_layer_offset(config, c if split["virtual"] > 1 else None, rank),
              get_num_layers_to_build(config, c if split["virtual"] > 1 else None, rank)]
             for c in chunks] for rank in range(split["pipeline"])]}
    except AssertionError:
        return split | {"stages": None}


def split_documents():
    documents, rng = [], random.Random(2)
    def add(layers, pipeline, virtual=1, first=None, last=None, embedding=False, loss=False):
        documents.append(split_document({
            "layers": layers, "pipeline": pipeline, "virtual": virtual, "first": first,
            "last": last, "embedding": embedding, "loss": loss}))
    add(63, 4, loss=True)
    add(62, 4, embedding=True, loss=True)
    add(62, 4, 2, embedding=True, loss=True)
    while len(documents) < 120:
        uneven, pipeline = rng.random() < 0.5, rng.randint(2, 6)
        end = lambda: rng.choice((None, 2, 4, 6)) if uneven else None
        flag = lambda: not uneven and rng.random() < 0.5
        add(rng.randint(1, 8) * 4 + rng.choice((0, 0, -1, -2)), pipeline, rng.choice((1, 1, 2, 3)),
            end(), end(), flag(), flag())
    return documents


def main():
    def lines(documents):
        return ",\n".join(json.dumps(d, separators=(",", ":")) for d in documents)
    path = pathlib.Path(__file__).resolve().parents[2] / "tests/pipeline/pipeline_golden.json"
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"made_by":"scripts/golden/pipeline_schedules.py","megatron_core":"0.16.1",\n'
                   f'"schedules":[\n{lines(schedule_documents())}\n],\n'
                   f'"group_sizes":[\n{lines(refusals())}\n],\n'
                   f'"layouts":[\n{lines(layout_documents())}\n],\n'
                   f'"splits":[\n{lines(split_documents())}\n]}}\n')


if __name__ == "__main__":
    main()
