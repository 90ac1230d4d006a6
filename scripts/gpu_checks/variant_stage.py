"""Stage 6: ours at 350M with one change at a time, as far as the time allows."""

import json
import statistics

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
TENSOR = ["--set", "parallel.tensor_model_parallel_size=2",
          "--set", "parallel.sequence_parallel=true"]
# Two ranks share the GPU and communicate by sockets: products that wait for them, or do not.
OF_TWO_RANKS = (
    ("two ranks of tp with sp", TENSOR),
    ("the same, overlapped", [*TENSOR, "--set", "parallel.tp_comm_overlap=true"]),
)
WARM_UP, STEPS = 3, 5


def check(context):
    data = write_tokens(context.folder, 1 << 15)
    config = write_config(context, SIZES[1], data)
    settings = [words for _, _, words in VARIANTS] + [words for _, words in OF_TWO_RANKS]
    for words in settings:
        context.run([context.bundle / "lockstep", "train", config, *words, "--print-config"],
                    30).needs()
    return f"{len(settings)} variants are accepted"


def measure_two(context, size, data, words):
    """Measures the median iteration of `lockstep train`."""
    output = context.folder / f"two_ranks_{len(words)}"
    command = [context.bundle / "lockstep", "train", write_config(context, size, data, 1), *words,
               "--set", f"train.device={context.device}",
               "--set", f"train.train_iters={WARM_UP + STEPS}", "--set", "train.log_interval=1",
               "--set", "checkpoint.save=", "--output", output]
    context.train(command, 2, 60)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    times = [line["iteration_ms"] for line in lines if line.get("iteration_ms")][WARM_UP:]
    return f"{statistics.median(times):.1f} ms a step [{min(times):.1f}, {max(times):.1f}]"


def run(context):
    size, data, peak = SIZES[1], write_tokens(context.folder), peak_of(context)
    for name, options, words in VARIANTS:
        context.attempt(f"{size.name}, {name}", lambda: measure_one(
            context, size, data, words, options=options).told(size, peak), VALUE)
    for name, words in OF_TWO_RANKS:
        context.attempt(f"{size.name}, {name}",
                        lambda: measure_two(context, size, data, words), VALUE)
