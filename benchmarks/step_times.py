"""Compares `lockstep plan time` with measured steps: random jobs on this host's CPU.

    python benchmarks/step_times.py runs/machine.textproto [--jobs 20] [--seed 1] [--seconds 2]
    python benchmarks/step_times.py runs/slow_link.textproto --link 1gbit

A machine file that does not exist is measured first, with `lockstep doctor --calibrate`. Each job
is one rank, or two that split the data, the tensors or the pipeline. Each rank has as many threads
as the machine file says; the measured time is the median of the steps after the first four, of
which there are ten or as many as are planned to take --seconds.

With --link the calibration and the jobs run on two network namespaces, which stand for two hosts.
Each has one rank of one thread. The link between them has that rate, such as 1gbit, in each
direction. This needs root.

Prints all jobs and errors, their median and 95th percentile, and Kendall's tau of the two orders.
"""

import argparse
import json
import math
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(SOURCE / "tests/end_to_end"))

from two_hosts import TwoHosts, Unavailable  # pylint: disable=wrong-import-position

LOCKSTEP = SOURCE / "build/lockstep"
WARM_UP = 4
LAYOUTS = ("alone", "dp2", "tp2", "pp2")


def draw_job(draw, layout):
    """Returns the number of ranks and the fields of a job."""
    heads = draw.choice((2, 4, 8))
    hidden = heads * draw.choice((16, 32, 64))
    swiglu = draw.random() < 0.5
    micro = draw.choice((1, 2, 4))
    fields = {
        "model.num_layers": draw.choice((2, 4, 6)), "model.hidden_size": hidden,
        "model.num_attention_heads": heads, "model.num_query_groups": draw.choice((2, heads)),
        "model.ffn_hidden_size": hidden * (2 if swiglu else 4),
        "model.activation": "swiglu" if swiglu else "gelu",
        "model.seq_length": draw.choice((64, 128, 256)),
        "model.vocab_size": draw.choice((256, 1024, 4096)),
        "train.micro_batch_size": micro,
        "train.global_batch_size": micro * 2 * draw.choice((1, 2, 4)),
        "ddp.use_distributed_optimizer": draw.choice(("true", "false")),
        "ddp.overlap_grad_reduce": draw.choice(("true", "false"))}
    if layout == "tp2":
        fields["parallel.tensor_model_parallel_size"] = 2
        fields["parallel.sequence_parallel"] = draw.choice(("true", "false"))
    if layout == "pp2":
        fields["parallel.pipeline_model_parallel_size"] = 2
    return 1 if layout == "alone" else 2, fields


def overrides(fields, steps):
    common = {"data.mock": "true", "data.path": "[]", "train.train_iters": steps,
              "train.eval_iters": 0, "train.sample_tokens": 0, "train.device": "cpu",
              "optimizer.lr_warmup_iters": 2}
    return [part for path, value in (common | fields).items() for part in ("--set", f"{path}={value}")]


def call(*command, **environment):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                            check=False, env=os.environ | environment)
    if result.returncode:
        raise SystemExit(result.stderr)
    return result.stdout


class OneHost:
    """The ranks share this host, as `lockstep launch` starts them."""

    def calibrate(self, machine):
        call(LOCKSTEP, "doctor", "--calibrate", machine)

    def run(self, ranks, *words, threads):
        call(LOCKSTEP, "launch", "-n", ranks, "--starter", "own", "--", *words,
             OMP_NUM_THREADS=str(threads))


class LinkedHosts:
    """Each rank has a host."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.port = 29500

    def calibrate(self, machine):
        self.run(2, "doctor", "--calibrate", machine, "--ranks", 1)

    def run(self, ranks, *words, threads=1):
        self.port += 1
        processes, errors = [], []
        for host in range(ranks):
            variables = {"OMP_NUM_THREADS": threads}
            if ranks == 2:
                variables |= self.hosts.environment(host, self.port)
            errors.append(tempfile.TemporaryFile("w+"))
            processes.append(subprocess.Popen(
                self.hosts.words(host, LOCKSTEP, *words), stdout=subprocess.DEVNULL,
                stderr=errors[-1],
                env=os.environ | {name: str(value) for name, value in variables.items()}))
        statuses = [process.wait() for process in processes]
        if any(statuses):
            for file in errors:
                file.seek(0)
            raise SystemExit("\n".join(file.read() for file in errors))


def planned_ms(ranks, fields, machine):
    answer = call(LOCKSTEP, "plan", "time", SOURCE / "configs/tiny.textproto",
                  *overrides(fields, WARM_UP), "--world-size", ranks, "--machine", machine, "--json")
    return json.loads(answer)["step_ms"]


def threads_of(machine):
    """Returns the threads of a rank, as the machine file was measured."""
    found = re.search(r"of (\d+) threads", machine.read_text())
    if not found:
        raise SystemExit(f"{machine}: found no `name: \"... of N threads\"`, allowed: a file that "
                         "`lockstep doctor --calibrate` wrote")
    return int(found.group(1))


def measured_ms(hosts, ranks, fields, steps, threads, warm_up=WARM_UP):
    """Returns the median time of the steps after the first `warm_up`."""
    with tempfile.TemporaryDirectory() as folder:
        hosts.run(ranks, "train", SOURCE / "configs/tiny.textproto", *overrides(fields, steps),
                  "--output", folder, threads=threads)
        lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line).get("iteration_ms") for line in lines]
    return statistics.median([time for time in times if time][warm_up:])


def kendall_tau(first, second):
    pairs = [(a, b) for a in range(len(first)) for b in range(a)]
    signs = [(first[a] - first[b]) * (second[a] - second[b]) for a, b in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def percentile(numbers, share):
    """Returns the lowest number that at least this share of them does not exceed."""
    return sorted(numbers)[max(1, math.ceil(share * len(numbers))) - 1]


def compare(hosts, arguments):
    if not arguments.machine.exists():
        hosts.calibrate(arguments.machine)
    threads = threads_of(arguments.machine)
    draw = random.Random(arguments.seed)
    print(f"seed {arguments.seed}, {arguments.jobs} jobs, {threads} threads a rank, load "
          f"{os.getloadavg()[0]:.1f}")
    planned, measured = [], []
    for index in range(arguments.jobs):
        layout = LAYOUTS[index % len(LAYOUTS)]
        ranks, fields = draw_job(draw, layout)
        planned.append(planned_ms(ranks, fields, arguments.machine))
        steps = WARM_UP + max(10, round(1e3 * arguments.seconds / planned[-1]))
        measured.append(measured_ms(hosts, ranks, fields, steps, threads))
        text = " ".join(f"{path.split('.')[1]}={value}" for path, value in fields.items())
        print(f"{layout:>5}  planned {planned[-1]:9.2f} ms  measured {measured[-1]:9.2f} ms  "
              f"{planned[-1] / measured[-1] - 1:+7.1%}  load {os.getloadavg()[0]:4.1f}  {text}",
              flush=True)
    report(planned, measured)


def report(planned, measured):
    errors = [abs(a / b - 1) for a, b in zip(planned, measured)]
    print(f"error: median {statistics.median(errors):.1%}, 95th percentile "
          f"{percentile(errors, 0.95):.1%}, most {max(errors):.1%}; Kendall's tau "
          f"{kendall_tau(planned, measured):.2f}")
    for layout in LAYOUTS:
        own = [error for i, error in enumerate(errors) if LAYOUTS[i % len(LAYOUTS)] == layout]
        if own:
            print(f"{layout:>5}: median {statistics.median(own):.1%}, most {max(own):.1%}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("machine", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--link", metavar="RATE")
    arguments = parser.parse_args()
    if not arguments.link:
        return compare(OneHost(), arguments)
    try:
        with TwoHosts() as hosts:
            hosts.slow(arguments.link)
            compare(LinkedHosts(hosts), arguments)
    except Unavailable as error:
        sys.exit(f"--link: {error}")


if __name__ == "__main__":
    main()
