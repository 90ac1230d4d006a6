"""Each family of Hugging Face's transformers that GPTModel supports: a random model of transformers
gives the same logits and gradients here, and its export gives the same logits there. Needs the
packages of scripts/requirements-hugging-face.txt in .venv-hugging-face (scripts/setup hugging-face)
or in LOCKSTEP_HUGGING_FACE_PYTHON; without them it is skipped."""

import array
import json
import os
import pathlib
import subprocess
import unittest

from support import BUILD, LOCKSTEP, SOURCE, EndToEnd, run

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
LENGTH = 32
SMALL = {"vocab_size": 256, "max_position_embeddings": LENGTH, "hidden_size": 32,
         "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
        "original_max_position_embeddings": 8}
LATENT = SMALL | {"num_key_value_heads": 4, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
                  "kv_lora_rank": 14, "moe_intermediate_size": 20, "num_nextn_predict_layers": 0}
# model_type and config of each family, and a line of our resulting configuration.
FAMILIES = {
    "gpt2": ("gpt2", {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2,
                      "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
             'activation: "gelu_tanh"'),
    "gpt2-untied": ("gpt2", {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2,
                             "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
                             "tie_word_embeddings": False},
                    "untie_embeddings_and_output_weights: true"),
    "llama2": ("llama", SMALL | {"num_key_value_heads": 4}, "num_query_groups: 4"),
    "llama-biases": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True,
                                       "hidden_act": "swish"}, "add_bias_linear: true"),
    "llama3.1": ("llama", SMALL | {"rope_parameters": LLAMA3}, 'rope_scaling_type: "llama3"'),
    "llama-linear": ("llama", SMALL | {"rope_parameters": {
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}, "rope_scaling_factor: 3"),
    "mistral": ("mistral", SMALL | {"sliding_window": 7, "head_dim": 12}, "window_size: 7"),
    # LlamaConfig refuses a width that the number of heads does not divide.
    "mistral-width": ("mistral", SMALL | {
        "sliding_window": None, "hidden_size": 36, "num_attention_heads": 5,
        "num_key_value_heads": 5, "head_dim": 8}, "hidden_size: 36"),
    "qwen2": ("qwen2", SMALL | {"tie_word_embeddings": True}, "add_qkv_bias: true"),
    "qwen2-sliding": ("qwen2", SMALL | SLIDING, "window_size: 5"),
    "qwen3": ("qwen3", SMALL | {"head_dim": 16}, "qk_layernorm: true"),
    "qwen3-sliding": ("qwen3", SMALL | SLIDING | {"head_dim": 16}, "window_size: 5"),
    "mixtral": ("mixtral", SMALL | EXPERTS | {"num_local_experts": 4, "sliding_window": 9},
                "num_experts: 4"),
    "qwen3-moe": ("qwen3_moe", SMALL | EXPERTS | {
        "num_experts": 6, "moe_intermediate_size": 20, "norm_topk_prob": True, "head_dim": 16},
        "moe_ffn_hidden_size: 20"),
    "qwen3-moe-dense": ("qwen3_moe", SMALL | EXPERTS | {
        "num_experts": 4, "moe_intermediate_size": 20, "norm_topk_prob": False,
        "mlp_only_layers": [1]}, "moe_router_pre_softmax: true"),
    "qwen3-yarn": ("qwen3", SMALL | {"head_dim": 16, "rope_parameters": YARN},
                   'rope_scaling_type: "yarn"'),
    "llama-yarn": ("llama", SMALL | {"rope_parameters": YARN | {
        "attention_factor": 1.25, "beta_fast": 4.0, "beta_slow": 2.0}}, "rope_beta_fast: 4"),
    "deepseek-v3": ("deepseek_v3", LATENT | {
        "q_lora_rank": 12, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "moe_router_group_topk: 2"),
    "deepseek-v3-plain": ("deepseek_v3", LATENT | {
        "q_lora_rank": None, "v_head_dim": 18, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}, "rope_mscale: 0.7"),
}

# Usage: FOLDER LENGTH FAMILIES. Saves random models in FOLDER/theirs NAME and the gradients of
# their losses, as if they were weights, in FOLDER/gradients NAME. Without FAMILIES, reads
# FOLDER/back NAME instead. Writes logits to the folder's name with .logits.
TRANSFORMERS = """
import json, pathlib, sys, torch, transformers
torch.manual_seed(3)
folder, length, families = pathlib.Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
ids = torch.tensor(list((folder / "text").read_bytes()))
inputs, labels = ids[:2 * length].view(2, length), ids[1:2 * length + 1].view(2, length)

def write_logits(path):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    logits = model.eval()(inputs).logits
    path.with_name(path.name + ".logits").write_bytes(
        logits.detach().contiguous().numpy().tobytes())
    return model, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def write_model(name, model_type, settings):
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for key, parameter in model.named_parameters():
        norm = "norm" in key or ".ln_" in key
        torch.nn.init.normal_(parameter, 1.0 if norm and key.endswith("weight") else 0.0, 0.2)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.1)
    model.save_pretrained(folder / f"theirs {name}")
    model, loss = write_logits(folder / f"theirs {name}")
    loss.backward()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.grad)
    model.save_pretrained(folder / f"gradients {name}")

for name, (model_type, settings) in families.items():
    write_model(name, model_type, settings)
if not families:
    for path in sorted(folder.glob("back *")):
        write_logits(path)
"""
# Usage: FOLDER NAMES. Prints for each name and tensor the largest difference between ours NAME and
# gradients NAME, and the largest element of the latter.
COMPARE = """
import json, pathlib, sys
from safetensors.torch import load_file
folder = pathlib.Path(sys.argv[1])

def compare(name):
    found = load_file(folder / f"ours {name}.safetensors")
    expected = load_file(folder / f"gradients {name}" / "model.safetensors")
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {key: [(found[key] - expected[key]).abs().max().item(),
                  expected[key].abs().max().item()] for key in found}

print(json.dumps({name: compare(name) for name in sys.argv[2:]}))
"""


def logits(path):
    values = array.array("f")
    values.frombytes(path.read_bytes())
    assert len(values) == 2 * LENGTH * 256
    return values


class HuggingFaceFamilies(EndToEnd):
    def check(self, *command):
        result = run(*command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout.decode()

    def python(self, *arguments):
        result = subprocess.run([PYTHON, "-c", *arguments], capture_output=True, check=False,
                                env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def at(self, kind, name, suffix=""):
        return self.folder / f"{kind} {name}{suffix}"

    def setUp(self):
        super().setUp()
        if not PYTHON.exists():
            self.skipTest(f"transformers is not installed ({PYTHON}); run "
                          "scripts/setup hugging-face")

    def compute_here(self):
        """Import, logits, gradients and export here; logits of the export there."""
        for name in FAMILIES:
            self.check(LOCKSTEP, "checkpoint", "import", "--hf", self.at("theirs", name),
                       self.at("ours", name))
            self.check(LOCKSTEP, "checkpoint", "export", "--hf", self.at("back", name),
                       self.at("ours", name))
        pairs = [(self.at("ours", name), self.at("ours", name, suffix))
                 for name in FAMILIES for suffix in (".logits", ".safetensors")]
        self.check(BUILD / "tests" / "write_logits", self.folder / "text", LENGTH,
                   *(path for pair in pairs for path in pair))
        self.python(TRANSFORMERS, self.folder, str(LENGTH), "{}")

    def test_each_computes_what_transformers_computes(self):
        self.python(TRANSFORMERS, self.folder, str(LENGTH),
                    json.dumps({name: family[:2] for name, family in FAMILIES.items()}))
        self.compute_here()
        gradients = json.loads(self.python(COMPARE, self.folder, *FAMILIES))
        for name, (model_type, _, line) in FAMILIES.items():
            with self.subTest(name):
                expected = logits(self.at("theirs", name, ".logits"))
                found = logits(self.at("ours", name, ".logits"))
                self.assertGreater(max(map(abs, expected)), 0.5)
                # Products round differently on other processors: 1.1e-5 was seen with AVX-512.
                self.assertLess(max(abs(a - b) for a, b in zip(found, expected)), 2e-5)
                self.assertEqual(logits(self.at("back", name, ".logits")), expected)
                for key, (difference, largest) in gradients[name].items():
                    self.assertLess(difference, 1e-5, key)
                    if "experts" not in key:  # an expert may have no token
                        self.assertGreater(largest, 1e-6, key)
                written = (self.at("ours", name, "/step_0") / "config.textproto").read_text()
                self.assertIn(line, written)
                # Fields that follow from a run's settings are left to the run.
                for field in ("lr_decay_iters", "start_weight_decay", "end_weight_decay", "split"):
                    self.assertIn(f"  # {field}: unset: ", written)
                config = json.loads((self.at("back", name) / "config.json").read_text())
                self.assertEqual(config["model_type"], model_type)


if __name__ == "__main__":
    unittest.main()
