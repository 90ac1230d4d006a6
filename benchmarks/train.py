"""Training a GPT from end to end: `lockstep train` and the same model in PyTorch, with
DistributedDataParallel, gradient accumulation, clipping and a fused AdamW (peer_train.py), in turns.
python benchmarks/train.py BUILD [--ranks 1 2] [--rounds 4] [--steps 20]

First both evaluate the same untrained weights over the same text: they must agree to 1e-5, or it
is not the same model. A rank has one core. `scripts/setup text` fetches the text."""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from rounds import run_ranks, show

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYTHON, PEER, TEXT = ROOT / ".venv/bin/python", ROOT / "benchmarks/peer_train.py", "data/alice29.txt"
MICRO_BATCH, MICRO_BATCHES, WARMUPS = 8, 2, 5
CONFIG = f"""
model {{
  num_layers: 6 hidden_size: 256 num_attention_heads: 8 num_query_groups: 4 ffn_hidden_size: 688
  seq_length: 128 vocab_size: 256 normalization: "RMSNorm" position_embedding_type: "rope"
  activation: "swiglu"
}}
ddp {{ overlap_grad_reduce: true }}
optimizer {{ lr: 1e-3 weight_decay: 0.1 adam_beta2: 0.95 clip_grad: 1 }}
data {{ path: "{ROOT / TEXT}" tokenizer: "byte" }}
train {{ micro_batch_size: {MICRO_BATCH} eval_iters: 0 }}
"""


class Programs:
    def __init__(self, build, folder):
        self.program, self.folder = build / "lockstep", folder
        self.config, self.model = folder / "config.textproto", folder / "model"
        self.config.write_text(CONFIG)

    def ours(self, ranks, steps):
        """Milliseconds of each step."""
        output = self.folder / "run"
        run_ranks([self.program, "train", self.config, "--output", output, "--set",
                   f"train.global_batch_size={MICRO_BATCH * MICRO_BATCHES * ranks}", "--set",
                   f"train.train_iters={steps}", "--set", "checkpoint.save="], ranks)
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["iteration_ms"] for line in lines]

    def pytorch(self, ranks, steps):
        return json.loads(run_ranks([PYTHON, PEER, self.model, ROOT / TEXT, MICRO_BATCH,
                                     MICRO_BATCHES, steps], ranks))

    def compare_models(self):
        """Exports untrained weights to self.model, and the losses of both programs over the text."""
        def lockstep(*words):
            return subprocess.run([self.program, *(str(word) for word in words)], check=True,
                                  capture_output=True, text=True).stdout

        checkpoint = self.folder / "untrained"
        lockstep("train", self.config, "--set", "train.train_iters=0", "--set",
                 f"checkpoint.save={checkpoint}")
        lockstep("checkpoint", "export", "--hf", self.model, checkpoint)
        ours = json.loads(lockstep("evaluate", checkpoint, "--input", ROOT / TEXT, "--json"))
        return ours["loss"], self.pytorch(1, 0)


def seconds(action):
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def compare_steps(programs, ranks, options):
    sides = {"ours": programs.ours, "PyTorch": programs.pytorch}
    steps, starts = {name: [] for name in sides}, {name: [] for name in sides}
    for round_ in range(options.rounds):
        for name in list(sides)[::1 if round_ % 2 else -1]:
            times = sides[name](ranks, options.steps + WARMUPS)
            steps[name].append(statistics.median(times[WARMUPS:]))
            starts[name].append(seconds(functools.partial(sides[name], ranks, 1)))
    print(f"{ranks} ranks, {options.rounds} rounds of {options.steps} steps of "
          f"{MICRO_BATCH * MICRO_BATCHES * 128} tokens a rank")
    for name in sides:
        show(f"{name}, ms a step", steps[name])
        show(f"{name}, s from the start to the end of one step", starts[name])
    show("PyTorch / ours, a step", [b / a for a, b in zip(steps["ours"], steps["PyTorch"])])
    show("PyTorch / ours, start", [b / a for a, b in zip(starts["ours"], starts["PyTorch"])])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(options.build.resolve(), pathlib.Path(folder))
        ours, pytorch = programs.compare_models()
        print(f"loss of the untrained model: ours {ours:.7f}, PyTorch {pytorch:.7f}", flush=True)
        if abs(ours - pytorch) > 1e-5:
            sys.exit("the two are not the same model")
        for ranks in options.ranks:
            compare_steps(programs, ranks, options)


if __name__ == "__main__":
    main()
