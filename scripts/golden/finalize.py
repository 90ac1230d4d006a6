"""Writes tests/distributed/finalize_golden.json: the gradients that Megatron Core's
finalize_model_grads makes from given ones, on 8 ranks (tp 2, pp 2, dp 2) of two model chunks.

Gloo has no average, so this script supplies one. The data-parallel sum is a plain all-reduce,
because Megatron's DistributedDataParallel needs CUDA. Run it with torch and megatron-core 0.16.1:
python scripts/golden/finalize.py
"""

import json
import multiprocessing
import os
import pathlib
import types

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

WORLD, TENSOR, PIPELINE, CHUNKS = 8, 2, 2, 2
NUMEL = 5

# Megatron's attributes of each parameter in the test; see parameters_of().
ATTRIBUTES = {
    "embedding": {"shared_embedding": True},
    "norm": {"sequence_parallel": True},
    "q_layernorm": {},
    "router": {"average_gradients_across_tp_domain": True},
    "embedder": {"pipeline_parallel": True},
    "matrix": {},
}


def parameters_of(stage, chunk):
    """Names of a chunk's parameters: the first and the last chunk have the word embedding."""
    ends = (stage, chunk) in ((0, 0), (PIPELINE - 1, CHUNKS - 1))
    return [name for name in ATTRIBUTES if name != "embedding" or ends]


def gradient(name, chunk, rank):
    """Returns binary fractions, so that sums are exact."""
    k = list(ATTRIBUTES).index(name)
    return [((7 * i + 13 * rank + 29 * k + 41 * chunk) % 101) / 16 - 3 for i in range(NUMEL)]


class Chunk(torch.nn.Module):
    ddp_config = types.SimpleNamespace(use_megatron_fsdp=False)

    def __init__(self, config, stage, chunk, rank):
        super().__init__()
        self.config = config
        self.pre_process = stage == 0 and chunk == 0
        self.share_embeddings_and_output_weights = True
        for name in parameters_of(stage, chunk):
            param = torch.nn.Parameter(torch.zeros(NUMEL, dtype=torch.float64))
            for attribute, value in ATTRIBUTES[name].items():
                setattr(param, attribute, value)
            param.main_grad = torch.tensor(gradient(name, chunk, rank), dtype=torch.float64)
            self.register_parameter(name, param)

    def shared_embedding_or_output_weight(self):
        return self.embedding

    def finish_grad_sync(self, force_all_reduce=False):
        for param in self.parameters():
            dist.all_reduce(param.main_grad, group=mpu.get_data_parallel_group())

    def scale_gradients(self, factor):
        for param in self.parameters():
            param.main_grad.mul_(factor)


def use_sums_for_averages():
    plain = dist.all_reduce

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, **options):
        if op != dist.ReduceOp.AVG:
            return plain(tensor, op=op, group=group, **options)
        plain(tensor, group=group)
        tensor.div_(dist.get_world_size(group))

    dist.all_reduce = all_reduce


def run(rank, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    mpu.initialize_model_parallel(TENSOR, PIPELINE)
    use_sums_for_averages()
    stage = mpu.get_pipeline_model_parallel_rank()
    config = types.SimpleNamespace(
        timers=None, has_cond_embedder=True, sequence_parallel=True, qk_layernorm=True,
        mtp_num_layers=None, moe_router_enable_expert_bias=False,
        moe_router_load_balancing_type="aux_loss")
    chunks = [Chunk(config, stage, chunk, rank) for chunk in range(CHUNKS)]
    last = stage == PIPELINE - 1
    tokens = torch.tensor(float(3 + rank) if last else 0.0, dtype=torch.float64)
    finalize_model_grads(chunks, tokens)
    results[rank] = [{name: param.main_grad.tolist() for name, param in chunk.named_parameters()}
                     for chunk in chunks]
    dist.barrier()


def main():
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        results = manager.dict()
        ranks = [context.Process(target=run, args=(rank, results)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
        lines = ",\n".join(json.dumps(results[rank]) for rank in range(WORLD))
    target = pathlib.Path(__file__).parents[2] / "tests/distributed/finalize_golden.json"
    target.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
