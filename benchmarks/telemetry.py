"""The cost of `train.log_step_times`: runs of configs/tiny.textproto with and without it, in turn.
python benchmarks/telemetry.py BUILD [--ranks 1 2] [--rounds 10] [--steps 300]

The time of a run is that of its process, less that of a run of one step, so the work between two
iterations counts too. Run it in the root of the tree; `scripts/setup text` fetches the text."""

import argparse
import functools
import pathlib
import tempfile
import time

from rounds import run_ranks, show

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIDES = {"with": "true", "without": "false"}


def seconds(build, output, ranks, steps, on):
    begin = time.perf_counter()
    run_ranks([build / "lockstep", "train", ROOT / "configs/tiny.textproto", "--output", output,
               "--set", f"train.train_iters={steps}", "--set", f"train.log_step_times={on}",
               "--set", "train.eval_iters=0", "--set", "train.sample_tokens=0", "--set",
               "checkpoint.save="], ranks)
    return time.perf_counter() - begin


def compare(run, options):
    steps, ratios = {name: [] for name in SIDES}, []
    for round_ in range(options.rounds):
        for name in list(SIDES)[::1 if round_ % 2 else -1]:
            start = run(1, SIDES[name])
            steps[name].append((run(options.steps + 1, SIDES[name]) - start) * 1e3 / options.steps)
        ratios.append((steps["with"][-1] / steps["without"][-1] - 1) * 100)
    for name in SIDES:
        show(f"{name} step times, ms a step", steps[name])
    show("cost, % of a step", ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            print(f"{ranks} ranks, {options.rounds} rounds of {options.steps} steps", flush=True)
            compare(functools.partial(seconds, options.build.resolve(), pathlib.Path(folder) / "run",
                                      ranks), options)


if __name__ == "__main__":
    main()
