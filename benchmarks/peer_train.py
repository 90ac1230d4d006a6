"""One rank of a peer of peers.py. It trains the model in a folder that `lockstep checkpoint export
--hf` wrote (Llama-style), in one of the ways of peer_wrappers.py.

Usage: peer_train.py KIND MODEL TEXT MICRO_BATCH MICRO_BATCHES STEPS, under torchrun's environment.
TEXT is one byte longer than the windows of all steps. They are taken in the order of Megatron's
GPTDataset with Lockstep's default seed. Rank 0 prints one JSON document: the milliseconds and the
loss of each step, and the peak memory in bytes."""

import json
import os
import pathlib
import resource
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from peer_model import Model
from peer_wrappers import prepare, wrap

SEED = 1234


def windows_of_rank(text, length, samples):
    """This rank's windows of each step, [steps, samples, length + 1]."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = tokens.unfold(0, length + 1, length)
    order = np.arange(len(windows))
    np.random.RandomState(SEED).shuffle(order)
    by_step = windows[torch.from_numpy(order)].view(-1, dist.get_world_size(), samples, length + 1)
    return by_step[:, dist.get_rank()]


def train(peer, steps, micro_batches):
    """Returns the milliseconds and this rank's loss of each step."""
    times, losses = [], []
    for windows in steps:
        begin = time.perf_counter()
        peer.zero_grad()
        total = torch.zeros(())
        for m, rows in enumerate(windows.chunk(micro_batches)):
            with peer.micro_batch(last=m + 1 == micro_batches):
                loss = peer.model(rows[:, :-1], rows[:, 1:]) / micro_batches
                loss.backward()
            total += loss.detach()
        peer.step()
        times.append((time.perf_counter() - begin) * 1e3)
        losses.append(total)
    return times, torch.stack(losses)


def main():
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    text = pathlib.Path(sys.argv[3]).read_bytes()
    micro_batch, micro_batches, count = (int(argument) for argument in sys.argv[4:7])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    prepare(kind)
    dist.init_process_group("gloo")
    config = json.loads((folder / "config.json").read_text())
    net = Model(config)
    net.load(folder)
    steps = windows_of_rank(text, config["max_position_embeddings"], micro_batch * micro_batches)
    peer = wrap(kind, net, list(net.layers), clip=1.0, lr=1e-3, betas=(0.9, 0.95),
                weight_decay=0.1)
    times, losses = train(peer, steps[:count], micro_batches)
    dist.all_reduce(losses)
    if dist.get_rank() == 0:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"step": times, "loss": (losses / dist.get_world_size()).tolist(),
                          "memory": memory}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can crash the interpreter while it shuts down


main()
