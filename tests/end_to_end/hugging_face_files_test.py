"""Sharded files in both directions, and likelihoods: transformers reads our sharded exports, we
read the shards of save_pretrained(), and `lockstep score` agrees with transformers' logits. Needs
.venv-hugging-face, like hugging_face_test.py; without it the comparisons are skipped."""

import array
import json
import os
import pathlib
import subprocess
import unittest

from faults import faults
from support import BUILD, LOCKSTEP, SOURCE, EndToEnd, run

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
LENGTH = 32
GROUPED = ("model.num_attention_heads=4", "model.num_query_groups=2", "model.num_layers=2",
           "model.vocab_size=257")

# python -c ... read FOLDER: prints the logits of the text's first 32 bytes as a list.
# python -c ... write FOLDER SIZE DTYPE: saves a random model in shards, and prints the same.
# python -c ... score FOLDER [[context, continuation], ...]: prints [logprob, is_greedy] of each.
TRANSFORMERS = """
import json, pathlib, sys, torch, transformers
action, folder = sys.argv[1], pathlib.Path(sys.argv[2])
inputs = torch.tensor(list((folder.parent / "text").read_bytes()[:32]))[None]

def read():
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()

def score(model, context, continuation):
    ids = torch.tensor([*context, *continuation])[-33:]
    logits = torch.log_softmax(model(ids[None, :-1]).logits[0].double(), -1)[-len(continuation):]
    chosen = ids[-len(continuation):]
    return [logits.gather(1, chosen[:, None]).sum().item(),
            bool((logits.argmax(1) == chosen).all())]

torch.manual_seed(3)
with torch.no_grad():
    if action == "write":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=257, max_position_embeddings=32, hidden_size=32, intermediate_size=48,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.to(getattr(torch, sys.argv[4])).save_pretrained(folder, max_shard_size=sys.argv[3])
    if action == "score":
        model = read()
        print(json.dumps([score(model, *pair) for pair in json.loads(sys.argv[3])]))
    else:
        print(json.dumps(read()(inputs).logits.flatten().tolist()))
"""


class Files(EndToEnd):
    def check(self, *command):
        result = run(*command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def transformers(self, *arguments):
        if not PYTHON.exists():
            self.skipTest(f"transformers is not installed ({PYTHON}); run "
                          "scripts/setup hugging-face")
        result = subprocess.run([PYTHON, "-c", TRANSFORMERS, *map(str, arguments)],
                                capture_output=True, check=False,
                                env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return json.loads(result.stdout)

    def logits(self, folder):
        path = self.folder / "logits"
        self.check(BUILD / "tests" / "write_logits", self.folder / "text", LENGTH, folder, path)
        values = array.array("f")
        values.frombytes(path.read_bytes())
        return values[:LENGTH * 257]

    def train(self):
        checkpoint = self.folder / "ours"
        self.check(LOCKSTEP, "train", self.config, "--output", self.folder / "run", "--set",
                   f"checkpoint.save={checkpoint}",
                   *(word for setting in GROUPED for word in ("--set", setting)))
        return checkpoint

    def export(self, name, checkpoint, *options):
        out = self.folder / name
        self.check(LOCKSTEP, "checkpoint", "export", "--hf", out, *options, checkpoint)
        return out

    def assert_near(self, found, expected, within):
        self.assertEqual(len(found), len(expected))
        self.assertLess(max(abs(a - b) for a, b in zip(found, expected)), within)
        self.assertGreater(max(map(abs, expected)), 0.1)

    def test_transformers_reads_our_shards(self):
        checkpoint = self.train()
        shards = self.export("shards", checkpoint, "--max-shard-size", "20KB")
        index = json.loads((shards / "model.safetensors.index.json").read_text())
        self.assertGreater(len(set(index["weight_map"].values())), 3)
        self.assertEqual(sorted({*index["weight_map"].values()}),
                         sorted(path.name for path in shards.glob("*.safetensors")))
        whole = self.export("whole", checkpoint)
        self.assertEqual(self.transformers("read", shards), self.transformers("read", whole))
        self.assert_near(self.transformers("read", shards), self.logits(checkpoint), 1e-5)
        narrow = self.export("narrow", checkpoint, "--max-shard-size", "20KB", "--dtype", "bf16")
        self.assertNotEqual(self.transformers("read", narrow), self.transformers("read", whole))
        self.check(LOCKSTEP, "checkpoint", "import", "--hf", narrow, self.folder / "rounded")
        self.assert_near(self.transformers("read", narrow), self.logits(self.folder / "rounded"),
                         1e-5)

    def test_we_read_the_shards_of_transformers(self):
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            theirs = self.folder / f"theirs {dtype}"
            expected = self.transformers("write", theirs, "20KB", dtype)
            self.assertTrue((theirs / "model.safetensors.index.json").exists())
            self.check(LOCKSTEP, "checkpoint", "import", "--hf", theirs,
                       self.folder / f"imported {dtype}")
            self.assert_near(self.logits(self.folder / f"imported {dtype}"), expected, 1e-4)
        # The files are cut in the same places, except for the order of the weights.
        again = self.export("again", self.folder / "imported float32", "--max-shard-size", "20KB")
        sizes = [json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
                 ["total_size"] for folder in (self.folder / "theirs float32", again)]
        self.assertEqual(*sizes)

    def test_what_an_import_cannot_remove_is_told(self):
        whole, back = self.export("whole", self.train()), self.folder / "back"
        command = (LOCKSTEP, "checkpoint", "import", "--hf", whole, back)
        self.check(*command)
        stuck = back / "step_7.partial"
        stuck.mkdir()
        (stuck / "file").touch()
        # A leftover, before anything is written; and the earlier import, once it is replaced.
        result = run(*command, **faults("unlink:EACCES:1+:step_7.partial/file",
                                        "unlink:EIO:1+:step_0.partial/rank_00000"))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stdout.decode(), f"{back}/step_0\n")
        self.assertEqual(result.stderr.decode(),
                         f"lockstep: '{stuck}' cannot be removed: Permission denied; "
                         f"'{back}/step_0.partial' cannot be removed: Input/output error\n")
        result = run(*command)
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        self.assertEqual(sorted(os.listdir(back)), ["hugging_face", "latest", "step_0"])

    def test_scores_are_what_the_logits_of_transformers_say(self):
        checkpoint = self.train()
        whole = self.export("whole", checkpoint)
        texts = [("3 squared", " is 9. 4"), ("3 squared ", "is 9"), ("x", "yz"), ("", "one"),
                 ("so long a context that it does not fit into 32 tokens", " is 7"),
                 ("caf\u00e9 ", "\u00e9"), ("a", "b" * 32)]
        path = self.folder / "requests.jsonl"
        path.write_text("".join(json.dumps({"context": a, "continuation": b}) + "\n"
                                for a, b in texts))
        found = [json.loads(line) for line in
                 self.check(LOCKSTEP, "score", checkpoint, "--input", path).splitlines()]

        def ids(context, continuation):
            stripped = context.rstrip()
            continuation = context[len(stripped):] + continuation
            return [list(stripped.encode()) or [256], list(continuation.encode())]

        expected = self.transformers("score", whole, json.dumps([ids(*pair) for pair in texts]))
        for answer, (logprob, is_greedy) in zip(found, expected, strict=True):
            self.assertAlmostEqual(answer["logprob"], logprob, delta=1e-4)
            self.assertEqual(answer["is_greedy"], is_greedy)


if __name__ == "__main__":
    unittest.main()
