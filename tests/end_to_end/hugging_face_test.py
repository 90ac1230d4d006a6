"""Models in both directions: Hugging Face's transformers loads our exports and computes the same
logits, and we load what it saves. Needs the packages of scripts/requirements-hugging-face.txt in
.venv-hugging-face (scripts/setup hugging-face) or in LOCKSTEP_HUGGING_FACE_PYTHON; without them the
comparison is skipped."""

import array
import json
import os
import pathlib
import subprocess
import unittest

from support import BUILD, LOCKSTEP, SOURCE, EndToEnd, metrics, run

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
LENGTH = 32
GPT2 = ("model.position_embedding_type=learned_absolute", "model.normalization=LayerNorm",
        "model.add_bias_linear=true")
GROUPED = ("model.num_attention_heads=4", "model.num_query_groups=2",
           "model.untie_embeddings_and_output_weights=true")
# The models that we train and export.
OURS = {"gpt2": (*GPT2, "model.activation=gelu"),
        "gpt2-tanh": (*GPT2, "model.activation=gelu_tanh"),
        "llama": (*GROUPED, "model.make_vocab_size_divisible_by=100")}
# Settings for continuing from a model that transformers saved.
THEIRS = {"gpt2": (*GPT2, "model.activation=gelu", "model.num_attention_heads=4"),
          "gpt2-tanh": (*GPT2, "model.activation=gelu_tanh", "model.num_attention_heads=4"),
          "llama": (*GROUPED, "model.ffn_hidden_size=48", "model.layernorm_epsilon=1e-6")}

# Saves random models in FOLDER/theirs NAME. Writes the logits of these and of FOLDER/hf NAME to
# FOLDER/theirs NAME.logits and FOLDER/hf NAME.logits; prints the losses of the former.
TRANSFORMERS = """
import json, pathlib, sys, torch, transformers
torch.manual_seed(3)
folder, length, names = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
ids = torch.tensor(list((folder / "text").read_bytes()))
inputs, labels = ids[:2 * length].view(2, length), ids[1:2 * length + 1].view(2, length)

def write_logits(path):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    with torch.no_grad():
        logits = model.eval()(inputs).logits
    path.with_name(path.name + ".logits").write_bytes(logits.contiguous().numpy().tobytes())
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()

def random_model(name):
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=256, max_position_embeddings=32, hidden_size=32, intermediate_size=48,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, activation_function="gelu" if name == "gpt2" else "gelu_new"))

losses = {}
for name in names:
    write_logits(folder / f"hf {name}")
    model = random_model(name)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / f"theirs {name}")
    losses[name] = write_logits(folder / f"theirs {name}")
print(json.dumps(losses))
"""


def logits(path):
    values = array.array("f")
    values.frombytes(path.read_bytes())
    assert len(values) == 2 * LENGTH * 256
    return values


class HuggingFace(EndToEnd):
    def train(self, output, settings):
        command = [LOCKSTEP, "train", self.config, "--output", output]
        for setting in settings:
            command += ["--set", setting]
        self.check(*command)
        return output

    def check(self, *command):
        result = run(*command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def write_logits(self, *prefixes):
        pairs = [(self.folder / f"{prefix} {name}", self.folder / f"{prefix} {name}.logits")
                 for prefix in prefixes for name in OURS]
        self.check(BUILD / "tests" / "write_logits", self.folder / "text", LENGTH,
                   *(path for pair in pairs for path in pair))

    def export_and_import(self):
        """Makes our models in "out", their exports in "hf", and the imports of those in "back"."""
        for name, settings in OURS.items():
            out, hf, back = (self.folder / f"{p} {name}" for p in ("out", "hf", "back"))
            self.train(out, (*settings, f"checkpoint.save={out}"))
            self.check(LOCKSTEP, "checkpoint", "export", "--hf", hf, out)
            self.check(LOCKSTEP, "checkpoint", "import", "--hf", hf, back)

    def test_a_model_comes_back_from_its_export(self):
        self.export_and_import()
        self.write_logits("out", "back")
        for name in OURS:
            self.assertEqual(logits(self.folder / f"back {name}.logits"),
                             logits(self.folder / f"out {name}.logits"))
            self.compare_with_import_of_a_file(name)
        if not PYTHON.exists():
            self.skipTest(f"transformers is not installed ({PYTHON}); run "
                          "scripts/setup hugging-face")
        self.compare_with_transformers()

    def compare_with_import_of_a_file(self, name):
        """The path of the weights, or of their index, is accepted instead of the folder."""
        hf, shards = self.folder / f"hf {name}", self.folder / f"shards {name}"
        self.check(LOCKSTEP, "checkpoint", "export", "--hf", shards, "--max-shard-size", "20KB",
                   self.folder / f"out {name}")
        weights = sorted((self.folder / f"back {name}").glob("step_0/*.safetensors"))
        for number, path in enumerate((hf / "model.safetensors",
                                       shards / "model.safetensors.index.json")):
            again = self.folder / f"again {number} {name}"
            self.check(LOCKSTEP, "checkpoint", "import", "--hf", path, again)
            found = sorted(again.glob("step_0/*.safetensors"))
            self.assertEqual([file.read_bytes() for file in found],
                             [file.read_bytes() for file in weights])
        self.assert_failed(run(LOCKSTEP, "checkpoint", "import", "--hf", hf / "config.json",
                               self.folder / "none"), 1, "config.json': found a different file")

    def compare_with_transformers(self):
        result = subprocess.run([PYTHON, "-c", TRANSFORMERS, self.folder, str(LENGTH), *OURS],
                                capture_output=True, check=False,
                                env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        losses = json.loads(result.stdout)
        for name in THEIRS:
            self.check(LOCKSTEP, "checkpoint", "import", "--hf", self.folder / f"theirs {name}",
                       self.folder / f"imported {name}")
        self.write_logits("imported")
        for name, settings in THEIRS.items():
            for ours, theirs in (("out", "hf"), ("imported", "theirs")):
                found, expected = (logits(self.folder / f"{prefix} {name}.logits")
                                   for prefix in (ours, theirs))
                largest = max(abs(a - b) for a, b in zip(found, expected))
                self.assertLess(largest, 1e-4, f"{ours} {name}")
                self.assertGreater(max(map(abs, expected)), 0.1)
            output = self.train(self.folder / f"on {name}",
                                (*settings, "model.num_layers=2", "checkpoint.finetune=true",
                                 f"checkpoint.load={self.folder / f'imported {name}'}"))
            lines = metrics(output)[0]
            self.assertEqual(lines[0]["iteration"], 1)
            self.assertAlmostEqual(lines[0]["lm_loss"], losses[name], delta=0.5)
            self.assertLess(lines[-1]["lm_loss"], lines[0]["lm_loss"])

    def test_what_has_no_counterpart_is_named(self):
        output = self.train(self.folder / "out", ("model.activation=gelu",))
        result = run(LOCKSTEP, "checkpoint", "export", "--hf", self.folder / "hf",
                     output / "checkpoint")
        self.assert_failed(result, 2, "model.activation: found gelu, allowed in a Llama model")
        folder = self.folder / "bad"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "gpt2", "activation_function": "relu"}')
        result = run(LOCKSTEP, "checkpoint", "import", "--hf", folder, self.folder / "back")
        self.assert_failed(result, 1, "config.json'", "found relu, allowed: gelu, gelu_new")


if __name__ == "__main__":
    unittest.main()
