"""Models there and back: Hugging Face's transformers loads what we export and computes the same, and
we load what it saves. Needs the packages of scripts/requirements-hugging-face.txt in
.venv-hugging-face (scripts/setup hugging-face) or in LOCKSTEP_HUGGING_FACE_PYTHON; without them the
comparison is skipped."""

import json
import os
import pathlib
import subprocess
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, metrics, run

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
GPT2 = ("model.position_embedding_type=learned_absolute", "model.normalization=LayerNorm",
        "model.activation=gelu", "model.add_bias_linear=true")
LLAMA = ("model.num_attention_heads=4", "model.num_query_groups=2",
         "model.untie_embeddings_and_output_weights=true", "model.make_vocab_size_divisible_by=100")

# The mean loss over windows of a text, by transformers.
EVALUATE = """
import sys, torch, transformers
folder, text, length = sys.argv[1], open(sys.argv[2], "rb").read(), int(sys.argv[3])
model, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")
assert not info["missing_keys"] and not info["unexpected_keys"], info
model.eval()
ids = torch.tensor(list(text))
windows = (len(ids) - 1) // length
inputs = torch.stack([ids[i * length:(i + 1) * length] for i in range(windows)])
labels = torch.stack([ids[i * length + 1:(i + 1) * length + 1] for i in range(windows)])
with torch.no_grad():
    logits = model(inputs).logits.double()
print(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
print(logits[0].argmax(-1)[-1].item())
"""

# A random model that transformers saves.
MAKE = """
import sys, torch, transformers
torch.manual_seed(3)
folder, family = sys.argv[1:]
if family == "gpt2":
    config = transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                                     activation_function="gelu", resid_pdrop=0, embd_pdrop=0,
                                     attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config)
else:
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=32, hidden_size=32,
                                      intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
model.save_pretrained(folder)
"""


class HuggingFace(EndToEnd):
    def train(self, settings):
        output = self.folder / "out"
        command = [LOCKSTEP, "train", self.config, "--output", output]
        for setting in settings:
            command += ["--set", setting]
        result = run(*command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return output

    def check(self, *arguments):
        result = run(LOCKSTEP, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def evaluate(self, folder):
        return json.loads(self.check("evaluate", folder, "--input", self.folder / "text",
                                     "--json"))["loss"]

    def python(self, program, *arguments):
        if not PYTHON.exists():
            self.skipTest(f"transformers is not installed ({PYTHON}); run "
                          "scripts/setup hugging-face")
        result = subprocess.run([PYTHON, "-c", program, *map(str, arguments)], capture_output=True,
                                check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout.decode().split()

    def test_a_model_comes_back_from_its_export(self):
        for settings in (GPT2, LLAMA):
            output = self.train(settings)
            self.check("checkpoint", "export", "--hf", self.folder / "hf", output / "checkpoint")
            self.check("checkpoint", "import", "--hf", self.folder / "hf", self.folder / "back")
            self.assertEqual(self.evaluate(self.folder / "back"),
                             self.evaluate(output / "checkpoint"))

    def test_transformers_computes_the_same_from_our_export(self):
        for settings in (GPT2, LLAMA):
            output = self.train(settings)
            self.check("checkpoint", "export", "--hf", self.folder / "hf", output / "checkpoint")
            found = self.python(EVALUATE, self.folder / "hf", self.folder / "text", 32)
            self.assertAlmostEqual(float(found[0]), self.evaluate(output / "checkpoint"),
                                   delta=1e-5)

    def test_training_goes_on_from_a_model_that_transformers_saved(self):
        for family, settings in (
                ("gpt2", (*GPT2, "model.num_attention_heads=4")),
                ("llama", ("model.num_attention_heads=4", "model.num_query_groups=2",
                           "model.ffn_hidden_size=48", "model.layernorm_epsilon=1e-6",
                           "model.untie_embeddings_and_output_weights=true"))):
            theirs, ours = self.folder / f"{family} theirs", self.folder / f"{family} ours"
            self.python(MAKE, theirs, family)
            self.check("checkpoint", "import", "--hf", theirs, ours)
            expected = self.python(EVALUATE, theirs, self.folder / "text", 32)
            self.assertAlmostEqual(self.evaluate(ours), float(expected[0]), delta=1e-4)
            output = self.train((*settings, "model.num_layers=2", f"checkpoint.load={ours}",
                                 "checkpoint.finetune=true"))
            first = metrics(output)[0][0]
            self.assertEqual(first["iteration"], 1)
            self.assertAlmostEqual(first["lm_loss"], float(expected[0]), delta=0.5)
            self.assertLess(metrics(output)[0][-1]["lm_loss"], first["lm_loss"])

    def test_what_has_no_counterpart_is_named(self):
        output = self.train(("model.activation=gelu",))
        result = run(LOCKSTEP, "checkpoint", "export", "--hf", self.folder / "hf",
                     output / "checkpoint")
        self.assert_failed(result, 2, "model.activation: found gelu, allowed in a Llama model")
        folder = self.folder / "bad"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        result = run(LOCKSTEP, "checkpoint", "import", "--hf", folder, self.folder / "back")
        self.assert_failed(result, 1, "config.json'", "found gelu_new, allowed: gelu")


if __name__ == "__main__":
    unittest.main()
