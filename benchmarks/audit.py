"""The cost of the gradient audit: runs of configs/tiny.textproto with and without `--audit`, in
turn. python benchmarks/audit.py BUILD [--rounds 5] [--steps 30] [--limit 3]

The time of a step with audit is the time of the audit plus the median step of the same run; the
ratio divides it by that median step. Steps after the audit are compared with those of a run without
it. The first five steps do not count. Run it in the root of the tree; `scripts/setup text` fetches
the text."""

import argparse
import json
import pathlib
import re
import statistics
import sys
import tempfile

from rounds import run_ranks, show

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARM_UP = 5
LAYOUTS = {
    "1 rank": (1, []),
    "dp 2": (2, []),
    "dp 2, distributed optimizer": (2, ["ddp.use_distributed_optimizer=true"]),
    "tp 2, sequence parallel": (2, ["parallel.tensor_model_parallel_size=2",
                                    "parallel.sequence_parallel=true"]),
    "pp 2": (2, ["parallel.pipeline_model_parallel_size=2"]),
}


def milliseconds(options, folder, ranks, fields, audit):
    """Returns the time of the median step and that of the audit."""
    told, output = folder / "told", folder / "run"
    (output / "metrics.jsonl").unlink(missing_ok=True)
    command = [options.build / "lockstep", "train", ROOT / "configs/tiny.textproto", "--output",
               output, *(["--audit"] if audit else [])]
    for field in [*fields, f"train.train_iters={options.steps + WARM_UP}", "train.eval_iters=0",
                  "train.sample_tokens=0", "checkpoint.save="]:
        command += ["--set", field]
    run_ranks(command, ranks,
              prefix=lambda rank: ["sh", "-c", f'exec "$@" 2> {told}.{rank}', "sh"])
    lines = (output / "metrics.jsonl").read_text().splitlines()
    step = statistics.median(json.loads(line)["iteration_ms"] for line in lines[WARM_UP:])
    found = re.search(r"measured in ([\d.]+) ms", (folder / "told.0").read_text())
    return step, float(found[1]) if audit else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=float, default=3)
    options = parser.parse_args()
    options.build = options.build.resolve()
    missed = False
    with tempfile.TemporaryDirectory() as name:
        for layout, (ranks, fields) in LAYOUTS.items():
            print(f"{layout}, {options.rounds} rounds of {options.steps} steps", flush=True)
            audits, ratios, later = [], [], []
            for _ in range(options.rounds):
                step, audit = milliseconds(options, pathlib.Path(name), ranks, fields, True)
                without, _ = milliseconds(options, pathlib.Path(name), ranks, fields, False)
                audits.append(audit)
                ratios.append((audit + step) / step)
                later.append(step / without)
            show("audit, ms", audits)
            show("a step with audit / a step", ratios, options.limit)
            show("a later step / a step of a run without audit", later)
            missed = missed or statistics.median(ratios) > options.limit
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
