"""Compares the first layout of `lockstep plan best` with the measured best of all layouts: random
jobs of four ranks on this host's CPU.

    python benchmarks/best_layouts.py runs/four_ranks.textproto [--jobs 30] [--first 0] [--seed 1]

A machine file that does not exist is measured first, with `lockstep doctor --calibrate --ranks 4`.
On hosts with fewer cores the ranks share them. All layouts: tensor, context and pipeline
parallelism (with one and two chunks), micro-batches of 1 to 16 sequences, with and without the
distributed optimizer; `plan best` also looks at other sharding, schedules and bucket sizes. Each is
measured in a short run. Those within 15 % of the best and the planned one then run --rounds times
more, in turn, and the medians of these runs count.

Prints the planned and the best layout of each job, and how much longer the planned one takes."""

import argparse
import json
import os
import pathlib
import random
import statistics

from step_times import (LOCKSTEP, SOURCE, WARM_UP, OneHost, call, measured_ms, overrides,
                        threads_of)

RANKS = 4
KEPT = ("model.recompute_granularity", "parallel.num_distributed_optimizer_instances")
CLOSE = 1.15
TENSOR, CONTEXT, PIPELINE = (f"parallel.{name}_parallel_size"
                             for name in ("tensor_model", "context", "pipeline_model"))
CHUNKS = "parallel.virtual_pipeline_model_parallel_size"


def draw_job(draw):
    """Returns the fields of a job that all layouts share."""
    heads = draw.choice((4, 8))
    hidden = heads * draw.choice((16, 32))
    swiglu = draw.random() < 0.5
    return {"model.num_layers": draw.choice((4, 8)), "model.hidden_size": hidden,
            "model.num_attention_heads": heads, "model.num_query_groups": heads,
            "model.ffn_hidden_size": hidden * (2 if swiglu else 4),
            "model.activation": "swiglu" if swiglu else "gelu",
            "model.seq_length": draw.choice((32, 64, 128)),
            "model.vocab_size": draw.choice((256, 1024)),
            "train.global_batch_size": draw.choice((8, 16))}


def all_layouts(job):
    sizes = (1, 2, 4)
    for tensor, context, pipeline in ((t, c, p) for t in sizes for c in sizes for p in sizes):
        if RANKS % (tensor * context * pipeline):
            continue
        replicas = RANKS // (tensor * context * pipeline)
        for micro in (1, 2, 4, 8, 16):
            if job["train.global_batch_size"] % (micro * replicas):
                continue
            for chunks in (1, 2) if pipeline > 1 else (1,):
                if job["model.num_layers"] % (pipeline * chunks) or (
                        chunks > 1 and
                        job["train.global_batch_size"] // (micro * replicas) % pipeline):
                    continue
                layout = {TENSOR: tensor, CONTEXT: context, PIPELINE: pipeline,
                          "train.micro_batch_size": micro,
                          "parallel.sequence_parallel": str(tensor > 1).lower()}
                if chunks > 1:
                    layout[CHUNKS] = chunks
                for sharded in ("true", "false") if replicas * context > 1 else ("false",):
                    yield layout | {"ddp.use_distributed_optimizer": sharded}


def planned_layout(job, machine):
    """Returns the fields of the first layout and its planned time."""
    words = [LOCKSTEP, "plan", "best", SOURCE / "configs/tiny.textproto", *overrides(job, WARM_UP),
             "--world-size", RANKS, "--memory", 4, "--machine", machine, "--json"]
    for field in KEPT:
        words += ["--keep", field]
    best = json.loads(call(*words))["best"][0]
    return dict(one.split("=", 1) for one in best["set"]), best["step_ms"]


def text_of(layout):
    return " ".join(f"{path.split('.')[1]}={value}" for path, value in layout.items())


def compare(job, machine, rounds):
    """Returns the ratio of the planned layout's time to that of the best one."""
    planned, planned_ms = planned_layout(job, machine)
    threads = threads_of(machine)

    def measure(layout, steps, warm_up=WARM_UP):
        return measured_ms(OneHost(), RANKS, job | layout, warm_up + steps, threads, warm_up)

    first = [(measure(layout, 3, 2), layout) for layout in all_layouts(job)]
    least = min(time for time, _ in first)
    close = [layout for time, layout in first if time <= CLOSE * least]
    steps = max(10, round(800 / least))
    runs = [[measure(layout, steps) for layout in (planned, *close)] for _ in range(rounds)]
    times = [statistics.median(of_layout) for of_layout in zip(*runs)]
    best = min(range(len(times)), key=times.__getitem__)
    ratio = times[0] / times[best]
    print(f"{ratio:5.3f}  planned {planned_ms:8.2f} ms, measured {times[0]:8.2f} ms: "
          f"{text_of(planned)}; best {times[best]:8.2f} ms: "
          f"{text_of(planned if best == 0 else close[best - 1])}; {len(first)} layouts; "
          f"{text_of(job)}", flush=True)
    return ratio


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("machine", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first of these jobs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not arguments.machine.exists():
        call(LOCKSTEP, "doctor", "--calibrate", arguments.machine, "--ranks", RANKS)
    draw = random.Random(arguments.seed)
    print(f"seed {arguments.seed}, jobs {arguments.first} to "
          f"{arguments.first + arguments.jobs - 1}, load {os.getloadavg()[0]:.1f}")
    jobs = [draw_job(draw) for _ in range(arguments.first + arguments.jobs)]
    ratios = [compare(job, arguments.machine, arguments.rounds) for job in jobs[arguments.first:]]
    print(f"within 5 %: {sum(ratio <= 1.05 for ratio in ratios)} of {len(ratios)}; median "
          f"{statistics.median(ratios):.3f}, most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
