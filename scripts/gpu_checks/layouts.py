"""The layouts of several ranks that are trained, and their comparison with the CPU."""

import dataclasses
import json
import math
import pathlib

STEPS = 10
# Relative tolerances of losses and gradient norms. At a higher learning rate an H100 differed by
# 4.4e-6 and 1.2e-5 in fp32.
FP32, BF16 = (1e-5, 1e-4), (0.02, 0.15)

# At a learning rate of 0.003, a step of eight layers had a gradient norm of 254; layouts on the CPU
# then differed by 2.5e-3.
CONFIG = """
model {{
  num_layers: 2 hidden_size: 64 num_attention_heads: 4 ffn_hidden_size: 128 seq_length: 64
  vocab_size: 256 position_embedding_type: "rope"
}}
optimizer {{ lr: 0.001 weight_decay: 0.1 clip_grad: 1 lr_decay_style: "constant" }}
data {{ path: "{text}" tokenizer: "byte" }}
train {{ micro_batch_size: 2 global_batch_size: 4 train_iters: {steps} eval_iters: 0 }}
"""


@dataclasses.dataclass
class Layout:
    name: str
    ranks: int
    settings: tuple[str, ...]
    tolerances: tuple[float, float] = FP32
    seconds: float = 60

    def overrides(self, device="cuda"):
        """The CPU has no CUDA graphs; it gives the losses of the run without them."""
        return [word for setting in self.settings for word in ("--set", setting)
                if device != "cpu" or not setting.startswith("train.cuda_graph=")]


SHARDED = ("ddp.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=true",
           "ddp.overlap_param_gather=true", "ddp.bucket_size=20000")
BF16_GRADIENTS = ("train.precision=bf16", "ddp.grad_reduce_in_fp32=false")
EXPERTS = ("model.num_experts=4", "model.moe_router_topk=2")
STAGES = ("train.micro_batch_size=1",)
CONTEXT = ("parallel.context_parallel_size=2",)

# The most informative first: if time runs out, the last are skipped.
LAYOUTS = (
    Layout("one rank", 1, ()),
    Layout("dp2", 2, ()),
    Layout("dp2, sharded, both overlaps", 2, SHARDED),
    Layout("dp2, bf16 gradients, averaged", 2,
           (*BF16_GRADIENTS, "ddp.calculate_per_token_loss=false"), BF16),
    Layout("dp2, bf16 gradients, by tokens", 2, BF16_GRADIENTS, BF16),
    Layout("tp2 with sp", 2,
           ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")),
    Layout("tp2 with sp, overlapped", 2,
           ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
            "parallel.tp_comm_overlap=true")),
    Layout("one rank, steps recorded", 1, ("train.cuda_graph=step",)),
    Layout("dp2, sharded, steps recorded", 2, (*SHARDED, "train.cuda_graph=step")),
    Layout("dp2, micro-batches recorded", 2,
           ("train.micro_batch_size=1", "train.cuda_graph=microbatch")),
    Layout("pp4 x 2 chunks", 4,
           (*STAGES, "model.num_layers=8", "parallel.pipeline_model_parallel_size=4",
            "parallel.virtual_pipeline_model_parallel_size=2")),
    Layout("pp2", 2, (*STAGES, "parallel.pipeline_model_parallel_size=2")),
    Layout("pp2, zb-h1", 2, (*STAGES, "parallel.pipeline_model_parallel_size=2",
                             "parallel.pipeline_schedule=zb-h1")),
    Layout("cp2, p2p", 2, CONTEXT),
    Layout("cp2, a2a", 2, (*CONTEXT, "parallel.cp_comm_type=a2a")),
    Layout("cp2, all_gather", 2, (*CONTEXT, "parallel.cp_comm_type=all_gather")),
    Layout("cp2, p2p, bf16", 2, (*CONTEXT, "train.precision=bf16"), BF16),
    Layout("ep2", 2, (*EXPERTS, "parallel.expert_model_parallel_size=2")),
)


def write_text(path):
    """Writes text from which a small model learns something in ten steps."""
    path.write_text("".join(f"{i} squared is {i * i}. " for i in range(4000)))


def write_config(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "text")
    config = folder / "layouts.textproto"
    config.write_text(CONFIG.format(text=folder / "text", steps=STEPS))
    return config


def curve(folder):
    """Returns (loss, gradient norm) of each iteration that a run wrote."""
    lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [(entry["lm_loss"], entry["grad_norm"]) for entry in entries if "lm_loss" in entry]


def check_recorded(layout, recorded):
    """Raises ValueError if the recorded losses would not show a run that fails to train."""
    if len(recorded) != STEPS:
        raise ValueError(f"{layout.name}: {len(recorded)} recorded steps, allowed: {STEPS}")
    losses = [loss for loss, _ in recorded]
    if not losses[0] - losses[-1] > 4 * layout.tolerances[0] * losses[0]:
        raise ValueError(f"{layout.name}: the recorded loss goes from {losses[0]:.4f} to "
                         f"{losses[-1]:.4f}, too little to see that a run trains")


def compare(layout, found, recorded):
    """Returns (whether it is within the tolerances, the details)."""
    if len(found) != len(recorded):
        return False, f"{len(found)} steps, recorded: {len(recorded)}"
    names, worst = ("loss", "norm"), [(0.0, 0)] * 2
    for step, (here, there) in enumerate(zip(found, recorded), 1):
        for i, (value, expected) in enumerate(zip(here, there)):
            apart = math.inf
            if value is not None and math.isfinite(value):
                apart = abs(value - expected) / max(abs(expected), 1e-12)
            worst[i] = max(worst[i], (apart, step))
    good = all(apart <= allowed for (apart, _), allowed in zip(worst, layout.tolerances))
    told = [f"{name} apart by {apart:.1e} at step {step} (allowed {allowed:g})"
            for name, (apart, step), allowed in zip(names, worst, layout.tolerances)]
    return good, "; ".join(told)


def train_command(bundle, config, layout, device, output):
    return [bundle / "lockstep", "train", config, *layout.overrides(device), "--set",
            f"train.device={device}", "--set", "checkpoint.save=", "--output", output]
