"""The ways in which PyTorch and Megatron Core train a model on data-parallel ranks, as peers of
Lockstep in peer_step.py and peer_train.py:

  ddp                    DistributedDataParallel with its defaults and a fused AdamW
  zero                   the same with ZeroRedundancyOptimizer, which broadcasts buckets
  fsdp2                  fully_shard() of each layer; gathered weights stay until backward ends
  fsdp2-reshard          the same; they are freed after forward and gathered again in backward
  megatron               Megatron Core's DistributedDataParallel and optimizer; the optimizer uses
                         torch's fused AdamW
  megatron-distributed   the same with Megatron's distributed optimizer

The Megatron kinds run under .venv-megatron (scripts/setup megatron)."""

import contextlib
import pathlib
import sys

import torch
import torch.distributed as dist

KINDS = ("ddp", "zero", "fsdp2", "fsdp2-reshard", "megatron", "megatron-distributed")


def prepare(kind):
    """Call this before the process group is created."""
    if kind.startswith("megatron"):
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/end_to_end"))
        from megatron_gpt import stand_in_for_cuda
        stand_in_for_cuda()


def decayed_groups(model, weight_decay):
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]


class Torch:
    def __init__(self, kind, net, layers, clip, settings):
        self.kind, self.clip = kind, clip
        decay = settings.pop("weight_decay")
        if kind.startswith("fsdp2"):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=kind == "fsdp2-reshard")
            self.model = fully_shard(net, mesh=mesh)
        else:
            self.model = torch.nn.parallel.DistributedDataParallel(net)
        groups = [group for group in decayed_groups(self.model, decay) if group["params"]]
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer
            self.optimizer = ZeroRedundancyOptimizer(
                groups, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **settings)
        else:
            self.optimizer = torch.optim.AdamW(groups, fused=True, **settings)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def micro_batch(self, last):
        """The context for forward and backward of a micro-batch."""
        if self.kind.startswith("fsdp2"):
            self.model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last else self.model.no_sync()

    def step(self):
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


class Megatron:
    def __init__(self, kind, net, clip, settings):
        from megatron.core import parallel_state
        from megatron.core.distributed import (DistributedDataParallel,
                                               DistributedDataParallelConfig)
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        distributed = kind == "megatron-distributed"
        parallel_state.initialize_model_parallel(1, 1)
        plain = torch.optim.AdamW.__init__
        torch.optim.AdamW.__init__ = lambda self, *a, **k: plain(self, *a, **(k | {"fused": True}))
        transformer = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
        self.model = DistributedDataParallel(
            transformer, DistributedDataParallelConfig(use_distributed_optimizer=distributed,
                                                       overlap_grad_reduce=True), net)
        first, second = settings.pop("betas", (0.9, 0.999))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", clip_grad=clip, adam_beta1=first, adam_beta2=second,
                            use_distributed_optimizer=distributed, **settings), [self.model])
        for group in self.optimizer.param_groups:  # as Megatron's parameter scheduler does
            group["weight_decay"] *= group["wd_mult"]

    def zero_grad(self):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def micro_batch(self, last):
        return contextlib.nullcontext() if last else self.model.no_sync()

    def step(self):
        self.model.finish_grad_sync()
        self.optimizer.step()


def wrap(kind, net, layers, clip=0.0, **settings):
    """Wraps `net` for all ranks, with an AdamW with `settings` (lr, weight_decay and, if not the
    defaults, betas). If `clip` is not 0, gradients are clipped to that norm. `layers` are the units
    that FSDP2 shards."""
    if kind.startswith("megatron"):
        return Megatron(kind, net, clip, settings)
    return Torch(kind, net, layers, clip, settings)
