"""Compares conversations as token ids with transformers' apply_chat_template, on tokenizers that
the test makes: the ids, and which of them belong to the assistant's messages. Needs the packages of
scripts/requirements-hugging-face.txt in .venv-hugging-face (scripts/setup hugging-face) or in
LOCKSTEP_HUGGING_FACE_PYTHON; without them it is skipped."""

import json
import os
import pathlib
import random
import subprocess
import unittest

from support import BUILD, SOURCE, EndToEnd, run

PYTHON = pathlib.Path(os.environ.get("LOCKSTEP_HUGGING_FACE_PYTHON",
                                     SOURCE / ".venv-hugging-face" / "bin" / "python"))
ENCODE = BUILD / "tests/encode_conversations"

# Usage: FOLDER. Makes FOLDER/KIND/tokenizer.json and writes FOLDER/KIND.TEMPLATE.json with
# transformers' results for each line of FOLDER/lines. `generation` encloses the assistant's text.
TRANSFORMERS = r"""
import json, pathlib, sys
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, trainers)
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
              "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
              "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
              "{{ '\n' }}{% endfor %}",
    "llama3": "{{ bos_token }}{% for m in messages %}"
              "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
              "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}"
              "{{ '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m.content | trim }}"
              "{{ '<|eot_id|>' }}{% endif %}{% endfor %}",
    "plain": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
             "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
             "{% endfor %}",
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<|endoftext|>"]
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST

def make(kind, texts):
    tokenizer = Tokenizer(models.BPE())
    if kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0)])
        first = ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=first, show_progress=False)
    else:
        split = [] if kind == "gpt2" else [pre_tokenizers.Split(Regex(WORDS), "isolated")]
        if kind == "nfc":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            split + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "metaspace":  # bytes are no tokens that a text spells out
        state = json.loads(tokenizer.to_str())
        state["added_tokens"] = state["added_tokens"][:1]
        tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer

folder = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
texts = [m["content"] for messages in lines for m in messages] + ["user\n assistant\n\n system"] * 50
for kind in ("gpt2", "words", "nfc", "metaspace"):
    (folder / kind).mkdir()
    file = folder / kind / "tokenizer.json"
    file.write_text(make(kind, texts).to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<|begin_of_text|>",
                                        eos_token="<|endoftext|>")
    (folder / kind / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    for name, template in TEMPLATES.items():
        answers = []
        for messages in lines:
            found = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True)
            answers.append([found["input_ids"], found["assistant_masks"]])
        (folder / f"{kind}.{name}.json").write_text(json.dumps(answers))
"""

PIECES = ["Hello", " world", "\n", "\n\n", "  ", "\t", "don't", "42", "12345", "...", "é", "e\u0301",
          "日本語", "🙂", "\u00a0", "\u2028", "user", "assistant\n", "<|im_end|>", "<|eot_id|>",
          "<|im_sta", "a", " a", "x = [1, 2];", "\x1f"]


def conversations(rng):
    """Yields lists of messages, with white space and special tokens in difficult places."""
    for _ in range(300):
        messages = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": "Be brief."})
        for _ in range(rng.randint(1, 4)):
            for role in ("user", "assistant"):
                content = "".join(rng.choices(PIECES, k=rng.randint(1, 8)))
                messages.append({"role": role, "content": content})
        yield messages
    yield [{"role": "assistant", "content": "I begin."}]
    yield [{"role": "user", "content": "no answer"}]
    # The empty texts are not first: if the first answer is the first token, as in the template
    # plain, transformers marks all tokens.
    yield [{"role": "user", "content": "begin"}, {"role": "assistant", "content": "I do"},
           {"role": "user", "content": ""}, {"role": "assistant", "content": ""},
           {"role": "user", "content": "again"}, {"role": "assistant", "content": "yes"}]


@unittest.skipUnless(PYTHON.exists(), "transformers is not installed: scripts/setup hugging-face")
class ChatTemplates(EndToEnd):
    def test_ids_and_learned_tokens_are_those_of_transformers(self):
        lines = list(conversations(random.Random(5)))
        (self.folder / "lines").write_text("".join(json.dumps(m) + "\n" for m in lines))
        made = subprocess.run([PYTHON, "-c", TRANSFORMERS, self.folder], capture_output=True,
                              text=True, check=False)
        self.assertEqual(made.returncode, 0, made.stderr[-3000:])
        for kind in ("gpt2", "words", "nfc", "metaspace"):
            for name in ("chatml", "llama3", "plain"):
                expected = json.loads((self.folder / f"{kind}.{name}.json").read_text())
                found = self.encoded(name, f"hf:{self.folder}/{kind}/tokenizer.json", lines)
                same = 0
                for messages, ours, (ids, learned) in zip(lines, found, expected, strict=True):
                    with self.subTest(kind=kind, template=name, messages=messages):
                        self.assertEqual(ours["ids"], ids)
                        self.assertEqual(len(ours["learned"]), len(ids))
                        flags = [int(flag) for flag in ours["learned"]]
                        if kind in ("gpt2", "words"):
                            self.assertEqual(flags, learned)
                        same += flags == learned
                # With a normalizer we do not know here which characters a token covers.
                with self.subTest(kind=kind, template=name):
                    self.assertGreater(same, 0.98 * len(lines), f"of {len(lines)}")

    def encoded(self, template, tokenizer, lines):
        result = subprocess.run(
            [ENCODE, template, tokenizer], text=True, capture_output=True, check=False,
            input="".join(json.dumps({"messages": m}) + "\n" for m in lines))
        self.assertEqual(result.returncode, 0, result.stderr)
        return [json.loads(line) for line in result.stdout.splitlines()]

    def test_tokenizers_without_the_tokens_are_refused(self):
        result = run(ENCODE, "llama3", "byte")
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"which has no token '<|begin_of_text|>': plain, or a tokenizer that has it",
                      result.stderr)


if __name__ == "__main__":
    unittest.main()
