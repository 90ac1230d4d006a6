"""Stage 3: every layout over NCCL, its ranks on the one GPU, against the CPU's losses; failures,
each of which must end every rank with names; checkpoints."""

import concurrent.futures
import signal
import time

from . import checkpoint_checks, layouts
from .commands import CommandFailed, end, free_port, rank_environment, start
from .report import FAILED, one_line

NAME, SECONDS = "layouts", 200
RANKS = 3
AT_ONCE = 3  # failures; more would take the GPU from each other
# What straying_rank's last rank does in step 3, and what the other ranks must say.
MISTAKES = {
    "none": None,
    "unfinished": None,
    "skip": "all_reduce (sum) of bucket 2, 1000 x Float (step 3)",
    "throw": f"rank {RANKS - 1}: a fault in step 3",
    "die": f"rank {RANKS - 1} has gone",
}


def check(context):
    """The recorded losses are there and would show a fault, and the program takes each setting."""
    recorded = context.bundle.recorded()
    config = layouts.write_config(context.folder)
    for layout in layouts.LAYOUTS:
        layouts.check_recorded(layout, recorded.get(layout.name, []))
        context.run([context.bundle / "lockstep", "train", config, *layout.overrides(),
                     "--print-config"], 30).needs()
    stray(context, "none", None)
    return f"{len(layouts.LAYOUTS)} layouts with recorded losses; straying_rank runs on the CPU"


def train(context, layout, config, recorded, environment=None):
    name = layout.name.replace(" ", "-").replace(",", "")
    output = context.folder / (name + "-again" if environment else name)
    command = layouts.train_command(context.bundle, config, layout, context.device, output)
    context.train(command, layout.ranks, layout.seconds, environment)
    found = layouts.curve(output)
    context.report.documents.setdefault("losses", {})[layout.name] = found
    good, told = layouts.compare(layout, found, recorded)
    if not good:
        raise CommandFailed(told)
    return told


def stray(context, mistake, expected):
    """CommandFailed unless every rank ends as it must."""
    command = [context.bundle / "tests/straying_rank", mistake, context.device]
    results = context.run_ranks(command, RANKS, 60)
    for rank, result in enumerate(results):
        strays = rank == RANKS - 1
        if result.status is None:
            raise CommandFailed(f"rank {rank} did not end: {result.reason()}")
        if expected is None or (strays and mistake == "die"):
            allowed = -signal.SIGKILL if expected else 0
            if result.status != allowed:
                raise CommandFailed(f"rank {rank}: {result.reason()}")
        elif result.status != 1 or (not strays and expected not in result.error):
            raise CommandFailed(f"rank {rank} does not say {expected!r}: {result.reason()}")
    return f"every rank ended within {max(result.seconds for result in results):.1f} s"


def kill_one(context, config):
    """`lockstep train` on two ranks, of which one is killed: the other must name it and end."""
    port, begun = free_port(), time.monotonic()
    command = [context.bundle / "lockstep", "train", config, "--set", "train.train_iters=100000",
               "--set", f"train.device={context.device}", "--set",
               "parallel.distributed_timeout_seconds=20", "--set", "checkpoint.save=", "--set",
               "train.log_interval=1", "--output", context.folder / "killed"]
    environment = context.bundle.environment()
    processes = [start(command, environment | rank_environment(rank, 2, port, one_gpu=True))
                 for rank in range(2)]
    try:
        metrics = context.folder / "killed/metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            if processes[0].poll() is not None or time.monotonic() - begun > context.seconds(30):
                end(processes[0])
                raise CommandFailed(f"it does not train: {one_line(processes[0].communicate()[1])}")
            time.sleep(0.1)
        end(processes[1])
        killed = time.monotonic()
        error = processes[0].communicate(timeout=context.seconds(25))[1]
    finally:
        for process in processes:
            end(process)
            process.communicate()
    if processes[0].returncode != 1 or "rank 1" not in error:
        raise CommandFailed(f"exit status {processes[0].returncode}: {one_line(error)}")
    return f"rank 0 named it after {time.monotonic() - killed:.1f} s"


def run_failures(context, config):
    """Some at once: they mostly wait."""
    checks = {f"ranks of which one does '{mistake}'":
              (lambda mistake=mistake, says=says: stray(context, mistake, says))
              for mistake, says in MISTAKES.items()}
    checks["lockstep train, one rank killed"] = lambda: kill_one(context, config)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        results = {name: pool.submit(action) for name, action in checks.items()}
    for name, result in results.items():
        context.attempt(name, result.result)


def train_again(context, layout, config, recorded):
    """Where a pipeline fails, a second time with all kernels loaded at the start: loading one
    beside a receive that spins can wait for ever."""
    good = context.attempt(layout.name, lambda: train(context, layout, config, recorded))
    if not good and layout.name.startswith("pp"):
        context.attempt(f"{layout.name}, CUDA_MODULE_LOADING=EAGER", lambda: train(
            context, layout, config, recorded, {"CUDA_MODULE_LOADING": "EAGER"}))


def run(context):
    config = layouts.write_config(context.folder)
    recorded = context.bundle.recorded()
    for number, layout in enumerate(layouts.LAYOUTS):
        if number == 2:  # once two ranks have met: late layouts may find no time left
            run_failures(context, config)
        if layout.name not in recorded:
            context.add(layout.name, FAILED, "no losses were recorded")
            continue
        train_again(context, layout, config, recorded[layout.name])
    checkpoint_checks.run(context, config, recorded)
