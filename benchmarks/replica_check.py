"""What train.replica_check_interval costs: runs of a model with it and without it, in turns.
python benchmarks/replica_check.py BUILD [--rounds 5] [--steps 100] [--interval 1] [--limit 1.01]
                                   [--set FIELD=VALUE ...]

A check is made between two iterations, so what is timed is a whole run, less a run of its first five
steps; ratios are of two such times of one round. The model is that of configs/tiny.textproto, or as
--set says. To be run in the root of the tree; `scripts/setup text` fetches the text."""

import argparse
import pathlib
import statistics
import sys
import time

from rounds import run_ranks, show

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARM_UP = 5
LAYOUTS = {
    "dp 2": [],
    "dp 2, distributed optimizer": ["ddp.use_distributed_optimizer=true"],
    "tp 2, sequence parallel": ["parallel.tensor_model_parallel_size=2",
                                "parallel.sequence_parallel=true"],
}


def seconds(options, fields, steps):
    command = [options.build / "lockstep", "train", ROOT / "configs/tiny.textproto"]
    for field in [*options.set, *fields, f"train.train_iters={steps}", "train.eval_iters=0",
                  "train.sample_tokens=0"]:
        command += ["--set", field]
    begin = time.perf_counter()
    run_ranks(command, 2)
    return time.perf_counter() - begin


def milliseconds(options, fields):
    """Of a step, checks included."""
    whole = seconds(options, fields, options.steps + WARM_UP)
    return (whole - seconds(options, fields, WARM_UP)) / options.steps * 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1.01)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    options.build = options.build.resolve()
    missed = False
    for layout, fields in LAYOUTS.items():
        print(f"{layout}, a check every {options.interval}, {options.rounds} rounds of "
              f"{options.steps} steps", flush=True)
        with_check, ratios = [], []
        for number in range(options.rounds):
            kinds = [[], [f"train.replica_check_interval={options.interval}"]]
            times = [0, 0]
            for kind in (0, 1) if number % 2 == 0 else (1, 0):
                times[kind] = milliseconds(options, fields + kinds[kind])
            with_check.append(times[1])
            ratios.append(times[1] / times[0])
        show("a step with it, ms", with_check)
        show("with it / without", ratios, options.limit)
        missed = missed or statistics.median(ratios) > options.limit
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
