"""A long training with many saves: memory, descriptors, threads and files must not grow.
python tests/faults/soak.py [--steps 20000] [--layouts LAYOUT ...] [--set FIELD=VALUE ...]
    [--table FILE]

Each given layout of tests/faults/training.py trains with a save every 50 steps; every second layout
saves asynchronously. Its processes are sampled four times a second. The second quarter of the steps
is compared with the last one: the medians of descriptors and threads and the smallest number of
files must be the same, and the smallest resident memory may grow by at most 1 MiB (--slack). --set
adds settings to the trainings: with train.replica_check_interval=1, a long run also shows that
there are no false alarms for ranks whose copies agree. LOCKSTEP_BUILD names the build."""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from training import LAYOUTS, settings, write_config

from support import LOCKSTEP, SOURCE, clean_environment

EVERY_SECONDS = 0.25
DEFAULT = ("1 rank", "dp2", "sharded dp2", "tp2", "pp2", "dp2 tp2 dist-opt")


def ranks_of(launcher):
    """Returns the processes of the ranks that a launcher has started."""
    try:
        words = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]


def look_at(pid):
    """Returns what a process uses now; None once it has ended."""
    folder = pathlib.Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return {"memory": int(status["VmRSS"].split()[0]) / 1024,
                "threads": int(status["Threads"]),
                "descriptors": len(list((folder / "fd").iterdir()))}
    except (OSError, KeyError):
        return None


def last_iteration(metrics):
    """Returns the iteration of the last complete line."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 4096))
            lines = file.read().split(b"\n")
        return json.loads(lines[-2])["iteration"] if len(lines) > 2 else 0
    except OSError:
        return 0


def quarters(samples, steps, name, of=statistics.median):
    """Returns a statistic of the second and of the last quarter of the steps."""
    found = [[sample[name] for sample in samples if first < sample["iteration"] <= last]
             for first, last in ((steps / 4, steps / 2), (3 * steps / 4, steps))]
    return [of(values) if values else None for values in found]


def soak(layout, steps, in_background, folder, pairs):
    """Returns the samples of each rank, and of the files."""
    ranks, more = LAYOUTS[layout]
    output = folder / "run"
    command = [LOCKSTEP, "launch", "-n", ranks, "--starter", "own", "--", "train",
               write_config(folder), "--output", output, *more, *settings(
                   f"train.train_iters={steps}", "checkpoint.save_interval=50",
                   "checkpoint.keep=2", "train.log_interval=1000",
                   f"checkpoint.async_save={str(in_background).lower()}", *pairs)]
    with (folder / "stderr").open("wb") as error:
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL,
                                   stderr=error, cwd=SOURCE, env=clean_environment())
    samples, files = {}, []
    while process.poll() is None:
        iteration = last_iteration(output / "metrics.jsonl")
        for pid in ranks_of(process.pid):
            sample = look_at(pid)
            if sample:
                samples.setdefault(pid, []).append(sample | {"iteration": iteration})
        # os.walk ignores folders that are removed meanwhile.
        files.append({"iteration": iteration,
                      "files": sum(len(names) for _, _, names in os.walk(output))})
        time.sleep(EVERY_SECONDS)
    if process.returncode != 0:
        raise SystemExit((folder / "stderr").read_text()[-2000:])
    return list(samples.values()), files


def judge(layout, steps, ranks, files, slack):
    """Returns a line of the table for each rank, and whether nothing has grown."""
    if len(ranks) != LAYOUTS[layout][0]:
        raise SystemExit(f"{layout}: found samples of {len(ranks)} processes, allowed: of "
                         f"{LAYOUTS[layout][0]} ranks")
    good, lines = True, []
    for rank, samples in enumerate(ranks):
        memory = quarters(samples, steps, "memory", min)
        descriptors = quarters(samples, steps, "descriptors")
        threads = quarters(samples, steps, "threads")
        count = quarters(files, steps, "files", min)
        if None in (*memory, *count):
            raise SystemExit(f"{layout}: too few samples in a quarter; more --steps are needed")
        held = (memory[1] - memory[0] <= slack and descriptors[0] == descriptors[1]
                and threads[0] == threads[1] and count[0] == count[1])
        good = good and held
        lines.append(f"| {layout} | {rank} | {memory[0]:.1f} → {memory[1]:.1f} | "
                     f"{descriptors[0]:g} → {descriptors[1]:g} | {threads[0]:g} → {threads[1]:g} | "
                     f"{count[0]:g} → {count[1]:g} | {'no' if held else 'YES'} |")
    return good, lines


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=DEFAULT)
    parser.add_argument("--slack", type=float, default=1, help="MiB")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE",
                        help="a setting of the trainings; may be given several times")
    parser.add_argument("--table", type=pathlib.Path)
    options = parser.parse_args()
    table = [f"{datetime.date.today()}, {options.steps} steps with a save every 50"
             + (f", {' '.join(options.set)}." if options.set else "."), "",
             "| layout | rank | MiB resident | descriptors | threads | files | grew |",
             "|---|---|---|---|---|---|---|"]
    all_good = True
    for number, layout in enumerate(options.layouts):
        with tempfile.TemporaryDirectory() as folder:
            ranks, files = soak(layout, options.steps, number % 2 == 1, pathlib.Path(folder),
                                options.set)
        good, lines = judge(layout, options.steps, ranks, files, options.slack)
        all_good = all_good and good
        table += lines
        print("\n".join(lines), flush=True)
    if options.table:
        options.table.write_text("\n".join(table) + "\n")
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
