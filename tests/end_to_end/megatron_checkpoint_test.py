"""scripts/megatron_checkpoint on checkpoints that Megatron Core 0.16.1 writes here in its format
torch_dist, with two tensor-parallel ranks: the imported model has the logits of the saved one.
Skipped if Megatron Core is not installed (scripts/setup megatron)."""

import array
import json
import os
import pathlib
import subprocess
import sys
import unittest

from support import (BUILD, LOCKSTEP, SOURCE, EndToEnd, clean_environment, free_port,
                     megatron_python, run)

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = SOURCE / "scripts" / "megatron_checkpoint"
MODELS = ("gpt2", "llama", "qwen2", "qwen3", "mixtral")
MODELS_OF = """
import json, sys
sys.path.insert(0, sys.argv[1])
from model_config import Model
told = []
for arguments in json.loads(sys.argv[2]):
    try:
        told.append(Model(arguments).model_type)
    except SystemExit as refused:
        told.append(str(refused))
print(json.dumps(told))
"""


def values(path):
    found = array.array("f")
    found.frombytes(path.read_bytes())
    return found


@unittest.skipUnless(megatron_python(), "megatron-core is not installed: run scripts/setup megatron")
class MegatronCheckpoint(EndToEnd):
    def python(self, *arguments):
        return subprocess.run([megatron_python(), "-W", "ignore", *map(str, arguments)],
                              capture_output=True, timeout=300, env=clean_environment(),
                              check=False)

    def save(self, *names):
        ran = self.python("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port",
                          free_port(), HERE / "megatron_save.py", self.folder,
                          self.folder / "text", 2, *names)
        self.assertEqual(ran.returncode, 0, ran.stderr.decode())

    def convert(self, *arguments):
        ran = self.python(SCRIPT, *arguments)
        self.assertEqual(ran.returncode, 0, ran.stderr.decode())

    def models(self, arguments):
        """For each dictionary of arguments the type of its model, or why it is refused."""
        ran = self.python("-c", MODELS_OF, SCRIPT.parent / "megatron", json.dumps(arguments))
        self.assertEqual(ran.returncode, 0, ran.stderr.decode())
        return json.loads(ran.stdout)

    def test_what_is_imported_has_the_logits_of_what_was_saved(self):
        self.save(*MODELS)
        pairs = []
        for name in MODELS:
            out, ours = self.folder / f"{name}.hf", self.folder / f"{name}.ours"
            self.convert("--dtype", "fp32", "--max-shard-size", 20_000, self.folder / name, out)
            self.assertEqual(json.loads((out / "config.json").read_text())["model_type"], name)
            self.assertTrue((out / "model.safetensors.index.json").exists())
            ran = run(LOCKSTEP, "checkpoint", "import", "--hf", out, ours)
            self.assertEqual(ran.returncode, 0, ran.stderr.decode())
            pairs += [ours, self.folder / f"{name}.found"]
        ran = run(BUILD / "tests" / "write_logits", self.folder / "text", 32, *pairs)
        self.assertEqual(ran.returncode, 0, ran.stderr.decode())
        for name in MODELS:
            with self.subTest(name):
                expected = values(self.folder / f"{name}.logits")
                found = values(self.folder / f"{name}.found")
                self.assertEqual(len(found), len(expected))
                self.assertGreater(max(map(abs, expected)), 0.5)
                self.assertLess(max(abs(a - b) for a, b in zip(found, expected)), 1e-5)

    def test_what_does_not_fit_is_named(self):
        self.save("llama")
        arguments = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
                     "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
                     "num_query_groups": 2, "ffn_hidden_size": 48, "max_position_embeddings": 32}
        file = self.folder / "arguments.json"

        def refusal(**changed):
            file.write_text(json.dumps(arguments | changed))
            ran = self.python(SCRIPT, "--arguments", file, self.folder / "llama",
                              self.folder / "out")
            self.assertEqual(ran.returncode, 1)
            return ran.stderr.decode()

        self.assertIn("tensor 'output_layer.weight' belongs to no weight", refusal())
        untied = {"untie_embeddings_and_output_weights": True}
        self.assertIn("layer 2: none of", refusal(num_layers=3, **untied))
        self.assertIn("argument normalization: found LayerNorm", refusal(normalization="LayerNorm"))
        self.assertIn("argument multi_latent_attention: found True",
                      refusal(multi_latent_attention=True))
        self.assertIn("argument hidden_size: is missing", refusal(hidden_size=None))
        ran = self.python(SCRIPT, self.folder, self.folder / "out")
        self.assertIn("no file .metadata", ran.stderr.decode())

    def test_arguments_that_no_published_model_has_are_named(self):
        """Otherwise the files would be those of the model without them."""
        llama = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
                 "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
        mistral = llama | {"window_size": [7, 0]}
        gpt2 = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
                "position_embedding_type": "learned_absolute"}
        neutral = {"rotary_seq_len_interpolation_factor": None, "no_rope_freq": None,
                   "qk_l2_norm": False, "softmax_type": "vanilla", "glu_linear_offset": 0,
                   "apply_residual_connection_post_layernorm": False, "squared_relu": False,
                   "activation_func_clamp_value": None, "window_attn_skip_freq": None}
        families = {"llama": llama, "mistral": mistral, "gpt2": gpt2}
        taken = [*families.values(), *(given | neutral for given in families.values()),
                 llama | {"window_attn_skip_freq": 4}]
        self.assertEqual(self.models(taken), [*families, *families, "llama"])
        refused = (
            ("llama", llama, "rotary_seq_len_interpolation_factor", 4),
            ("llama", llama, "position_embedding_type", "none"),
            ("llama", llama, "position_embedding_type", "yarn"),
            ("llama", llama, "no_rope_freq", 4),
            ("llama", llama, "no_rope_freq", [0, 1]),
            ("mistral", mistral, "window_attn_skip_freq", 4),
            ("llama", llama, "qk_l2_norm", True),
            ("llama", llama, "softmax_type", "off-by-one"),
            ("llama", llama, "attention_output_gate", True),
            ("llama", llama, "apply_residual_connection_post_layernorm", True),
            ("llama", llama, "apply_layernorm_1p", True),
            ("llama", llama, "layernorm_zero_centered_gamma", True),
            ("llama", llama, "activation_func_clamp_value", 7.0),
            ("llama", llama, "glu_linear_offset", 1.0),
            ("llama", llama, "quick_geglu", True),
            ("gpt2", gpt2, "squared_relu", True),
            ("gpt2", gpt2, "openai_gelu", True),
            ("gpt2", gpt2, "window_size", [7, 0]))
        told = self.models([given | {name: value} for _, given, name, value in refused])
        for (family, _, name, value), found in zip(refused, told):
            with self.subTest(name, value=value):
                self.assertIn(f"argument {name}: found {value}, allowed in a {family} model: ",
                              found)

    def test_nothing_of_an_earlier_conversion_stays(self):
        self.save("llama")
        out = self.folder / "out"
        self.convert(self.folder / "llama", out)
        (out / "notes").write_text("mine")
        self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors", "notes"])
        self.convert("--max-shard-size", 20_000, self.folder / "llama", out)
        shards = sorted(path.name for path in out.glob("model-*.safetensors"))
        self.assertGreater(len(shards), 1)
        self.assertEqual(sorted(os.listdir(out)), sorted(
            ["config.json", *shards, "model.safetensors.index.json", "notes"]))
        self.convert(self.folder / "llama", out)
        self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors", "notes"])


if __name__ == "__main__":
    sys.exit(unittest.main())
