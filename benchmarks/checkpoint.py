"""Saves and loads 1 GiB of state: ours, torch.save and torch.distributed.checkpoint (DCP) in turn,
in one process and on one disk. python benchmarks/checkpoint.py BUILD [FOLDER]

Every save is timed until its bytes are on disk: ours and DCP call fsync themselves; for torch.save
this program does. Loads read from the page cache into existing tensors; torch.load allocates new
tensors. Ours verifies a checksum of every block that it reads; the others verify none."""

import contextlib
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp

ROUNDS = 5
STEP = 0.5  # seconds of computation in a step of the loop

warnings.filterwarnings("ignore")


class Ours:
    def __init__(self, build):
        self.program = subprocess.Popen([build / "benchmarks/checkpoint"], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, *words):
        self.program.stdin.write(" ".join(map(str, words)) + "\n")
        self.program.stdin.flush()
        return [float(word) for word in self.program.stdout.readline().split()]

    def end(self):
        self.program.stdin.close()
        self.program.wait()


def timed(action):
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def save_with_torch(state, path):
    torch.save(state, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def async_with_dcp(state, path):
    """Seconds until the call returns, and until the checkpoint is complete."""
    begin = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=path, no_dist=True)
    held_up = time.perf_counter() - begin
    future.result()
    return held_up, time.perf_counter() - begin


def show(name, ours, peers):
    """Prints the medians, and the ratio of the peers' times to ours, round by round."""
    line = f"  {name:28} ours {statistics.median(ours):6.3f} s"
    for peer, seconds in peers.items():
        ratios = [b / a for a, b in zip(ours, seconds)]
        line += (f"   {peer} {statistics.median(seconds):6.3f} s, / ours "
                 f"{statistics.median(ratios):5.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    print(line, flush=True)


def main():
    ours = Ours(pathlib.Path(sys.argv[1]).resolve())
    torch.set_num_threads(1)
    count, rows, columns = map(int, ours.ask("tensors"))
    state = {f"tensor{i}": torch.arange(rows * columns).float().mul(0.5).add(i).view(rows, columns)
             for i in range(count)}
    folder = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None))
    print(f"{count} tensors of {rows} x {columns} fp32, torch {torch.__version__}; median of {ROUNDS} "
          "rounds, ratio of each round's times [lowest, highest]", flush=True)
    times = {key: [] for key in ("ours save", "dcp save", "torch save", "ours load", "dcp load",
                                 "torch load", "held", "whole", "held at once", "dcp held")}
    for round_ in range(ROUNDS + 1):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        found = {"ours save": ours.ask("save", folder / "ours")[0]}
        with contextlib.redirect_stderr(None):
            found["dcp save"] = timed(
                lambda: dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True))
        found["torch save"] = timed(lambda: save_with_torch(state, folder / "torch.pt"))
        found["ours load"] = ours.ask("load", folder / "ours")[0]
        found["dcp load"] = timed(
            lambda: dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True))
        found["torch load"] = timed(lambda: torch.load(folder / "torch.pt", weights_only=True))
        found["held"], found["whole"] = ours.ask("async", folder / "async", STEP)
        found["held at once"], _ = ours.ask("async", folder / "async", 0)
        found["dcp held"], _ = async_with_dcp(state, folder / "dcp async")
        if round_:
            for key, seconds in found.items():
                times[key].append(seconds)
    ours.end()
    shutil.rmtree(folder)
    show("save", times["ours save"], {"DCP": times["dcp save"], "torch.save": times["torch save"]})
    show("load", times["ours load"], {"DCP": times["dcp load"], "torch.load": times["torch load"]})
    show(f"held up, steps of {STEP} s", times["held"], {"DCP async_save": times["dcp held"]})
    show("held up, steps of 0 s", times["held at once"], {"DCP async_save": times["dcp held"]})
    for name, key in ((f"{STEP} s", "held"), ("0 s", "held at once")):
        shares = [100 * a / b for a, b in zip(times[key], times["ours save"])]
        print(f"  an asynchronous save holds a loop with steps of {name} up for "
              f"{statistics.median(shares):.1f} % [{min(shares):.1f}, {max(shares):.1f}] of our "
              "synchronous save")


if __name__ == "__main__":
    main()
