"""Matrix products in 8-bit floats: losses compared with torchao's Float8Linear, runs that resume,
checkpoints that move between runs with and without 8-bit products, and what is refused. The
comparison needs the packages of scripts/requirements-hugging-face.txt in .venv-hugging-face
(scripts/setup hugging-face) or in LOCKSTEP_HUGGING_FACE_PYTHON; without them it is skipped."""

import json
import os
import pathlib
import subprocess
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, metrics, run, torchrun

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
LENGTH, STEPS = 32, 6
# torchao's names of our settings, and the number of first steps whose losses agree. Later, the last
# bits of a sum may round a value to the next 8-bit number.
RECIPES = {"none": ([], STEPS),
           "tensorwise": (["train.fp8=hybrid", "train.fp8_recipe=tensorwise"], 2),
           "rowwise": (["train.fp8=e4m3", "train.fp8_recipe=rowwise"], 2)}
TRAINED = ["train.precision=fp32", "train.micro_batch_size=1", "train.global_batch_size=1",
           "train.eval_iters=0", "data.split=1,0", "optimizer.lr=0.003",
           "optimizer.lr_decay_style=constant", "optimizer.weight_decay=0",
           "optimizer.adam_beta2=0.95", "optimizer.clip_grad=0.7", "train.device=cpu",
           f"train.train_iters={STEPS}"]
# Usage: FOLDER. Makes a random GPT-2, whose attention has one matrix for queries, keys and values,
# like ours.
MAKE = """
import pathlib, sys, torch, transformers
torch.manual_seed(3)
config = transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                                 resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = transformers.GPT2LMHeadModel(config)
for key, parameter in model.named_parameters():
    norm = ".ln_" in key and key.endswith("weight")
    torch.nn.init.normal_(parameter, 1.0 if norm else 0.0, 0.2)
model.save_pretrained(pathlib.Path(sys.argv[1]) / "theirs")
"""
# Usage: FOLDER LENGTH STEPS RECIPE. Prints the losses and gradient norms of a training.
TORCHAO = """
import json, pathlib, sys, torch, transformers
from transformers.pytorch_utils import Conv1D
folder, length, steps, recipe = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ids = torch.tensor(list((folder / "text").read_bytes()))[:length + 1]
inputs, labels = ids[:-1].view(1, length), ids[1:].view(1, length)
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder / "theirs", dtype=torch.float32, attn_implementation="eager").train()
for block in model.transformer.h:
    for owner in (block.attn, block.mlp):
        for name, module in list(owner.named_children()):
            if not isinstance(module, Conv1D):
                continue
            linear = torch.nn.Linear(*module.weight.shape)
            linear.weight.data.copy_(module.weight.t())
            linear.bias.data.copy_(module.bias)
            setattr(owner, name, linear)
if recipe != "none":
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import CastConfig, ScalingGranularity
    if recipe == "tensorwise":
        config = Float8LinearConfig(emulate=True)
    else:
        rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE,
                          target_dtype=torch.float8_e4m3fn)
        config = Float8LinearConfig(
            cast_config_input=rows, cast_config_weight=rows, cast_config_grad_output=rows,
            cast_config_input_for_grad_weight=rows, cast_config_weight_for_grad_input=rows,
            cast_config_grad_output_for_grad_weight=rows, emulate=True)
    convert_to_float8_training(model.transformer.h, config=config)
    assert sum(type(m).__name__ == "Float8Linear" for m in model.modules()) == 8
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, betas=(0.9, 0.95), eps=1e-8,
                              weight_decay=0)
losses, norms = [], []
for _ in range(steps):
    loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7).item())
    optimizer.step()
    losses.append(loss.item())
print(json.dumps({"losses": losses, "norms": norms}))
"""
FP8 = ["train.precision=bf16", "train.fp8=hybrid", "train.fp8_amax_history_len=4"]


def fields(*assignments):
    return [part for assignment in assignments for part in ("--set", assignment)]


class Fp8(EndToEnd):
    def train(self, name, *assignments, ranks=1):
        command = [LOCKSTEP, "train", self.config, *fields(*assignments), "--output",
                   self.folder / name]
        return torchrun(ranks, *command) if ranks > 1 else run(*command)

    def trained(self, name, *assignments, ranks=1):
        result = self.train(name, *assignments, ranks=ranks)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return [(line["lm_loss"], line["grad_norm"]) for line in metrics(self.folder / name)[0]]

    def python(self, *arguments):
        result = subprocess.run([PYTHON, "-c", *arguments], capture_output=True, check=False,
                                env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def test_trains_as_torchao_does(self):
        if not PYTHON.exists():
            self.skipTest(f"torchao is not installed ({PYTHON}); run scripts/setup hugging-face")
        text = (self.folder / "text").read_bytes()[:LENGTH + 1]
        (self.folder / "text").write_bytes(text)
        self.python(MAKE, self.folder)
        ours = self.folder / "ours"
        result = run(LOCKSTEP, "checkpoint", "import", "--hf", self.folder / "theirs", ours)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        first = {}
        for name, (settings, same) in RECIPES.items():
            with self.subTest(name):
                output = self.folder / f"run {name}"
                result = run(LOCKSTEP, "train", ours / "step_0" / "config.textproto",
                             *fields(*TRAINED, *settings, f"data.path={self.folder / 'text'}",
                                     f"checkpoint.load={ours}", "checkpoint.finetune=true"),
                             "--output", output)
                self.assertEqual(result.returncode, 0, result.stderr.decode())
                theirs = json.loads(self.python(TORCHAO, self.folder, str(LENGTH), str(STEPS), name))
                lines = metrics(output)[0]
                self.assertEqual(len(lines), STEPS)
                for i, line in enumerate(lines):
                    bound = 1e-5 if i < same else 0.01
                    self.assertLess(abs(line["lm_loss"] / theirs["losses"][i] - 1), bound, (i, theirs))
                    bound = 1e-4 if i < same else 0.05
                    self.assertLess(abs(line["grad_norm"] / theirs["norms"][i] - 1), bound, (i, theirs))
                first[name] = lines[0]["lm_loss"]
        self.assertEqual(len(set(first.values())), len(RECIPES))
        self.assertLess(abs(first["tensorwise"] / first["none"] - 1), 0.005)
        self.assertLess(abs(first["rowwise"] / first["none"] - 1), 0.01)

    def test_resumes_bit_for_bit(self):
        for ranks, layout in (
                (1, []), (2, ["parallel.tensor_model_parallel_size=2"]),
                (2, ["model.num_experts=4", "parallel.expert_model_parallel_size=2"])):
            with self.subTest(ranks=ranks, layout=layout):
                name = f"{ranks} {layout}"
                whole = self.trained(f"whole {name}", *FP8, *layout, ranks=ranks)
                stopped = [*FP8, *layout, "checkpoint.save_interval=5"]
                self.trained(f"first {name}", *stopped, "train.train_iters=5",
                             "optimizer.lr_decay_iters=12", ranks=ranks)
                load = f"checkpoint.load={self.folder / f'first {name}' / 'checkpoint'}"
                rest = self.trained(f"rest {name}", *FP8, *layout, load, ranks=ranks)
                self.assertEqual(rest, whole[5:])

    def test_resumes_with_another_loss_scale(self):
        whole = self.trained("whole scaled", *FP8)
        self.trained("first scaled", *FP8, "train.train_iters=5", "optimizer.lr_decay_iters=12",
                     "optimizer.loss_scale=4096")
        load = f"checkpoint.load={self.folder / 'first scaled' / 'checkpoint'}"
        rest = self.trained("rest scaled", *FP8, load)
        self.assertEqual(len(rest), len(whole) - 5)
        for found, expected in zip(rest, whole[5:]):
            for i in range(2):
                self.assertLess(abs(found[i] / expected[i] - 1), 1e-5, (rest, whole))

    def test_checkpoints_go_between_runs_with_and_without_8_bits(self):
        wide = ["train.precision=bf16"]
        self.trained("wide", *wide, "train.train_iters=5")
        self.trained("narrow", *FP8, "train.train_iters=5")
        of = {name: f"checkpoint.load={self.folder / name / 'checkpoint'}"
              for name in ("wide", "narrow")}
        on_wide = self.trained("wide on wide", *wide, of["wide"])
        on_narrow = self.trained("narrow on wide", *FP8, of["wide"])
        self.assertEqual(len(on_narrow), len(on_wide))
        for (found, _), (expected, _) in zip(on_narrow, on_wide):
            self.assertLess(abs(found / expected - 1), 0.02)
        back = self.trained("wide on narrow", *wide, of["narrow"])
        self.assertEqual(len(back), 7)
        # With another history length, the newest steps are kept; with another format, the scales
        # are computed from the history; another layout takes it unchanged.
        here = self.trained("here", *FP8, of["narrow"])
        longest = self.trained("longer", *FP8, "train.fp8_amax_history_len=9", of["narrow"])
        self.assertEqual(longest[0], here[0])
        again = self.trained("e4m3", *FP8, "train.fp8=e4m3", of["narrow"])
        self.assertLess(abs(again[0][1] / here[0][1] - 1), 0.05)
        staged = self.trained("cut", *FP8, of["narrow"], "parallel.tensor_model_parallel_size=2",
                              ranks=2)
        for other in (again, staged):
            self.assertLess(abs(other[0][0] / here[0][0] - 1), 0.005)
        loss = {}
        for name in ("wide on narrow", "longer"):
            result = run(LOCKSTEP, "evaluate", self.folder / name / "checkpoint", "--input",
                         self.folder / "text", "--json")
            self.assertEqual(result.returncode, 0, result.stderr.decode())
            loss[name] = json.loads(result.stdout)["loss"]
            result = run(LOCKSTEP, "checkpoint", "verify", self.folder / name / "checkpoint")
            self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertLess(abs(loss["longer"] / loss["wide on narrow"] - 1), 0.05)

    def test_megatrons_flags_that_have_no_effect_are_noted(self):
        flags = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
                 "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 "
                 "--vocab-size 256 --train-iters 5 --lr 1e-3 --bf16").split()
        for given, notes in (
                ("--fp8-format hybrid --fp8-recipe mxfp8",
                 ["--fp8-recipe: not there: found 'mxfp8'",
                  "--fp8-recipe: the configuration has delayed instead"]),
                ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 2",
                 ["--fp8-margin: not needed: with --fp8-recipe tensorwise it has no effect"]),
                ("--fp8-format hybrid --num-layers-at-end-in-bf16 2",
                 ["--num-layers-at-end-in-bf16: not needed: without --first-last-layers-bf16 it"]),
                ("--fp8-format hybrid --first-last-layers-bf16",
                 ["--first-last-layers-bf16: leaves none of the 2 layers for --fp8-format, which "
                  "`train` refuses"]),
                ("--fp8-format e5m2 --fp8-margin 2",
                 ["--fp8-format: not there: found 'e5m2'",
                  "--fp8-margin: not needed: without that --fp8-format it has no effect"]),
                ("--num-experts 8 --fp8-format hybrid --moe-router-padding-for-fp8",
                 ["--moe-router-padding-for-fp8: not needed: "])):
            with self.subTest(given):
                result = run(LOCKSTEP, "megatron-flags", "--", *flags, *given.split())
                self.assertEqual(result.returncode, 0, result.stderr.decode())
                for note in notes:
                    self.assertEqual(result.stderr.decode().count(note), 1, result.stderr.decode())

    def test_what_is_refused(self):
        bf16 = "train.precision=bf16"
        for settings, part in (
                (["train.precision=fp16", "train.fp8=hybrid"],
                 "train.fp8: found hybrid, allowed with train.precision = fp16: none"),
                (["train.fp8=fp8"], "train.fp8: found 'fp8', allowed: none, hybrid, e4m3"),
                ([bf16, "train.fp8=e4m3", "train.fp8_amax_history_len=99999999999"],
                 "train.fp8_amax_history_len: found 99999999999, allowed: <= 16384"),
                ([bf16, "train.fp8_margin=1"], "train.fp8_margin: found 1, but train.fp8 is none"),
                ([bf16, "train.fp8=e4m3", "train.fp8_recipe=rowwise", "train.fp8_amax_history_len=2"],
                 "train.fp8_amax_history_len: found 2, but train.fp8_recipe is not delayed"),
                ([bf16, "train.fp8=hybrid", "train.fp8_recipe=rowwise"],
                 "train.fp8_recipe: found rowwise, allowed with train.fp8 = hybrid: delayed, "
                 "tensorwise"),
                ([bf16, "train.fp8=e4m3", "model.num_experts=4", "model.moe_ffn_hidden_size=8"],
                 "train.fp8: found e4m3, but one expert of "
                 "decoder.layers.0.mlp.experts.linear_fc2.weight is 32 x 8 on a rank of etp; "
                 "allowed with it: multiples of 16"),
                ([bf16, "train.fp8=e4m3", "train.cuda_graph=step"],
                 "train.fp8: found e4m3, allowed with train.cuda_graph = step: none"),
                ([bf16, "train.fp8=e4m3", "model.seq_length=24"],
                 "model.seq_length: found 24, allowed with train.fp8: multiples of 16"),
                ([bf16, "train.fp8=e4m3", "train.num_layers_at_end_in_bf16=2"],
                 "train.num_layers_at_end_in_bf16: found 2, and 0 at the start; allowed: together "
                 "at most model.num_layers (1)"),
                ([bf16, "train.fp8=e4m3", "train.num_layers_at_end_in_bf16=1"],
                 "train.num_layers_at_end_in_bf16: found 1, and 0 at the start; allowed: together "
                 "less than model.num_layers (1)"),
                ([bf16, "train.fp8=e4m3", "model.ffn_hidden_size=40"],
                 "train.fp8: found e4m3, but decoder.layers.0.mlp.linear_fc2.weight is 32 x 40 on a "
                 "rank of tp; allowed with it: multiples of 16")):
            with self.subTest(settings=settings):
                self.assert_failed(self.train("refused", *settings), 2, part)


if __name__ == "__main__":
    unittest.main()
