"""Stage 1: the machine, the versions, and the rates of copies and matrix products."""

import json

from .commands import CommandFailed
from .parsing import gpu_query
from .report import FAILED, VALUE

NAME, SECONDS = "machine", 45
QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


def bench(context, *words, seconds=60):
    """Returns the JSON output of gpu_bench."""
    command = [context.bundle / "benchmarks/gpu_bench", *words]
    output = context.run(command, seconds).needs().output
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise CommandFailed(f"gpu_bench printed no JSON: {output[-80:]!r}") from None


def doctor(context):
    result = context.run([context.bundle / "lockstep", "doctor", "--json"], 30).needs()
    report = json.loads(result.output)
    versions = report["versions"]
    told = ", ".join(f"{name} {versions[name]}" for name in ("libtorch", "cuda", "nccl"))
    return f"{told}; {report['devices']['cuda']} CUDA devices"


def check(context):
    told = context.bundle.check()
    for command, keys in (("ceilings", {"copy_gb_per_s", "bf16_tflops", "cudnn"}), ("kernels", ()),
                          ("fused", {"SwiGLU"})):
        found = bench(context, "--device", "cpu", "--small", command)
        if not found or set(keys) - set(found):
            raise CommandFailed(f"gpu_bench {command} printed {sorted(found)}")
    return f"{told}; {doctor(context)}"


def gpu(context):
    found = gpu_query(context.run(QUERY, 20).needs().output)
    if not found:
        raise CommandFailed("nvidia-smi lists no GPU")
    return "; ".join(f"{one['name']}, {one['memory']}, driver {one['driver']}" for one in found)


def run(context):
    context.attempt("what travelled", context.bundle.check)
    context.attempt("nvidia-smi", lambda: gpu(context))
    context.attempt("lockstep doctor", lambda: doctor(context))
    try:
        found = bench(context, "ceilings", seconds=40)
    except CommandFailed as error:
        context.add("ceilings", FAILED, str(error))
        return
    context.report.document("ceilings", found)
    context.add("copy on the device", VALUE, f"{found['copy_gb_per_s']:.0f} GB/s")
    products = ", ".join(f"{name} {value:.0f}" for name, value in found["bf16_tflops"].items())
    context.add("bf16 products, TFLOP/s", VALUE, products)
    context.add("cuDNN", VALUE, str(found["cudnn"]))
