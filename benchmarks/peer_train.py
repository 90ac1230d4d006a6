"""One rank of PyTorch's side of train.py: the model of a folder that
`lockstep checkpoint export --hf` wrote (Llama's form), DistributedDataParallel with its defaults,
clipping and a fused AdamW.

Usage: peer_train.py MODEL TEXT MICRO_BATCH MICRO_BATCHES STEPS, under torchrun's environment. Rank 0
prints one JSON document: the milliseconds of each step, or, for 0 steps, the loss over TEXT as
`lockstep evaluate` defines it."""

import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

from peer_model import Model

folder = pathlib.Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
length = config["max_position_embeddings"]


def windows(tokens, first):
    rows = torch.stack([tokens[i:i + length + 1] for i in first])
    return rows[:, :-1], rows[:, 1:]


def initial_loss(model, tokens):
    starts = range(0, len(tokens) - length, length)
    with torch.no_grad():
        return statistics.fmean(model(*windows(tokens, [i])).item() for i in starts)


def train(model, tokens, micro_batch, micro_batches, steps):
    """Milliseconds of each step."""
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95),
                                  weight_decay=0.1, fused=True)
    torch.manual_seed(dist.get_rank())
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        for m in range(micro_batches):
            first = torch.randint(len(tokens) - length, (micro_batch,))
            model.require_backward_grad_sync = m + 1 == micro_batches
            (model(*windows(tokens, first)) / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def main():
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    micro_batch, micro_batches, steps = (int(argument) for argument in sys.argv[3:6])
    tokens = torch.frombuffer(bytearray(pathlib.Path(sys.argv[2]).read_bytes()),
                              dtype=torch.uint8).long()
    model = Model(config)
    model.load(folder)
    result = (train(model, tokens, micro_batch, micro_batches, steps) if steps
              else initial_loss(model, tokens))
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


main()
