"""AutoTokenizer of transformers, on an export of each family, encodes as `lockstep` does, and so
does the tokenizer of an import of that export. Needs the packages of
scripts/requirements-hugging-face.txt in .venv-hugging-face (scripts/setup hugging-face) or in
LOCKSTEP_HUGGING_FACE_PYTHON; without them it is skipped."""

import array
import json
import os
import pathlib
import struct
import subprocess
import unittest

from support import BUILD, LOCKSTEP, SOURCE, EndToEnd, clean_environment, run

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
FAMILIES = {
    "gpt2": ("model.position_embedding_type=learned_absolute", "model.normalization=LayerNorm",
             "model.add_bias_linear=true", "model.activation=gelu"),
    "llama": (),
    "mistral": ("model.window_size=8",),
    "qwen2": ("model.add_qkv_bias=true",),
    "qwen3": ("model.qk_layernorm=true",),
    "mixtral": ("model.num_experts=2", "model.moe_router_topk=2"),
    "qwen3_moe": ("model.num_experts=2", "model.qk_layernorm=true"),
}
END = "<|endoftext|>"
TEXTS = ["It's 12345 squares.", "  two  spaces\n\n\tand a tab ", "caf\u00e9 or cafe\u0301, \u00c5?",
         "don't  DON'T 3.14", "\u65e5\u672c\u8a9e \U0001f642", " ", "x", "\u00a0a\u2028b\x1fc"]

# Usage: FOLDER NAMES. Reads FOLDER/texts and prints for each export FOLDER/NAME the class, and of
# AutoTokenizer and of PreTrainedTokenizerFast the ids of each text, the texts of these ids, and the
# ids of the ends.
TRANSFORMERS = """
import json, pathlib, sys
from transformers import AutoTokenizer, PreTrainedTokenizerFast
folder = pathlib.Path(sys.argv[1])
texts = json.loads((folder / "texts").read_text())

def answers(tokenizer):
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [ids, [tokenizer.decode(one) for one in ids], tokenizer.eos_token_id]

print(json.dumps({name: [answers(kind.from_pretrained(folder / name))
                         for kind in (AutoTokenizer, PreTrainedTokenizerFast)]
                  for name in sys.argv[2:]}))
"""

# Usage: EXPORT TEXT. Prints the ends of text that generate() has, and the log-likelihood of a text
# after the token that lm-evaluation-harness takes for an empty context.
MODEL = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
ids = torch.tensor([first, *tokenizer.encode(sys.argv[2], add_special_tokens=False)])
with torch.no_grad():
    logits = model.eval()(ids[None, :-1]).logits[0].double()
chosen = torch.log_softmax(logits, -1).gather(1, ids[1:, None])
print(json.dumps([model.generation_config.eos_token_id, chosen.sum().item()]))
"""


def bpe():
    """Returns the small vocabulary and the merges of the tests of GPT-2's tokenizer."""
    golden = json.loads((SOURCE / "tests/datasets/gpt2_tokenizer_golden.json").read_text())
    return golden["encoder"], golden["merges"]


@unittest.skipUnless(PYTHON.exists(), "transformers is not installed: scripts/setup hugging-face")
class ExportedTokenizers(EndToEnd):
    def check(self, *command):
        result = run(*command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stderr.decode()

    def write_gpt2(self):
        """GPT-2's files as they were published, with a token that ends documents."""
        folder = self.folder / "published"
        folder.mkdir()
        tokens, merges = bpe()
        tokens.setdefault(END, len(tokens))
        (folder / "encoder.json").write_text(json.dumps(tokens))
        (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(m + "\n" for m in merges))
        return f"gpt2:{folder}", len(tokens), tokens[END]

    def write_hf(self, config=None, more=()):
        """A tokenizer.json whose pieces are those of no class in transformers."""
        folder = self.folder / "own"
        folder.mkdir()
        tokens, merges = bpe()
        end = tokens.setdefault(END, len(tokens))
        added = [{"id": tokens.setdefault(content, len(tokens)), "content": content,
                  "special": True, "normalized": False, "single_word": False, "lstrip": False,
                  "rstrip": False} for content in (END, *more)]
        bytes_of_pieces = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
                           "trim_offsets": True}
        (folder / "tokenizer.json").write_text(json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": None, "post_processor": None, "pre_tokenizer": bytes_of_pieces,
            "decoder": bytes_of_pieces, "model": {"type": "BPE", "vocab": tokens,
                                                  "merges": merges}}))
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return f"hf:{folder}/tokenizer.json", len(tokens), end

    def encode(self, tokenizer, texts):
        """The ids that Lockstep gives."""
        given = b"".join(struct.pack("Q", len(t)) + t for t in (t.encode() for t in texts))
        found = subprocess.run([BUILD / "tests/encode_texts", tokenizer], input=given, check=True,
                               capture_output=True, env=clean_environment()).stdout
        answers = []
        while found:
            count, = struct.unpack_from("Q", found)
            ids = array.array("q", found[8:8 + 8 * count])
            size, = struct.unpack_from("Q", found, 8 + 8 * count)
            found = found[16 + 8 * count + size:]
            answers.append(list(ids))
        return answers

    def export(self, family, tokenizer, size, data=("data.mock=true",)):
        checkpoint = self.folder / f"trained {family}"
        fields = (*FAMILIES[family], f"model.vocab_size={size}", f"data.tokenizer={tokenizer}",
                  *data, "train.train_iters=1", "train.eval_iters=0", "data.split=1,0",
                  f"checkpoint.save={checkpoint}")
        self.check(LOCKSTEP, "train", self.config,
                   *(word for field in fields for word in ("--set", field)))
        return self.check(LOCKSTEP, "checkpoint", "export", "--hf", self.folder / family, checkpoint)

    def python(self, *arguments):
        result = subprocess.run([PYTHON, "-c", *arguments], capture_output=True, check=False,
                                env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return json.loads(result.stdout)

    def imported(self, family):
        """The tokenizer of an import of the export."""
        back = self.folder / f"back {family}"
        self.assertEqual(self.check(LOCKSTEP, "checkpoint", "import", "--hf", self.folder / family,
                                    back), "")
        return f"hf:{back}/hugging_face/tokenizer.json"

    def assert_exports_encode_alike(self, tokenizer, size, end):
        notes = {family: self.export(family, tokenizer, size) for family in FAMILIES}
        expected = self.encode(tokenizer, TEXTS)
        (self.folder / "texts").write_text(json.dumps(TEXTS))
        answers = self.python(TRANSFORMERS, self.folder, *FAMILIES)
        for family, (auto, fast) in answers.items():
            with self.subTest(family):
                told = "transformers takes a Qwen2Tokenizer" in notes[family]
                self.assertEqual(told, family == "qwen2", notes[family])
                self.assertEqual(fast, [expected, TEXTS, end])
                if family != "qwen2":  # whose class transformers does not let a file choose
                    self.assertEqual(auto, [expected, TEXTS, end])
                self.assertEqual(self.encode(self.imported(family), TEXTS), expected)

    def test_of_gpt2s_published_files(self):
        tokenizer, size, end = self.write_gpt2()
        self.assert_exports_encode_alike(tokenizer, size, end)

    def test_of_a_tokenizer_json_alone(self):
        self.assert_exports_encode_alike(*self.write_hf())

    def test_of_a_tokenizer_json_with_a_configuration_that_names_no_class(self):
        self.assert_exports_encode_alike(*self.write_hf({"eos_token": END, "extra": [1]}))
        found = json.loads((self.folder / "llama/tokenizer_config.json").read_text())
        self.assertEqual((found["eos_token"], found["extra"]), (END, [1]))

    def test_an_empty_context_is_the_token_that_begins_texts(self):
        tokenizer, size, _ = self.write_hf({"eos_token": END, "bos_token": "<s>"}, ["<s>"])
        self.export("llama", tokenizer, size)
        path, text = self.folder / "requests", "one two"
        path.write_text(json.dumps({"context": "", "continuation": text}))
        found = json.loads(run(LOCKSTEP, "score", self.folder / "trained llama", "--input",
                               path).stdout)
        _, expected = self.python(MODEL, self.folder / "llama", text)
        self.assertAlmostEqual(found["logprob"], expected, delta=1e-4)

    def test_generation_ends_where_messages_end(self):
        tokenizer, size, end = self.write_hf(None, ["<|im_start|>", "<|im_end|>"])
        lines = self.folder / "lines.jsonl"
        lines.write_text(json.dumps({"prompt": "2 + 3", "completion": "5"}) + "\n")
        self.export("llama", tokenizer, size, ("train.task=sft", f"data.path={lines}"))
        self.assertEqual(self.python(MODEL, self.folder / "llama", "x")[0], [end, end + 2])


if __name__ == "__main__":
    unittest.main()
