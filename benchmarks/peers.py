"""Trains a GPT end to end: `lockstep train` and the same model in PyTorch with every way of
data-parallel training that peer_wrappers.py has, in turn.
python benchmarks/peers.py BUILD [--models tiny small many] [--ranks 2] [--rounds 4] [--steps 20]
                           [--peers ddp ...] [--set FIELD=VALUE ...] [--exposed] [--svg FILE]

Each round runs each program once; the order rotates from round to round. A rank has one thread. All
programs start from the same weights and read the same samples in Megatron's order: a peer counts
only if its first ten losses are within 1e-4 of ours. No program saves a checkpoint. Ratios are of
medians within a round.

--exposed also runs each program as that many lone ranks at once, which send nothing. The exposed
communication is the difference between the two step times. Lone ranks update all parameters, so the
exposed communication of programs that shard the update comes out too small.

--svg draws the step times. `scripts/setup text megatron` fetches the text and Megatron Core;
without Megatron Core, its rows are left out."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from peer_bars import bars
from peer_wrappers import KINDS
from rounds import free_port, run_ranks, show

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT, PEER = ROOT / "data/alice29.txt", ROOT / "benchmarks/peer_train.py"
TORCH, MEGATRON = ROOT / ".venv/bin/python", ROOT / ".venv-megatron/bin/python"
COMPARED, WARMUPS, ALLOWED = 10, 5, 1e-4
# name: layers, hidden size, heads, width of the feed-forward network, sequence length, samples of a
# micro-batch, micro-batches of a step
MODELS = {"tiny": (4, 128, 4, 384, 128, 8, 1), "small": (6, 384, 6, 1024, 256, 4, 2),
          "many": (24, 64, 4, 192, 64, 4, 1)}
OURS = {"ours": [], "ours-distributed": ["ddp.use_distributed_optimizer=true",
                                         "ddp.overlap_param_gather=true"],
        "ours-sharded": ["ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
                         "ddp.data_parallel_sharding_strategy=optim_grads_params"]}


class Programs:
    """Lockstep and its peers on one model."""

    def __init__(self, build, folder, model, ranks, steps, settings):
        """`steps` is the number of steps that the data is enough for."""
        self.program, self.folder = build / "lockstep", folder
        self.ranks, self.steps, self.settings = ranks, steps, settings
        layers, hidden, heads, ffn, self.length, self.rows, self.micro_batches = MODELS[model]
        self.text, self.config = folder / "text", folder / "config.textproto"
        self.weights, self.untrained = folder / "weights", folder / "untrained"
        samples = self.rows * self.micro_batches * ranks
        text, tokens = TEXT.read_bytes(), samples * self.length
        if len(text) < tokens * steps + 1:
            most = (len(text) - 1) // tokens - WARMUPS
            sys.exit(f"--steps: found {steps - WARMUPS}, allowed for {model} on {ranks} ranks: at "
                     f"most {most}, because {TEXT} has {len(text)} bytes")
        self.text.write_bytes(text[:tokens * steps + 1])
        self.config.write_text(f"""
            model {{ num_layers: {layers} hidden_size: {hidden} num_attention_heads: {heads}
                     ffn_hidden_size: {ffn} seq_length: {self.length} vocab_size: 320 }}
            ddp {{ overlap_grad_reduce: true }}
            optimizer {{ lr: 1e-3 lr_decay_style: "constant" weight_decay: 0.1 adam_beta2: 0.95
                         clip_grad: 1 }}
            data {{ path: "{self.text}" split: "1,0" }}
            train {{ micro_batch_size: {self.rows} global_batch_size: {samples} eval_iters: 0 }}
            """)
        self.lockstep("data", "build", "--input", self.text, "--tokenizer", "byte", "--output",
                      self.text)
        self.lockstep("train", self.config, "--set", "train.train_iters=0", "--set",
                      f"checkpoint.save={self.untrained}")
        self.lockstep("checkpoint", "export", "--hf", self.weights, self.untrained)

    def lockstep(self, *words):
        subprocess.run([self.program, *words], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)

    def run(self, name, steps, alone=False):
        """Runs a program; returns rank 0's milliseconds and loss of each step, and its peak memory
        in bytes. If `alone`, each rank is a separate run, and the results are those of one."""
        if name in OURS:
            return self.run_ours(OURS[name] + self.settings, steps, alone)
        python = MEGATRON if name.startswith("megatron") else TORCH
        command = [python, "-W", "ignore", PEER, name, self.weights, self.text, self.rows,
                   self.micro_batches, steps]
        output = run_ranks(command, self.ranks, (), environment_of(alone))
        return json.loads(output.splitlines()[-1])

    def run_ours(self, settings, steps, alone):
        settings = ["checkpoint.save=", *settings, f"train.train_iters={steps}"]
        if alone:
            settings.append(f"train.global_batch_size={self.rows * self.micro_batches}")
        output = self.folder / "run"
        run_ranks([self.program, "train", self.config,
                   *(word for setting in settings for word in ("--set", setting))],
                  self.ranks, {"OUTPUT": str(output)}, environment_of(alone),
                  lambda rank: ["sh", "-c", 'exec "$0" "$@" --output "$OUTPUT$LONE_RANK"'])
        metrics = self.folder / ("run0" if alone else "run") / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        metrics.unlink()
        return {"step": [line["iteration_ms"] for line in lines],
                "loss": [line["lm_loss"] for line in lines],
                "memory": lines[-1]["peak_memory_bytes"]}


def environment_of(alone):
    """Variables that a rank gets in addition to torchrun's: none, or those of a run of its own."""
    def of_rank(rank):
        return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_PORT": str(free_port()), "LONE_RANK": str(rank)} if alone else {}
    return of_rank


def rounds_of(programs, names, options):
    """Returns a list of {name: result of a run}."""
    rounds, order = [], list(names)
    for _ in range(options.rounds):
        results = {}
        for name in order:
            results[name] = programs.run(name, programs.steps)
            begin = time.perf_counter()
            programs.run(name, 1)
            results[name]["start"] = time.perf_counter() - begin
            if options.exposed:
                results[name]["alone"] = programs.run(name, programs.steps, alone=True)["step"]
        rounds.append(results)
        order.append(order.pop(0))
    return rounds


def differences(results, name):
    pairs = zip(results["ours"]["loss"][:COMPARED], results[name]["loss"][:COMPARED])
    return [abs(ours - theirs) for ours, theirs in pairs]


def report(names, rounds):
    """Prints the table of one model. Returns whether all programs have our losses, and the ms of a
    step of each program that has."""
    def step(results, name, kind="step"):
        return statistics.median(results[name][kind][WARMUPS:])

    def exposed(results, name):
        return step(results, name) - step(results, name, "alone")

    counted = []
    for name in names:
        apart = [each for results in rounds for each in differences(results, name)]
        too_far = [each for each in apart if not each <= ALLOWED]  # so NaN is too far
        if too_far:
            print(f"  {name}: does not count, its losses differ by {max(too_far):.1e}")
            continue
        counted.append(name)
        show(f"{name}, ms a step", [step(results, name) for results in rounds])
        show(f"{name}, MiB at the peak", [r[name]["memory"] / 2**20 for r in rounds])
        show(f"{name}, s of a run of one step", [r[name]["start"] for r in rounds])
        if "alone" in rounds[0][name]:
            show(f"{name}, ms of exposed communication", [exposed(r, name) for r in rounds])
    peers = [name for name in counted if name not in OURS]
    for ours in (name for name in counted if name in OURS):
        for peer in peers:
            show(f"{ours} / {peer}", [step(r, ours) / step(r, peer) for r in rounds])
        if peers:
            show(f"{ours} / the fastest of them",
                 [step(r, ours) / min(step(r, peer) for peer in peers) for r in rounds])
    medians = {name: statistics.median(step(results, name) for results in rounds)
               for name in counted}
    return len(counted) == len(names), medians


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--peers", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", dest="settings", action="append", default=[],
                        metavar="FIELD=VALUE", help="for Lockstep")
    parser.add_argument("--exposed", action="store_true", help="time lone ranks, too")
    parser.add_argument("--svg", type=pathlib.Path)
    options = parser.parse_args()
    if options.steps + WARMUPS < COMPARED:
        parser.error(f"--steps: found {options.steps}, allowed: at least {COMPARED - WARMUPS}")
    return options


def main():
    options = parse_arguments()
    names = list(OURS) + [peer for peer in options.peers
                          if not peer.startswith("megatron") or MEGATRON.exists()]
    all_same, steps = True, {}
    for model in options.models:
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                programs = Programs(options.build.resolve(), pathlib.Path(folder), model, ranks,
                                    options.steps + WARMUPS, options.settings)
                rounds = rounds_of(programs, names, options)
            tokens = programs.length * programs.rows * programs.micro_batches
            print(f"{model}: {ranks} ranks, {options.rounds} rounds of {options.steps} steps of "
                  f"{tokens} tokens a rank")
            same, steps[f"{model}, {ranks} ranks"] = report(names, rounds)
            all_same = all_same and same
    if options.svg:
        options.svg.write_text(bars(steps))
    if not all_same:
        sys.exit(1)


if __name__ == "__main__":
    main()
