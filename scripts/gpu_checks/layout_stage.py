"""Stage 3: every layout over NCCL, with all ranks on the one GPU, against the CPU's losses;
failures, after which every rank must end and name the culprit; checkpoints."""

import os
import signal
import time

from . import checkpoint_checks, layouts
from .commands import CommandFailed, end, free_port, rank_environment, start
from .report import FAILED, one_line
from .stages import at_once

NAME, SECONDS, TIMED = "layouts", 110, False
RANKS = 3
# Concurrent runs; more would starve each other of the GPU or, in a rehearsal, of the few cores.
AT_ONCE = max(2, min(5, (os.cpu_count() or 1) // 3))
# The mistake of straying_rank's last rank in step 3, and the message of the other ranks.
MISTAKES = {
    "none": None,
    "unfinished": None,
    "skip": "all_reduce (sum) of bucket 2, 1000 x Float (step 3)",
    "throw": f"rank {RANKS - 1}: a fault in step 3",
    "die": f"rank {RANKS - 1} has exited",
}


def check(context):
    """The recorded losses exist and would show a fault, and the program accepts each setting."""
    recorded = context.bundle.recorded()
    config = layouts.write_config(context.folder)
    for layout in layouts.LAYOUTS:
        layouts.check_recorded(layout, recorded.get(layout.name, []))
        context.run([context.bundle / "lockstep", "train", config, *layout.overrides(),
                     "--print-config"], 30).needs()
    stray(context, "none", None)
    return f"{len(layouts.LAYOUTS)} layouts with recorded losses; straying_rank runs on the CPU"


def train(context, layout, config, recorded):
    name = layout.name.replace(" ", "-").replace(",", "")
    output = context.folder / name
    command = layouts.train_command(context.bundle, config, layout, context.device, output)
    context.train(command, layout.ranks, layout.seconds)
    found = layouts.curve(output)
    context.report.documents.setdefault("losses", {})[layout.name] = found
    good, told = layouts.compare(layout, found, recorded)
    if not good:
        raise CommandFailed(told)
    return told


def stray(context, mistake, expected):
    """Raises CommandFailed unless every rank ends as expected."""
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
    """Runs `lockstep train` on two ranks and kills one: the other must name it and end."""
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


def failures(context, config):
    """Returns {name: action}."""
    checks = {f"ranks of which one does '{mistake}'":
              (lambda mistake=mistake, says=says: stray(context, mistake, says))
              for mistake, says in MISTAKES.items()}
    return checks | {"lockstep train, one rank killed": lambda: kill_one(context, config)}


def train_row(context, layout, config, recorded):
    if layout.name in recorded:
        context.attempt(layout.name,
                        lambda: train(context, layout, config, recorded[layout.name]))
    else:
        context.add(layout.name, FAILED, "no losses were recorded")


def run(context):
    """Runs the most informative checks first: late ones may have no time left."""
    config = layouts.write_config(context.folder)
    recorded = context.bundle.recorded()
    trained = [lambda layout=layout: train_row(context, layout, config, recorded)
               for layout in layouts.LAYOUTS]
    failing = [lambda name=name, action=action: context.attempt(name, action)
               for name, action in failures(context, config).items()]
    saved = [lambda: checkpoint_checks.run(context, config, recorded)]
    at_once([*trained[:2], *saved, *failing, *trained[2:]], AT_ONCE)
