"""One rank of a rival of benchmarks/rank_step.cpp, with the same layers, data and AdamW.

Usage: peer_step.py KIND LAYERS WIDTH BATCH STEPS, under torchrun's environment. peer_wrappers.py
lists the kinds. Rank 0 prints one JSON line: the medians of a step's milliseconds and of its minor
page faults, and its peak memory in bytes."""

import json
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist

from peer_wrappers import prepare, wrap

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


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main():
    torch.set_num_threads(1)
    prepare(kind)
    dist.init_process_group("gloo")
    net = make_net()
    peer = wrap(kind, net, list(net), lr=RATE, weight_decay=DECAY)
    data, times, faults = make_data(), [], []
    for _ in range(steps + WARMUPS):
        dist.barrier()
        faults_before, begin = page_faults(), time.perf_counter()
        peer.zero_grad()
        peer.model(data).square().mean().backward()
        peer.step()
        times.append(time.perf_counter() - begin)
        faults.append(page_faults() - faults_before)
    if dist.get_rank() == 0:
        print(json.dumps({"step": statistics.median(times[WARMUPS:]) * 1e3,
                          "faults": round(statistics.median(faults[WARMUPS:])),
                          "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
    dist.barrier()
    dist.destroy_process_group()


main()
