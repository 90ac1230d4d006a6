"""Stage 5: three steps under Kineto, and our kernels under ncu."""

from .commands import CommandFailed
from .kernel_stage import find
from .machine_stage import bench
from .parsing import ncu_metrics
from .report import FAILED, VALUE
from .speed_stage import SIZES, small, write_config, write_tokens

NAME, SECONDS = "profile", 60
KERNELS_TOLD = 8
METRICS = "dram__bytes.sum.per_second,gpu__time_duration.sum"


def profile(context, size, data, *options, seconds=60):
    return bench(context, *options, "profile", write_config(context, size, data), seconds=seconds)


def check(context):
    size = small()
    data = write_tokens(context.folder, 1 << 15, size.vocabulary)
    found = profile(context, size, data, "--device", "cpu")
    keys = {"kernels", "launches", "waits", "copies", "device", "steps"}
    if not found["operators"] or keys - set(found):
        raise CommandFailed(f"a profile of the CPU has {found['operators']} operators and "
                            f"{sorted(found)}")
    return f"Kineto records: {found['operators']} operators in {found['steps']} steps on the CPU"


def add_profile(context, size, found):
    steps, device = found["steps"], found["device"]

    def by_name(key):
        sums = found[key].items()
        return ", ".join(f"{name} {one['calls'] / steps:.1f}" for name, one in sums) or "none"

    launches = sum(one["calls"] for one in found["launches"].values())
    def add(what, detail):
        context.add(f"{size.name}, {what}", VALUE, detail)

    add("launches a step", f"{launches / steps:.0f}; {by_name('launches')}")
    add("waits of the host a step", by_name("waits"))
    add("copies a step", by_name("copies"))
    add("device", f"busy {device['busy_ms'] / steps:.1f} ms a step, idle "
        f"{device['idle_ms'] / steps:.1f}, {device['gaps_over_20_us'] / steps:.0f} gaps over 20 us, "
        f"the longest {device['longest_gap_ms']:.2f} ms")
    for name, one in list(found["kernels"].items())[:KERNELS_TOLD]:
        add(f"{one['ms'] / steps:.2f} ms a step", f"{one['calls'] / steps:.0f} x {name[:100]}")
    if not found["kernels"]:
        context.add("kernels", FAILED, "Kineto recorded none: is libcupti found?")


def add_fused(context):
    """Times our kernels against libtorch's operators: bf16, forward and backward, 1.3B's sizes."""
    found = bench(context, "fused")
    context.report.document("fused", found)
    for name, one in found.items():
        context.add(name, VALUE, f"{one['ms']:.3f} ms, libtorch {one['libtorch_ms']:.3f}; libtorch "
                    f"/ ours {one['libtorch_over_ours']:.2f} [{one['lowest']:.2f}, "
                    f"{one['highest']:.2f}]")


def counters(context):
    """Returns the GB/s of device memory that our kernels reach, by the hardware counters."""
    command = [find("ncu"), "--clock-control", "none", "--csv", "--metrics", METRICS, "-k",
               "regex:adamw|sgd|sum_blocks", "--launch-count", "4",
               context.bundle / "benchmarks/gpu_bench", "kernels"]
    result = context.run(command, 30)
    found = ncu_metrics(result.output)
    if not found:
        raise CommandFailed(result.reason())
    return ", ".join(f"{name.split('(')[0]} " + " ".join(
        f"{value:g} {unit}" for value, unit in metrics.values()) for name, metrics in found.items())


def run(context):
    try:
        for name, one in bench(context, "kernels").items():
            context.add(name, VALUE, f"{one['ms']:.2f} ms, {one['gb_per_s']:.0f} GB/s")
    except CommandFailed as error:
        context.add("our kernels", FAILED, str(error))
    context.attempt("fused operations", lambda: add_fused(context), None)
    data = write_tokens(context.folder)
    for size in reversed(SIZES[1:]):
        try:
            found = profile(context, size, data)
            context.report.document(f"profile-{size.name}", found)
            add_profile(context, size, found)
        except CommandFailed as error:
            context.add(f"{size.name} under Kineto", FAILED, str(error))
    context.attempt("our kernels under ncu", lambda: counters(context))
