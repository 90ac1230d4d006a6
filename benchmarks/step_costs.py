"""The cost of a setting that acts between two iterations: runs with it and without it, in turn.

The time of a run is that of the whole run, less that of its first five steps. Ratios are of two
such times of one round, and also of the processor time of all ranks, which other work on the
machine disturbs less. The model is that of configs/tiny.textproto on two ranks, or as --set says.
Run it in the root of the tree; `scripts/setup text` fetches the text."""

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

from rounds import show

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARM_UP = 5
LAYOUTS = {
    "dp 2": [],
    "dp 2, distributed optimizer": ["ddp.use_distributed_optimizer=true"],
    "tp 2, sequence parallel": ["parallel.tensor_model_parallel_size=2",
                                "parallel.sequence_parallel=true"],
}


def times_of_run(options, fields, steps):
    """Returns the elapsed seconds and the processor seconds."""
    command = [options.build / "lockstep", "launch", "-n", "2", "--starter", "own", "--", "train",
               ROOT / "configs/tiny.textproto"]
    for field in [*options.set, *fields, f"train.train_iters={steps}", "train.eval_iters=0",
                  "train.sample_tokens=0"]:
        command += ["--set", field]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"},
                            capture_output=True, timeout=300, check=False)
    if result.returncode:
        sys.exit(result.stderr.decode()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (time.perf_counter() - begin,
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def milliseconds(options, fields):
    """Returns both times of a step, including the time between two steps."""
    whole = times_of_run(options, fields, options.steps + WARM_UP)
    start = times_of_run(options, fields, WARM_UP)
    return [(all_of_it - of_start) / options.steps * 1000
            for all_of_it, of_start in zip(whole, start)]


def compare(description, settings, common=(), limit=1.01):
    """Prints for each layout the time of a step with settings(options), compared with a step
    without them. Both have the settings `common`."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--limit", type=float, default=limit)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    options.build = options.build.resolve()
    missed = False
    for layout, fields in LAYOUTS.items():
        print(f"{layout}, once every {options.interval}, {options.rounds} rounds of "
              f"{options.steps} steps", flush=True)
        with_it, ratios, of_processors = [], [], []
        for number in range(options.rounds):
            kinds = [[*common], [*common, *settings(options)]]
            times = [0, 0]
            for kind in (0, 1) if number % 2 == 0 else (1, 0):
                times[kind] = milliseconds(options, fields + kinds[kind])
            with_it.append(times[1][0])
            ratios.append(times[1][0] / times[0][0])
            of_processors.append(times[1][1] / times[0][1])
        show("a step with it, ms", with_it)
        show("with it / without", ratios, options.limit)
        show("processor time with it / without", of_processors)
        missed = missed or statistics.median(ratios) > options.limit
    sys.exit(1 if missed else 0)
