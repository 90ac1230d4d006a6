"""PyTorch's side of the steps that scripts/gpu_check times: the model of peer_model.py under
autocast to bf16, with fp32 weights, accumulation over micro-batches, clipping and a fused AdamW.

Usage: peer_cuda.py SIZES eager|compile cuda|cpu MICRO_BATCH MICRO_BATCHES, where SIZES is JSON. It
answers like `gpu_bench steps`. It first prints a line of JSON with the number of parameters. Then
it reads numbers from standard input, one a line: it runs that many steps and prints a line with the
mean milliseconds of a step, the last loss and the peak of allocated device memory in bytes."""

import json
import sys
import time

import torch

from peer_model import Model


def tell(**line):
    print(json.dumps(line), flush=True)


class Training:
    def __init__(self, sizes, mode, device, micro_batch, micro_batches):
        self.device, self.micro_batches = device, micro_batches
        self.shape = (micro_batch, sizes["max_position_embeddings"] + 1)
        self.vocabulary = sizes["vocab_size"]
        torch.manual_seed(1)
        with torch.device(device):
            self.model = Model(sizes)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        if mode == "compile":
            # All layers are alike: one is compiled and serves all.
            for layer in self.model.layers:
                layer.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95),
                                           weight_decay=0.1, fused=True)

    def batch(self):
        ids = torch.randint(self.vocabulary, self.shape)
        if self.device == "cuda":
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        return ids[:, :-1], ids[:, 1:]

    def step(self):
        """Returns the loss; the host waits for it, as in `lockstep train`."""
        total = 0
        for _ in range(self.micro_batches):
            with torch.autocast(self.device, torch.bfloat16):
                loss = self.model(*self.batch()) / self.micro_batches
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self):
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else 0


def main():
    sizes, mode, device = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    training = Training(sizes, mode, device, int(sys.argv[4]), int(sys.argv[5]))
    tell(parameters=sum(parameter.numel() for parameter in training.model.parameters()))
    for line in sys.stdin:
        steps, loss, begin = int(line), 0.0, time.perf_counter()
        for _ in range(steps):
            loss = training.step()
        training.synchronize()
        tell(ms=(time.perf_counter() - begin) * 1e3 / steps, loss=loss,
             peak_bytes=training.peak_bytes())


main()
