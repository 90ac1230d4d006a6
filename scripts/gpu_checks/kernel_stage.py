"""Stage 2: cuda_test, and its tests of our own kernels again under compute-sanitizer."""

import pathlib
import shutil

from .commands import CommandFailed, Lacking
from .parsing import gtest_failure, gtest_results, sanitizer_findings
from .report import FAILED, OK
from .stages import at_once

NAME, SECONDS, TIMED = "kernels", 110, False
# Our kernels only: libtorch's take minutes under the sanitizer.
KERNELS = {"of updates": "Kernels.AdamW*:Kernels.AStep*:Kernels.Sgd*:Kernels.Sum*:"
                         "Kernels.Fingerprints*",
           "of layers": "LayerKernels.*-LayerKernels.ProductsOf8Bits*"}
SANITIZERS = (["--tool", "memcheck", "--leak-check", "no"], ["--tool", "racecheck"])
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer",
           "/usr/local/cuda/extras/compute-sanitizer")


def tests(context, environment=None):
    """Returns the Result and {test: state} of cuda_test."""
    result = context.run([context.bundle / "tests/cuda_test"], 110,
                         {"OMP_NUM_THREADS": "1"} | (environment or {}))
    return result, gtest_results(result.output)


def told(states):
    counts = {state: list(states.values()).count(state) for state in ("ok", "failed", "skipped")}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def check(context):
    """Without a device, each test runs its CPU half and is then skipped."""
    result, states = tests(context, {"CUDA_VISIBLE_DEVICES": ""})
    if result.status != 0 or not states:
        raise CommandFailed(result.reason())
    return f"cuda_test: {told(states)}"


def add_tests(context):
    result, states = tests(context)
    for name in (name for name, state in states.items() if state == "failed"):
        context.add(name, FAILED, gtest_failure(result.output, name))
    if result.status not in (0, 1) or not states:
        context.add("cuda_test", FAILED, result.reason())
    skipped = [name for name, state in states.items() if state == "skipped"]
    if skipped:
        context.add("cuda_test", FAILED, f"skipped although there is a device: {skipped[0]} ...")
    context.add("cuda_test, tests", OK if result.status == 0 else FAILED, told(states))


def find(name):
    found = shutil.which(name)
    for folder in FOLDERS:
        if not found and pathlib.Path(folder, name).exists():
            found = str(pathlib.Path(folder, name))
    if not found:
        raise Lacking(f"{name} is not on this machine")
    return found


def sanitize(context, words, kernels):
    command = [find("compute-sanitizer"), *words, "--error-exitcode", "9",
               context.bundle / "tests/cuda_test", f"--gtest_filter={KERNELS[kernels]}"]
    result = context.run(command, 90, {"OMP_NUM_THREADS": "1"})
    findings = sanitizer_findings(result.output + result.error)
    if findings is None or (result.status != 0 and not findings):
        raise CommandFailed(result.reason())
    if findings:
        raise CommandFailed(f"{findings} findings, see log.txt")
    return f"nothing found, {told(gtest_results(result.output))}"


def run(context):
    runs = [(words, kernels) for words in SANITIZERS for kernels in KERNELS]
    at_once([lambda: add_tests(context),
             *(lambda words=words, kernels=kernels: context.attempt(
                 f"compute-sanitizer {words[1]}, kernels {kernels}",
                 lambda: sanitize(context, words, kernels)) for words, kernels in runs)],
            1 + len(runs))
