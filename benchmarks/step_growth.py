"""Draws how a data-parallel step grows with parameters, buckets and ranks, next to PyTorch's.

    python benchmarks/step_growth.py [--build build] [--rounds 3] [--svg docs/images/step_growth.svg]

A step is the sum of all weights, its backward, the reduction of the gradients and AdamW, without
matrix products: what grows is the time of the wrapper, the optimizer and the communication.

  parameters   100 to 100,000 matrices of 8 x 8, two ranks
  buckets      16 matrices of 1024 x 1024 (64 MiB) in 1 to 16 buckets, two ranks
  ranks        64 matrices of 256 x 256 (16 MiB) on 2 to 16 ranks, which share this machine's cores

Ours run with and without the distributed optimizer. The peers are DistributedDataParallel with a
fused AdamW, ZeroRedundancyOptimizer and, for 100 parameters, FSDP2 with a unit for each parameter.
Each round runs every program once, for --steps steps, or for at most 4 from 10,000 parameters on.
It prints the medians over the rounds, in ms a step. PyTorch chooses its buckets by size, so the
second picture has no peers.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys

from rounds import run_ranks

HERE = pathlib.Path(__file__).resolve().parent
PEER = HERE / "peer_step.py"
MOST_UNITS = 100  # of FSDP2, which takes milliseconds for each unit
MANY = 10000
COLOURS = {"ours": "#2b6cb0", "ours, sharded": "#7db3e8", "DDP": "#c97f12", "ZeRO": "#248046",
           "FSDP2": "#a83279"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 300, 52, 12, 40, 44


class Programs:
    def __init__(self, build, steps):
        self.ours, self.steps = pathlib.Path(build) / "benchmarks/rank_step", steps

    def command(self, name, layers, width, bucket):
        steps = min(self.steps, 4) if layers >= MANY else self.steps
        if name.startswith("ours"):
            kind = "sharded" if "sharded" in name else "replicated"
            return [self.ours, kind, layers, width, 0, bucket, steps]
        kind = {"DDP": "ddp", "ZeRO": "zero", "FSDP2": "fsdp2"}[name]
        return [sys.executable, PEER, kind, layers, width, 0, steps]

    def ms(self, name, ranks, layers, width, bucket):
        command = self.command(name, layers, width, bucket)
        return json.loads(run_ranks(command, ranks).splitlines()[-1])["step"]


def series_of(programs, rounds, cases, names):
    """{program: {x: median ms}} for cases {x: (ranks, layers, width, bucket)}."""
    found = {}
    for x, case in cases.items():
        times, order = {}, [name for name in names if name != "FSDP2" or case[1] <= MOST_UNITS]
        for _ in range(rounds):
            for name in order:
                times.setdefault(name, []).append(programs.ms(name, *case))
            order.append(order.pop(0))
        for name, values in times.items():
            found.setdefault(name, {})[x] = statistics.median(values)
            print(f"  {x:>7}  {name:<14} {found[name][x]:9.2f}   [{min(values):.2f}, "
                  f"{max(values):.2f}]", flush=True)
    return found


def ticks(low, high):
    """The powers of ten from `low` to `high`, and one beyond each end."""
    return [10.0 ** e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def panel(number, title, series):
    """Lines on two logarithmic scales."""
    left = number * WIDTH + LEFT
    xs = sorted({x for line in series.values() for x in line})
    marks = ticks(min(min(line.values()) for line in series.values()),
                  max(max(line.values()) for line in series.values()))

    def at(x, y):
        across = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        up = math.log(y / marks[0]) / math.log(marks[-1] / marks[0])
        return (left + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM))
    lines = [f'<text x="{left}" y="22" font-size="14">ms a step: {title}</text>']
    for mark in marks:
        _, y = at(xs[0], mark)
        lines += [f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH - LEFT - RIGHT}" y2="{y:.1f}" '
                  'stroke="#dddddd"/>',
                  f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>']
    for x in xs:
        across, _ = at(x, marks[0])
        lines.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 22}" '
                     f'text-anchor="middle">{x:,}</text>')
    for name, line in series.items():
        points = [at(x, y) for x, y in sorted(line.items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" '
                     'stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[name]}"/>'
                  for x, y in points]
    return lines


def picture(panels):
    width, height = WIDTH * len(panels), HEIGHT + 24
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
             f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for number, (title, series) in enumerate(panels):
        lines += panel(number, title, series)
    x = LEFT
    for name in dict.fromkeys(name for _, series in panels for name in series):
        lines += [f'<rect x="{x}" y="{HEIGHT}" width="12" height="12" fill="{COLOURS[name]}"/>',
                  f'<text x="{x + 17}" y="{HEIGHT + 10}">{name}</text>']
        x += 36 + 8 * len(name)
    return "\n".join([*lines, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--svg", type=pathlib.Path)
    options = parser.parse_args()
    programs = Programs(options.build, options.steps)
    ours, peers = ["ours", "ours, sharded"], ["DDP", "ZeRO"]
    panels = []

    def measure(title, cases, names):
        print(f"{title}, ms a step, {options.rounds} rounds of {options.steps} steps")
        panels.append((title, series_of(programs, options.rounds, cases, names)))
    measure("parameters of 8 x 8", {n: (2, n, 8, 1 << 22) for n in (100, 1000, 10000, 100000)},
            ours + peers + ["FSDP2"])
    measure("buckets of 64 MiB", {n: (2, 16, 1024, (1 << 24) // n) for n in (1, 2, 4, 8, 16)}, ours)
    measure("ranks", {n: (n, 64, 256, 1 << 22) for n in (2, 4, 8, 16)}, ours + peers)
    if options.svg:
        options.svg.write_text(picture(panels))


if __name__ == "__main__":
    main()
