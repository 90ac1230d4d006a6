"""A run that saves asynchronously and resumes, and commands that read its checkpoint."""

import json

from . import layouts
from .commands import CommandFailed
from .report import one_line

HALF = layouts.STEPS // 2
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


def resume(context, layout, config, recorded):
    """Runs half of the steps, saves asynchronously, and runs the rest from the checkpoint. The
    losses must be those of the recorded curve, as if there were no interruption. So are those of a
    run that begins anew; rank 0 must say that it does not."""
    name = layout.name.replace(" ", "-").replace(",", "")
    output, saved = context.folder / f"resumed-{name}", context.folder / f"saved-{name}"
    command = layouts.train_command(context.bundle, config, layout, context.device, output)
    command += ["--set", f"checkpoint.save={saved}", "--set", "checkpoint.async_save=true"]
    context.train([*command, "--set", f"train.train_iters={HALF}"], layout.ranks, layout.seconds)
    rest = context.train([*command, "--set", f"checkpoint.load={saved}"], layout.ranks,
                         layout.seconds)
    wanted = f"loaded {saved}/step_{HALF}, iteration {HALF}"
    if wanted not in rest[0].error.splitlines():
        raise CommandFailed(f"rank 0 does not say {wanted!r}: {one_line(rest[0].error)}")
    good, told = layouts.compare(layout, layouts.curve(output), recorded)
    if not good:
        raise CommandFailed(told)
    return told


def on_both(context, *words):
    """Returns the output of a command with the GPU and without."""
    command = [context.bundle / "lockstep", *words]
    return [context.run(command, 40, {"OMP_NUM_THREADS": "1"} | more).needs().output
            for more in ({}, ON_CPU)]


def read_saved(context):
    """The saved model passes verification, writes the CPU's text and has the CPU's loss."""
    saved, text = context.folder / "saved-one-rank", context.folder / "text"
    context.run([context.bundle / "lockstep", "checkpoint", "verify", saved], 30).needs()
    here, there = on_both(context, "generate", saved, "--prompt", "12 squared", "--max-tokens",
                          "40", "--top-k", "1")
    if here != there:
        raise CommandFailed(f"generate writes {here[-40:]!r}, the CPU {there[-40:]!r}")
    losses = [json.loads(output)["loss"]
              for output in on_both(context, "evaluate", saved, "--input", text, "--json")]
    if abs(losses[0] - losses[1]) > layouts.FP32[0] * losses[1]:
        raise CommandFailed(f"evaluate gives {losses[0]:.6f}, the CPU {losses[1]:.6f}")
    return ("generate writes the CPU's text, "
            f"evaluate gives {losses[0]:.5f}, the CPU {losses[1]:.5f}")


def run(context, config, recorded):
    by_name = {layout.name: layout for layout in layouts.LAYOUTS}
    for name in ("one rank", "dp2, sharded, both overlaps"):
        context.attempt(f"{name}, saved and resumed", lambda: resume(
            context, by_name[name], config, recorded[name]))
    context.attempt("generate and evaluate", lambda: read_saved(context))
