"""Makes tokenizers with PyPI's tokenizers, like those of model families, and compares their ids
with ours:

  PYTHON tokenizers_peer.py ENCODE_TEXTS FOLDER [MEGABYTES] [SEED]

ENCODE_TEXTS is build/tests/encode_texts. Prints a line for each tokenizer; fails with the first
text that differs, shortened."""

import json
import pathlib
import random
import struct
import subprocess
import sys

import tokenizers
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

SOURCE = pathlib.Path(__file__).resolve().parents[2]
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = ENDINGS + WORD + r"|\p{N}{1,3}" + REST
QWEN2 = ENDINGS + WORD + r"|\p{N}" + REST
CAPITALS, SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?[{CAPITALS}]*[{SMALL}]+{ENDINGS}?"
         rf"|[^\r\n\p{{L}}\p{{N}}]?[{CAPITALS}]+[{SMALL}]*{ENDINGS}?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            r"""|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
SENTENCE = "\u2581"
SCRIPTS = [
    "The quick brown fox can't jump; it's 12345 years OLD, WE'LL see. ",
    "Быстрая лиса прыгает через ленивую собаку. Їжак; ѣ 2024 ",
    "Η γρήγορη αλεπού πηδάει. Ὦ ξεῖν', ἀγγέλλειν ", "敏捷的棕色狐狸跳过了懒狗。一二三，〇〡〢；㊀㈠",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナ・ｶﾀｶﾅー々〆", "다람쥐 헌 쳇바퀴에 타고파. 한국어 ",
    "الثعلب البني السريع يقفز فوق الكلب ١٢٣ ۴۵۶ لَا ", "השועל החום המהיר קופץ שָׁלוֹם ",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है। १२३ ক্ষ ௧௨ ൧ ",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดด ๑๒๓ ",
    "ᚠᛇᚻ ᛒᛦᚦ ᎣᏏᏲ ᐃᓄᒃ ⵜⵉⴼ ", "😀👩‍👩‍👧‍👦🏳️‍🌈 ❤️ x😀y 1️⃣ 🇩🇪🇫🇷 ", "½ ² ³ ¼x Ⅷ ⅻ ① ⑳ 10⁶ H₂O 3×4=12 ",
    "𝒜𝓑 𝟘𝟙 𐐀𐐨 𠀀𠀁 \U0001e900 \U00010d40 \ua7cb \u1c89 ",
    "zero\u200bwidth \ufeffBOM \ufffd \u00ad soft ",
    "int main() {\n\treturn (a[i] << 3) != 0x1F ? -1 : 'q';\r\n}\n\n    // ~~~ ###\n",
    "    \t\t  \n\n   x",
    "e\u0301 a\u0327\u0301 a\u0301\u0327 \u1e9b\u0323 \u1100\u1161\u11a8 \uac00\u11a8 \u0958 \u0344 "
    "\u0dd9\u0dcf o\u0308\u0304 q\u0307\u0323 \u212b \u2126 \u0340 ",
    "<s>[INST] hi [/INST]</s><|endoftext|> <mask>  <|im_end|>",
    "<R>  NORM x<R>\n\n\n\n\n<R> \n\n  NORM  [INST]",
    "HTTPServer ÄÖü ΑΒγ ǅungla ʰxʲ McDonald's İSTANBUL'LL ПРИвет",
    "'S 'LL 'ſ 'K don'T ''ve ’s 'RE", "▁▁ ▁x _ ", "a" * 32, "=" * 40,
    "\x00\x01\x1c\x7f\x85\xa0\u2028",
]


def books():
    return "".join((SOURCE / "data" / name).read_text() for name in ("alice29.txt", "asyoulik.txt"))


def code():
    paths = [path for folder in ("core", "datasets", "models", "scripts", "docs")
             for pattern in ("*.cpp", "*.h", "*.py", "*.md")
             for path in sorted((SOURCE / folder).rglob(pattern))]
    return "".join(path.read_text(errors="replace") for path in paths)


def random_text(rng, length):
    """Characters of all planes, combining marks, spaces and pieces of the texts above."""
    pools = ["   \n\t\r\u00a0\u2003\u3000", "''''stremvldſK", "abcXYZ éüß", "0123½٣", ".,!?-—/(",
             "йжωπ", "中文かな한", "\u0301\u0327\u0308\u0323\u0345\u0334\u0f71\u0f72\u11a8\u1161\u1df6\u08d3",
             "\u1100\uac00\u0dd9aoAO"]
    out = []
    while length > 0:
        kind = rng.random()
        if kind < 0.1:
            point = rng.choice([rng.randrange(0x3000), rng.randrange(0xD800),
                                rng.randrange(0xE000, 0x110000)])
            out.append(chr(point))
        elif kind < 0.3:
            script = rng.choice(SCRIPTS)
            begin = rng.randrange(len(script))
            out.append(script[begin:begin + rng.randint(1, 30)])
        else:
            out.append("".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 12))))
        length -= len(out[-1])
    return "".join(out)


def spoiled(rng, text):
    """Returns the bytes of a text with some of them changed, removed or inserted."""
    data = bytearray(text.encode())
    for _ in range(max(len(data) // 50, 1)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(3)
        if kind == 0 and place < len(data):
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place:place + rng.randint(1, 3)]
        else:
            data[place:place] = bytes(rng.randrange(0x80, 256) for _ in range(rng.randint(1, 4)))
    return bytes(data)


def texts(megabytes, seed):
    rng = random.Random(seed)
    yield from (b"", b" ", b"  ", b"a", b" a", b"\n", b"<s>", b" <mask> ", b"\xff",
                b"\xe4\xb8", b"\xf0\x9f\x98")
    yield from (script.encode() for script in SCRIPTS)
    whole = books() + code()
    size, wanted = 0, megabytes * 1_000_000
    while size < wanted:
        kind = rng.randrange(5)
        if kind < 2:
            begin = rng.randrange(len(whole))
            data = whole[begin:begin + rng.randint(1, 60_000)].encode()
        elif kind == 2:
            data = "".join(rng.choice(SCRIPTS) for _ in range(rng.randint(1, 600))).encode()
        elif kind == 3:
            data = random_text(rng, rng.randint(1, 8000)).encode()
        else:
            data = spoiled(rng, random_text(rng, rng.randint(1, 4000)))
        size += len(data)
        yield data


def trained(tokenizer, alphabet, special, **options):
    trainer = trainers.BpeTrainer(vocab_size=6000, special_tokens=special, show_progress=False,
                                  initial_alphabet=alphabet, **options)
    sample = [books(), code()[:1_500_000], *SCRIPTS * 30]
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def byte_level(stages, special, normalizer=None, model=None, alphabet=None, **options):
    tokenizer = Tokenizer(model or models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages) if len(stages) > 1 else stages[0]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet
    return trained(tokenizer, alphabet, special, **options)


def split(*patterns):
    return [*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def sentence_pieces(normalizer, pre_tokenizer, decoder, byte_fallback=True, limit=800,
                    unknown="<unk>"):
    tokenizer = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    # Trained on words, as SentencePiece does, and used on whole texts.
    trainee = Tokenizer(models.BPE(unk_token="<unk>"))
    trainee.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trained(trainee, [], ["<unk>", "<s>", "</s>", *bytes_], limit_alphabet=limit)
    made, state = json.loads(trainee.to_str()), json.loads(tokenizer.to_str())
    for field in ("vocab", "merges"):
        state["model"][field] = made["model"][field]
    state["added_tokens"] = made["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoder
    return tokenizer


def llama_decoder():
    return decoders.Sequence([decoders.Replace(SENTENCE, " "), decoders.ByteFallback(),
                              decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def llama_normalizer():
    return normalizers.Sequence([normalizers.Prepend(SENTENCE), normalizers.Replace(" ", SENTENCE)])


def with_tokens(tokenizer, *tokens):
    tokenizer.add_special_tokens([t for t in tokens if t.special])
    tokenizer.add_tokens([t for t in tokens if not t.special])
    return tokenizer


def whole_words(tokenizer):
    """Removes the merges of some tokens, so that ignore_merges matters; writes merges as "a b"."""
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    model["merges"] = [" ".join(m) for i, m in enumerate(model["merges"]) if i < 3000]
    model["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(state)), state


def families():
    """Yields names, and tokenizers or their files."""
    yield "gpt2", byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)], ["<|endoftext|>"])
    yield "prefix", with_tokens(
        byte_level([pre_tokenizers.ByteLevel(add_prefix_space=True)], ["<s>"]),
        AddedToken("<mask>", lstrip=True, special=True, normalized=False),
        AddedToken("</s>", rstrip=True, special=True, normalized=False))
    llama3 = byte_level(split(LLAMA3), [])
    llama3 = with_tokens(llama3, *(AddedToken(t, special=True, normalized=False) for t in (
        "<|begin_of_text|>", "<|end_of_text|>", "<|im_end|>")))
    yield "llama3", llama3
    yield "llama3-whole", whole_words(llama3)
    yield "qwen2", with_tokens(byte_level(split(QWEN2), ["<|endoftext|>"], normalizers.NFC()),
                               AddedToken("<|im_end|>", special=True, normalized=False),
                               AddedToken("caf\u00e9", special=False, normalized=True),
                               AddedToken("<R>", special=False, rstrip=True, normalized=True),
                               AddedToken("  NORM", special=False, normalized=True),
                               AddedToken("\n\n", special=False, normalized=True),
                               AddedToken("[INST]", special=False, lstrip=True, rstrip=True,
                                          normalized=True))
    yield "o200k", byte_level(split(O200K), ["<|endoftext|>"])
    yield "deepseek", byte_level(split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK), ["</s>"])
    digits = [pre_tokenizers.Digits(individual_digits=True),
              pre_tokenizers.ByteLevel(add_prefix_space=False)]
    yield "digits", byte_level(digits, ["<|endoftext|>"])
    # Not all bytes have a token, as in SmolLM2 and GPT-NeoX.
    yield "few-bytes", byte_level(digits, ["<|endoftext|>"], alphabet=[], limit_alphabet=150)
    for fuse in (False, True):
        yield f"few-bytes-unknown-{fuse}", byte_level(
            digits, ["<unk>"], model=models.BPE(unk_token="<unk>", fuse_unk=fuse), alphabet=[],
            limit_alphabet=150)
    llama2 = sentence_pieces(llama_normalizer(), None, llama_decoder())
    yield "llama2", llama2
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    yield "mistral", sentence_pieces(None, first, llama_decoder())
    yield "words", sentence_pieces(None, pre_tokenizers.Metaspace(), decoders.Metaspace())
    yield "unknown", sentence_pieces(llama_normalizer(), None, llama_decoder(), byte_fallback=False,
                                     limit=90)
    yield "left-out", sentence_pieces(llama_normalizer(), None, llama_decoder(),
                                      byte_fallback=False, limit=90, unknown=None)


def read_numbers(stream):
    count, = struct.unpack("<Q", stream.read(8))
    return list(struct.unpack(f"<{count}q", stream.read(8 * count)))


def read_bytes(stream):
    size, = struct.unpack("<Q", stream.read(8))
    return stream.read(size)


def ours(program, file, data, part=0):
    """Yields the ids and the decoded text of each text."""
    source = file.with_suffix(".texts")
    source.write_bytes(b"".join(struct.pack("<Q", len(d)) + d for d in data))
    command = [program, f"hf:{file}", str(part)]
    with (source.open("rb") as stdin,
          subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE) as process):
        for _ in data:
            yield read_numbers(process.stdout), read_bytes(process.stdout)
        if process.wait() != 0:
            sys.exit(f"{' '.join(map(str, command))}: exited with status {process.returncode}")
    source.unlink()


def differs(program, file, peer, data, part):
    (ids, _), = ours(program, file, [data], part)
    return ids != peer.encode(data.decode(errors="replace"), add_special_tokens=False).ids


def cut_down(wrong, data):
    """Shortens a text while it is still wrong."""
    step = len(data) // 2
    while step > 0:
        for begin in range(0, len(data), step):
            shorter = data[:begin] + data[begin + step:]
            if wrong(shorter):
                data = shorter
                break
        else:
            step //= 2
    return data


def compare(program, folder, name, made, data):
    file = folder / name / "tokenizer.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    peer, state = made if isinstance(made, tuple) else (made, json.loads(made.to_str()))
    file.write_text(json.dumps(state, ensure_ascii=False))
    tokens = 0
    for part, some in ((0, data), (1, data[:60]), (7, data[:200]), (4096, data[::4])):
        for text, (ids, decoded) in zip(some, ours(program, file, some, part), strict=True):
            theirs = peer.encode(text.decode(errors="replace"), add_special_tokens=False).ids
            if ids != theirs:
                short = cut_down(lambda t: differs(program, file, peer, t, part), text)
                (found, _), = ours(program, file, [short], part)
                right = peer.encode(short.decode(errors="replace"), add_special_tokens=False).ids
                sys.exit(f"{name}, parts of {part}: {short!r}\n  ours   {found}\n  theirs {right}\n"
                         f"  ours   {[peer.id_to_token(i) for i in found]}\n"
                         f"  theirs {[peer.id_to_token(i) for i in right]}")
            again = peer.decode(theirs, skip_special_tokens=False)
            if decoded.decode(errors="replace") != again:
                sys.exit(f"{name}: {text[:200]!r} decodes to\n  {decoded[:200]!r}\n"
                         f"  {again[:200]!r}")
            tokens += len(ids)
    print(f"{name}: {len(data)} texts, {sum(map(len, data)):,} bytes, {tokens:,} ids", flush=True)


def main():
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    megabytes = float(sys.argv[3]) if len(sys.argv) > 3 else 1
    data = list(texts(megabytes, int(sys.argv[4]) if len(sys.argv) > 4 else 24))
    print(f"tokenizers {tokenizers.__version__}")
    for name, made in families():
        compare(program, folder, name, made, data)


if __name__ == "__main__":
    main()
