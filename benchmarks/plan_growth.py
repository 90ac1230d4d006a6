"""Draws `lockstep plan time` of one job on more and more GPUs: the parts of a step.

    python benchmarks/plan_growth.py docs/images/growth.svg [--machine dgx_h100] [--config llama3_70b]

The batch grows with the ranks (weak scaling): each data-parallel replica runs `--microbatches`
micro-batches of one sequence. The layout is the configuration's. Its smallest job is doubled up to
131,072 ranks. Nothing here is measured: it is a plan.
"""

import argparse
import json
import pathlib
import subprocess

SOURCE = pathlib.Path(__file__).resolve().parents[1]
LOCKSTEP = SOURCE / "build/lockstep"
MOST_RANKS = 131072
PARTS = (("compute_ms", "compute", "#2b6cb0"), ("optimizer_ms", "optimizer", "#248046"),
         ("exposed_communication_ms", "exposed communication", "#c97f12"),
         ("bubble_ms", "bubble", "#fad691"))
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, BAR = 820, 420, 70, 60, 60, 36


def plan(*command):
    result = subprocess.run([LOCKSTEP, "plan", *command, "--json"], capture_output=True, text=True,
                            check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout)


def fewest_ranks(arguments):
    return plan("memory", SOURCE / f"configs/{arguments.config}.textproto")["world_size"]


def step(arguments, ranks, fewest):
    batch = ranks // fewest * arguments.microbatches
    return plan("time", arguments.config, "--world-size", str(ranks), "--machine",
                arguments.machine, "--set", "train.micro_batch_size=1", "--set",
                f"train.global_batch_size={batch}")


def bar(x, answer, scale):
    """Returns the parts of a step from the bottom up, each a rectangle, and the top of the bar."""
    y, parts = HEIGHT - BOTTOM, []
    for name, text, colour in PARTS:
        height = answer[name] * scale
        y -= height
        parts.append(f'<rect x="{x:.1f}" y="{y:.2f}" width="{BAR}" height="{height:.2f}" '
                     f'fill="{colour}"><title>{text}: {answer[name]:.1f} ms</title></rect>')
    return parts, y


def picture(arguments, answers):
    most = max(answer["step_ms"] for _, answer in answers)
    scale = (HEIGHT - TOP - BOTTOM) / most
    gap = (WIDTH - LEFT) / len(answers)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
             f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
             f'<text x="{LEFT}" y="20" font-size="14">{arguments.config} on {arguments.machine}: '
             f'planned ms of a step, {arguments.microbatches} micro-batches a replica</text>']
    for i, (_, text, colour) in enumerate(PARTS):
        x = LEFT + 170 * i
        lines += [f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>',
                  f'<text x="{x + 18}" y="42">{text}</text>']
    for i, (ranks, answer) in enumerate(answers):
        x = LEFT + gap * i
        parts, top = bar(x, answer, scale)
        lines += parts
        middle = x + BAR / 2
        lines += [f'<text x="{middle:.1f}" y="{top - 5:.1f}" text-anchor="middle" font-size="10">'
                  f'{answer["step_ms"]:.0f}</text>',
                  f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" '
                  f'font-size="10">{ranks}</text>']
    lines += [f'<text x="{WIDTH / 2}" y="{HEIGHT - 20}" text-anchor="middle">GPUs</text>',
              "</svg>"]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("picture", type=pathlib.Path)
    parser.add_argument("--machine", default="dgx_h100")
    parser.add_argument("--config", default="llama3_70b")
    parser.add_argument("--microbatches", type=int, default=16)
    arguments = parser.parse_args()
    fewest = fewest_ranks(arguments)
    ranks, answers = fewest, []
    while ranks <= MOST_RANKS:
        answers.append((ranks, step(arguments, ranks, fewest)))
        one = answers[-1][1]
        print(f"{ranks:>7} GPUs: {one['step_ms']:8.1f} ms, " +
              ", ".join(f"{text} {one[name]:.1f}" for name, text, _ in PARTS) +
              f", {one['tflops_per_device']:.0f} TFLOP/s of a GPU", flush=True)
        ranks *= 2
    arguments.picture.write_text(picture(arguments, answers))


if __name__ == "__main__":
    main()
