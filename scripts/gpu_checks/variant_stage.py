"""Stage 6: ours at 350M with one thing changed at a time, as far as the time goes."""

from .report import VALUE
from .speed_stage import SIZES, measure_one, peak_of, write_config, write_tokens

NAME, SECONDS = "variants", 120
SHARDED = ["--set", "ddp.use_distributed_optimizer=true"]
# Name, options of gpu_bench, settings.
VARIANTS = (
    ("as it is", (), []),
    *((f"attention by {kernel}", ("--attention", kernel), [])
      for kernel in ("cudnn", "flash", "efficient")),
    ("micro-batches recorded", (), ["--set", "train.cuda_graph=microbatch"]),
    ("steps recorded", (), ["--set", "train.cuda_graph=step"]),
    ("buckets of 10M elements", (), ["--set", "ddp.bucket_size=10000000"]),
    ("bf16 gradients", (), ["--set", "ddp.grad_reduce_in_fp32=false"]),
    ("distributed optimizer", (), SHARDED),
    ("recomputation of whole layers", (), ["--set", "model.recompute_granularity=full"]),
    ("deterministic", (), ["--set", "train.deterministic=true"]),
    ("8-bit products, delayed scales", (), ["--set", "train.fp8=hybrid"]),
    ("8-bit products, scales of tensors", (),
     ["--set", "train.fp8=hybrid", "--set", "train.fp8_recipe=tensorwise"]),
    ("8-bit products, scales of rows", (),
     ["--set", "train.fp8=e4m3", "--set", "train.fp8_recipe=rowwise"]),
)


def check(context):
    data = write_tokens(context.folder, 1 << 15)
    config = write_config(context, SIZES[1], data)
    for _, _, words in VARIANTS:
        context.run([context.bundle / "lockstep", "train", config, *words, "--print-config"],
                    30).needs()
    return f"{len(VARIANTS)} variants are accepted"


def run(context):
    size, data, peak = SIZES[1], write_tokens(context.folder), peak_of(context)
    for name, options, words in VARIANTS:
        context.attempt(f"{size.name}, {name}", lambda: measure_one(
            context, size, data, words, options=options).told(size, peak), VALUE)
