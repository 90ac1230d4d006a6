"""Low-rank adapters, compared with Hugging Face's peft: training steps give its losses and its
adapters, peft loads the adapters that we export, and transformers loads the weights with the
adapters merged. Needs the packages of scripts/requirements-hugging-face.txt in .venv-hugging-face
(scripts/setup hugging-face) or in LOCKSTEP_HUGGING_FACE_PYTHON; without them the comparison is
skipped."""

import json
import os
import pathlib
import subprocess
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, metrics, run, torchrun

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
LENGTH, SAMPLES, STEPS = 32, 1, 5
# model_type, its settings, the modules of peft that form one layer here.
MODELS = {
    "gpt2": ("gpt2", {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2,
                      "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, []),
    "llama": ("llama", {"vocab_size": 256, "max_position_embeddings": LENGTH, "hidden_size": 32,
                        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "num_key_value_heads": 2},
              [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
}
ALL_TARGETS = ('lora.target_modules=["linear_qkv", "linear_proj", "linear_fc1", '
               '"linear_fc2"]')
TUNED = ["lora.rank=4", "lora.alpha=12", ALL_TARGETS, "train.micro_batch_size=1",
         f"train.global_batch_size={SAMPLES}", "train.eval_iters=0", "data.split=1,0",
         "optimizer.lr=0.01", "optimizer.lr_decay_style=constant", "optimizer.weight_decay=0.1",
         "optimizer.adam_beta2=0.95", "optimizer.clip_grad=0.7", "train.device=cpu"]

# Usage: FOLDER MODELS. Saves random models in FOLDER/theirs NAME.
MAKE = """
import json, pathlib, sys, torch, transformers
torch.manual_seed(3)
for name, (model_type, settings, _) in json.loads(sys.argv[2]).items():
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for key, parameter in model.named_parameters():
        norm = "norm" in key or ".ln_" in key
        torch.nn.init.normal_(parameter, 1.0 if norm and key.endswith("weight") else 0.0, 0.2)
    model.save_pretrained(pathlib.Path(sys.argv[1]) / f"theirs {name}")
"""
# Usage: FOLDER NAME LENGTH STEPS SHARED. Trains the adapters of FOLDER/start NAME with peft. Prints
# the losses, the largest differences from FOLDER/tuned NAME (adapters) and from FOLDER/merged NAME
# (logits), and the magnitudes of adapters and logits.
PEFT = """
import json, pathlib, sys, torch, transformers, peft
from safetensors.torch import load_file
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
length, steps, shared = int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])
ids = torch.tensor(list((folder / "text").read_bytes()))
count = (len(ids) - 1) // length
inputs = ids[:count * length].view(count, length)
labels = ids[1:count * length + 1].view(count, length)

def load(kind):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / f"{kind} {name}", dtype=torch.float32, attn_implementation="eager")

model = peft.PeftModel.from_pretrained(load("theirs"), folder / f"start {name}", is_trainable=True)
start = {key: value.clone() for key, value in peft.get_peft_model_state_dict(model).items()}
given = load_file(folder / f"start {name}" / "adapter_model.safetensors")
assert start.keys() == given.keys() and all(torch.equal(start[key], given[key]) for key in start)
modules = dict(model.named_modules())
for first, *others in shared:
    for path, module in modules.items():
        if path.endswith("." + first):
            for other in others:
                twin = modules[path[:-len(first)] + other]
                twin.lora_A["default"].weight = module.lora_A["default"].weight
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
losses = []
for _ in range(steps):
    loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 0.7)
    optimizer.step()
    losses.append(loss.item())
expected = peft.get_peft_model_state_dict(model)
found = load_file(folder / f"tuned {name}" / "adapter_model.safetensors")
assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
tuned = peft.PeftModel.from_pretrained(load("theirs"), folder / f"tuned {name}").eval()
with torch.no_grad():
    logits = tuned(inputs).logits
    merged = load("merged").eval()(inputs).logits
    base = load("theirs").eval()(inputs).logits
print(json.dumps({"losses": losses,
                  "adapters": max((found[k] - expected[k]).abs().max().item() for k in found),
                  "largest": max(value.abs().max().item() for value in found.values()),
                  "logits": (logits - merged).abs().max().item(),
                  "effect": (logits - base).abs().max().item()}))
"""


def fields(*assignments):
    return [part for assignment in assignments for part in ("--set", assignment)]


class Lora(EndToEnd):
    def check(self, *command):
        result = run(*command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result

    def at(self, kind, name):
        return self.folder / f"{kind} {name}"

    def python(self, *arguments):
        result = subprocess.run([PYTHON, "-c", *arguments], capture_output=True, check=False,
                                env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def losses(self, name):
        return [line["lm_loss"] for line in metrics(self.at("run", name))[0]]

    def tune(self, name, kind, steps):
        """Trains for `steps` steps and exports the adapters to FOLDER/`kind` NAME."""
        result = self.check(
            LOCKSTEP, "train", self.at("ours", name) / "step_0" / "config.textproto",
            *fields(*TUNED, f"data.path={self.folder / 'text'}", f"train.train_iters={steps}",
                    f"checkpoint.load={self.at('ours', name)}"), "--output", self.at("run", name))
        self.check(LOCKSTEP, "checkpoint", "export", "--adapters", "--hf", self.at(kind, name),
                   self.at("run", name) / "checkpoint")
        return result.stderr.decode()

    def test_trains_exports_and_merges_as_peft_does(self):
        if not PYTHON.exists():
            self.skipTest(f"peft is not installed ({PYTHON}); run scripts/setup hugging-face")
        text = (self.folder / "text").read_bytes()[:LENGTH * SAMPLES + 1]
        (self.folder / "text").write_bytes(text)
        self.python(MAKE, self.folder, json.dumps(MODELS))
        for name, (model_type, _, shared) in MODELS.items():
            with self.subTest(name):
                self.check(LOCKSTEP, "checkpoint", "import", "--hf", self.at("theirs", name),
                           self.at("ours", name))
                self.tune(name, "start", 0)
                self.assertRegex(self.tune(name, "tuned", STEPS), r"training 0\.0\dM of 0\.\d\dM ")
                self.check(LOCKSTEP, "checkpoint", "export", "--hf", self.at("merged", name),
                           self.at("run", name) / "checkpoint")
                peft = json.loads(self.python(PEFT, self.folder, name, str(LENGTH), str(STEPS),
                                              json.dumps(shared)))
                found = self.losses(name)
                self.assertEqual(len(found), STEPS)
                for ours, theirs in zip(found, peft["losses"]):
                    self.assertLess(abs(ours - theirs), 1e-5, (found, peft["losses"]))
                self.assertLess(found[-1], found[0] - 0.1)
                self.assertLess(peft["adapters"], 1e-5)
                self.assertGreater(peft["largest"], 0.02)
                self.assertLess(peft["logits"], 1e-5)
                self.assertGreater(peft["effect"], 0.1)
                config = json.loads((self.at("tuned", name) / "adapter_config.json").read_text())
                self.assertEqual((config["r"], config["lora_alpha"], config["fan_in_fan_out"]),
                                 (4, 12, model_type == "gpt2"))
                if name == "gpt2":  # whose attention and MLP both have a c_proj
                    self.assertEqual(sorted(config["target_modules"]),
                                     ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
                self.assertEqual(sorted(p.name for p in self.at("tuned", name).iterdir()),
                                 ["adapter_config.json", "adapter_model.safetensors"])

    def test_tuned_models_are_evaluated_generated_from_and_scored(self):
        base, tuned = self.folder / "base", self.folder / "tuned"
        self.check(LOCKSTEP, "train", self.config, "--output", base)
        result = torchrun(2, LOCKSTEP, "train", self.config,
                          *fields("lora.rank=4", ALL_TARGETS, "train.train_iters=20",
                                  "parallel.tensor_model_parallel_size=2",
                                  f"checkpoint.load={base / 'checkpoint'}"), "--output", tuned)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertLess(metrics(tuned)[0][-1]["lm_loss"], metrics(base)[0][-1]["lm_loss"])
        merged, again = self.folder / "merged", self.folder / "again"
        self.check(LOCKSTEP, "checkpoint", "export", "--hf", merged, tuned / "checkpoint")
        self.check(LOCKSTEP, "checkpoint", "import", "--hf", merged, again)
        request = self.folder / "requests"
        request.write_text(json.dumps({"context": "2 squared is ", "continuation": "4."}) + "\n")

        def told(*command):
            return json.loads(self.check(LOCKSTEP, *command).stdout)

        def loss(folder):
            return told("evaluate", folder, "--input", self.folder / "text", "--json")["loss"]

        def likelihood(folder):
            return told("score", folder, "--input", request)["logprob"]

        def text(folder):
            return self.check(LOCKSTEP, "generate", folder, "--prompt", "1 squared",
                              "--max-tokens", "20", "--temperature", "0").stdout

        found = tuned / "checkpoint"
        self.assertLess(abs(loss(found) - loss(again)), 1e-6)
        self.assertLess(loss(found), loss(base / "checkpoint") - 0.02)
        self.assertLess(abs(likelihood(found) - likelihood(again)), 1e-5)
        self.assertEqual(text(found), text(again))
        failed = run(LOCKSTEP, "checkpoint", "export", "--adapters", "--hf", self.folder / "none",
                     base / "checkpoint")
        self.assert_failed(failed, 2, "--adapters: found a checkpoint without adapters")
        self.assertFalse((self.folder / "none").exists())

        failed = run(LOCKSTEP, "checkpoint", "export", "--adapters", "--max-shard-size", "1MB",
                     "--hf", self.folder / "none", tuned / "checkpoint")
        self.assert_failed(failed, 2, "--max-shard-size excludes --adapters")
        self.assertFalse((self.folder / "none").exists())

        failed = run(LOCKSTEP, "checkpoint", "export", "--adapters", "--hf", merged,
                     tuned / "checkpoint")
        self.assert_failed(failed, 1, f"--hf: found a config.json in folder '{merged}', allowed "
                           "with --adapters: a folder without one")
        self.assertEqual(list(merged.glob("adapter*")), [])
        adapters = self.folder / "adapters"
        self.check(LOCKSTEP, "checkpoint", "export", "--adapters", "--hf", adapters,
                   tuned / "checkpoint")
        written = {path.name: path.read_bytes() for path in adapters.iterdir()}
        self.assertEqual(sorted(written), ["adapter_config.json", "adapter_model.safetensors"])
        # A model is refused beside both, and beside weights of adapters that peft has written.
        for kept in (written, {"adapter_model.safetensors": b"trained with peft"}):
            for path in adapters.iterdir():
                path.unlink()
            for name, content in kept.items():
                (adapters / name).write_bytes(content)
            failed = run(LOCKSTEP, "checkpoint", "export", "--hf", adapters, tuned / "checkpoint")
            self.assert_failed(failed, 1, f"--hf: found an {sorted(kept)[0]} in folder "
                               f"'{adapters}', allowed for a model: a folder without adapters")
            self.assertEqual({path.name: path.read_bytes() for path in adapters.iterdir()}, kept)


if __name__ == "__main__":
    unittest.main()
