"""Runs README's commands that import a Hugging Face model, word for word, on a small random Qwen3
with a byte-level tokenizer; transformers loads what they export. Needs the packages of
scripts/requirements-hugging-face.txt in .venv-hugging-face (scripts/setup hugging-face) or in
LOCKSTEP_HUGGING_FACE_PYTHON; without them it is skipped."""

import json
import os
import pathlib
import re
import subprocess
import unittest

from support import BUILD, LOCKSTEP, SOURCE, EndToEnd, clean_environment, metrics

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
REASON = "<!-- not run here: needs a downloaded model -->"
# The embedding has more rows than the tokenizer has ids, as in the published models.
MAKE = """
import pathlib, sys, torch, transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
folder, text = map(pathlib.Path, sys.argv[1:])
torch.manual_seed(3)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.train([str(text)], trainers.BpeTrainer(
    vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=["<|endoftext|>"], show_progress=False))
config = transformers.Qwen3Config(
    vocab_size=512, max_position_embeddings=4096, hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    tie_word_embeddings=True)
transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
"""
LOAD = """
import json, sys, torch, transformers
model, info = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], output_loading_info=True, dtype=torch.float32)
assert not info["missing_keys"] and not info["unexpected_keys"], info
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
before = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
moved = (model(ids).logits - before(ids).logits).abs().max().item()
print(json.dumps({"tokens": ids.shape[1], "moved": moved}))
"""


def commands_of_readme():
    blocks = re.findall(re.escape(REASON) + r"\n```sh\n(.*?)```", (SOURCE / "README.md").read_text(),
                        re.S)
    assert len(blocks) == 1, blocks
    return blocks[0]


@unittest.skipUnless(PYTHON.exists(), "transformers is not installed: scripts/setup hugging-face")
class BringAModel(EndToEnd):
    def python(self, program, *arguments):
        result = subprocess.run([PYTHON, "-c", program, *arguments], capture_output=True, text=True,
                                timeout=240, check=False, env=clean_environment())
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_the_commands_of_the_readme(self):
        books = (SOURCE / "data/alice29.txt").read_text().split("\n\n")
        (self.folder / "corpus").mkdir()
        for name, part in (("a", books[0::2]), ("b", books[1::2])):
            (self.folder / f"corpus/{name}.jsonl").write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in part))
        self.python(MAKE, self.folder / "Qwen3-0.6B", SOURCE / "data/alice29.txt")
        (self.folder / "build").symlink_to(BUILD)
        # Only the batch and the number of iterations are reduced.
        script = commands_of_readme().replace(
            "data.path=runs/corpus", "data.path=runs/corpus --set train.train_iters=3 "
            "--set train.global_batch_size=2 --set train.micro_batch_size=1 --set optimizer.lr=0.01 "
            "--set train.eval_iters=1")
        ran = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=self.folder,
                             capture_output=True, timeout=240, check=False,
                             env=clean_environment(OMP_NUM_THREADS="2"))
        self.assertEqual(ran.returncode, 0, ran.stderr.decode(errors="replace"))
        self.assertIn(b"Once upon a time", ran.stdout)
        iterations, _ = metrics(self.folder / "runs/tuned")
        self.assertEqual(len(iterations), 3)
        self.assertEqual(iterations[0]["num_tokens"], 2 * 2048)
        loaded = json.loads(self.python(LOAD, self.folder / "runs/tuned-hf",
                                        self.folder / "Qwen3-0.6B"))
        runs = self.folder / "runs"
        (runs / "qwen").rename(runs / "elsewhere")  # including the tokenizer
        moved = subprocess.run([LOCKSTEP, "generate", runs / "elsewhere", "--prompt", "Once",
                                "--max-tokens", "2"], capture_output=True, check=False,
                               env=clean_environment())
        self.assertEqual(moved.returncode, 0, moved.stderr)
        self.assertTrue(moved.stdout.startswith(b"Once"))
        self.assertGreater(loaded["tokens"], 3)
        self.assertGreater(loaded["moved"], 1e-4)


if __name__ == "__main__":
    unittest.main()
