"""One rank of a rival of benchmarks/rank_step.cpp: the same layers, data and AdamW.

Usage: peer_step.py ddp|zero|fsdp2|megatron LAYERS WIDTH BATCH STEPS, under torchrun's environment.
ddp is torch's DistributedDataParallel with its defaults and a fused AdamW; zero the same with
ZeroRedundancyOptimizer, which broadcasts buckets; fsdp2 fully_shard() of each layer, which keeps
the gathered weights between forward and backward; megatron Megatron Core's DistributedOptimizer
with torch's fused AdamW. Rank 0 prints one JSON line: the medians of a step in milliseconds and of
its minor page faults."""

import json
import pathlib
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist

WARMUPS, RATE, DECAY = 3, 3e-4, 0.01

kind = sys.argv[1]
layers, width, batch, steps = (int(argument) for argument in sys.argv[2:6])


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, width) * 0.03)

    def forward(self, x):
        if batch == 0:
            return x + self.weight.sum()
        return torch.tanh(torch.nn.functional.linear(x, self.weight))


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Layer() for _ in range(layers)))


def make_data():
    phase = 1 + 0.1 * dist.get_rank()
    if batch == 0:
        return torch.tensor(phase)
    return torch.sin(torch.arange(batch * width) * phase).view(batch, width)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)


def make_ddp():
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    return model, adamw(model.parameters())


def make_zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = torch.nn.parallel.DistributedDataParallel(make_net())
    return model, ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=RATE,
        weight_decay=DECAY, fused=True)


def make_fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    net = make_net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    model = fully_shard(net, mesh=mesh)
    return model, adamw(model.parameters())


def make_megatron():
    import megatron.core.optimizer
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    parallel_state.initialize_model_parallel(1, 1)
    plain = torch.optim.AdamW.__init__
    torch.optim.AdamW.__init__ = lambda self, *a, **k: plain(self, *a, **(k | {"fused": True}))
    transformer = TransformerConfig(num_layers=1, hidden_size=width, num_attention_heads=1)
    model = DistributedDataParallel(
        transformer, DistributedDataParallelConfig(use_distributed_optimizer=True), make_net())
    settings = OptimizerConfig(optimizer="adam", lr=RATE, weight_decay=DECAY, clip_grad=0.0,
                               use_distributed_optimizer=True)
    return model, get_megatron_optimizer(settings, [model])


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main():
    torch.set_num_threads(1)
    if kind == "megatron":
        tests = pathlib.Path(__file__).resolve().parents[1] / "tests/end_to_end"
        sys.path.insert(0, str(tests))
        from megatron_gpt import stand_in_for_cuda
        stand_in_for_cuda()
    dist.init_process_group("gloo")
    model, optimizer = {"ddp": make_ddp, "zero": make_zero, "fsdp2": make_fsdp2,
                        "megatron": make_megatron}[kind]()
    data, times, faults = make_data(), [], []
    for _ in range(steps + WARMUPS):
        dist.barrier()
        faults_before, begin = page_faults(), time.perf_counter()
        if kind == "megatron":
            model.zero_grad_buffer()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        if kind == "megatron":
            model.finish_grad_sync()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        faults.append(page_faults() - faults_before)
    if dist.get_rank() == 0:
        print(json.dumps({"step": statistics.median(times[WARMUPS:]) * 1e3,
                          "faults": round(statistics.median(faults[WARMUPS:]))}))
    dist.barrier()
    dist.destroy_process_group()


main()
