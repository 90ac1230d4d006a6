"""Compares token ids with PyPI's tokenizers, which `scripts/setup tokenizers` installs. The texts
are LOCKSTEP_TOKENIZER_MEGABYTES (1) MB of many scripts, code and bytes that are not UTF-8, for each
kind of tokenizer."""

import os
import unittest

from support import BUILD, LOCKSTEP, SOURCE, EndToEnd, run

PYTHON = SOURCE / ".venv-tokenizers/bin/python"
MEGABYTES = os.environ.get("LOCKSTEP_TOKENIZER_MEGABYTES", "1")
KINDS = {"gpt2", "prefix", "llama3", "llama3-whole", "qwen2", "o200k", "deepseek", "digits",
         "few-bytes", "few-bytes-unknown-False", "few-bytes-unknown-True",
         "llama2", "mistral", "words", "unknown", "left-out"}


@unittest.skipUnless(PYTHON.exists(), "tokenizers is not installed: scripts/setup tokenizers")
class Tokenizers(EndToEnd):
    def test_ids_are_those_of_tokenizers(self):
        result = run(PYTHON, SOURCE / "tests/end_to_end/tokenizers_peer.py",
                     BUILD / "tests/encode_texts", self.folder / "made", MEGABYTES, timeout=3000)
        self.assertEqual(result.returncode, 0, (result.stdout + result.stderr).decode())
        lines = result.stdout.decode().splitlines()[1:]
        self.assertEqual({line.split(":")[0] for line in lines}, KINDS)
        self.assert_commands_take(self.folder / "made/llama3/tokenizer.json")

    def assert_commands_take(self, file):
        """`data build`, `train` and `generate` accept the file."""
        text = self.folder / "text"
        built = run(LOCKSTEP, "data", "build", "--input", text, "--tokenizer", f"hf:{file}",
                    "--append-eod", "--output", self.folder / "set")
        self.assertEqual(built.returncode, 0, built.stderr)
        trained = run(LOCKSTEP, "train", self.config, "--output", self.folder / "out",
                      "--set", f"data.tokenizer=hf:{file}", "--set", "model.vocab_size=6100",
                      "--set", "train.train_iters=2")
        self.assertEqual(trained.returncode, 0, trained.stderr)
        generated = run(LOCKSTEP, "generate", self.folder / "out/checkpoint", "--prompt",
                        "3 squared", "--max-tokens", 2)
        self.assertTrue(generated.stdout.startswith(b"3 squared"), generated.stderr)


if __name__ == "__main__":
    unittest.main()
