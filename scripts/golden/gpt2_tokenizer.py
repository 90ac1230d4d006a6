"""Writes tests/datasets/gpt2_tokenizer_golden.json: texts in many languages and their ids from
tiktoken, with GPT-2's vocabulary and with a small one made here. The file includes the small one.

Run it with tiktoken, on the folder of GPT-2's encoder.json and vocab.bpe:
python scripts/golden/gpt2_tokenizer.py data/gpt2
"""

import collections
import json
import pathlib
import random
import sys

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

SOURCE = pathlib.Path(__file__).resolve().parents[2]
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
MERGES = 150
WRITTEN = [
    "Hello, world! It's 2026; we'll see, they've said they'd (I'm sure you're) not won't.",
    "'s't're've'm'll'd 'S'T'LL ''s 'sure 'llama x'd'dd can't''ve ’s",
    "  two  spaces   three\n\n\nlines \t tabs\t\r\n end   ",
    " ", "\n", "   ", " \n ", "a ", " a", "a  b", "\u00a0\u00a0x\u2003\u2003 y\u3000z\u0085w",
    "int main() { return (a[i] << 3) != 0x1F ? -1 : 'q'; } // ~~~ ###",
    "Größe, façade, naïve, Ærøskøbing, Łódź, İstanbul, cœur, e\u0301te\u0301",
    "Быстрая лиса прыгает через ленивую собаку. Їжак; ѣ",
    "Η γρήγορη αλεπού πηδάει. Ὦ ξεῖν', ἀγγέλλειν Λακεδαιμονίοις",
    "敏捷的棕色狐狸跳过了懒狗。一二三，〇〡〢；㊀㈠",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナ・ｶﾀｶﾅー々〆",
    "다람쥐 헌 쳇바퀴에 타고파. 한국어",
    "الثعلب البني السريع يقفز فوق الكلب الكسول. ١٢٣ ۴۵۶ لَا",
    "השועל החום המהיר קופץ מעל הכלב העצלן. שָׁלוֹם",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है। १२३ ক্ষ ௧௨ ൧",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดด ๑๒๓", "ᚠᛇᚻ ᛒᛦᚦ ᎣᏏᏲ ᐃᓄᒃ ⵜⵉⴼ",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 ❤️ x😀y 1️⃣ 🇩🇪🇫🇷", "½ ² ³ ¼x Ⅷ ⅻ ① ⑳ ⓪ ٪ 10⁶ H₂O 3×4=12",
    "𝒜𝓑 𝟘𝟙 𐐀𐐨 𠀀𠀁 \U0001e900 \U00010d40 \ua7cb \u1c89", "zero\u200bwidth \ufeffBOM \ufffd \u00ad soft",
    "<|endoftext|> is text here", "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    "=" * 70 + "-" * 70, "\x00\x01\x1c\x1d\x1e\x1f\x7f a\x00b",
]


def random_texts(count):
    """Characters of all planes, with extra spaces, apostrophes and letters."""
    rng = random.Random(10)
    pools = ["   \n\t\u00a0\u2003", "''''stremvld", "abcXYZ éüß", "0123½٣", ".,!?-—", "йжωπ",
             "中文かな한"]
    for _ in range(count):
        text = ""
        for _ in range(rng.randint(5, 40)):
            if rng.random() < 0.1:
                point = rng.choice([rng.randrange(0x3000), rng.randrange(0xD800),
                                    rng.randrange(0xE000, 0x110000)])
                text += chr(point)
            else:
                text += rng.choice(rng.choice(pools))
        yield text


def alphabet():
    """byte -> the character that represents it in GPT-2's files"""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printed]
    return {b: chr(b) for b in printed} | {b: chr(256 + i) for i, b in enumerate(others)}


def small_vocabulary(texts):
    """Ranks of byte strings after some merges of the most frequent pairs, and these merges."""
    splitter = tiktoken.Encoding("bytes", pat_str=PATTERN, special_tokens={},
                                 mergeable_ranks={bytes([b]): b for b in range(256)})
    words = [[bytes([b]) for b in splitter.encode_ordinary(text)] for text in texts]
    ranks = {bytes([b]): b for b in range(256)}
    merges = []
    while len(merges) < MERGES:
        pairs = collections.Counter(pair for word in words for pair in zip(word, word[1:]))
        best = next(p for p, _ in pairs.most_common() if b"".join(p) not in ranks)
        merges.append(best)
        ranks[b"".join(best)] = len(ranks)
        for i, word in enumerate(words):
            out = []
            for token in word:
                if out and (out[-1], token) == best:
                    out[-1] += token
                else:
                    out.append(token)
            words[i] = out
    return ranks, merges


def main():
    folder = pathlib.Path(sys.argv[1])
    texts = WRITTEN + list(random_texts(30))
    full = tiktoken.Encoding("gpt2", pat_str=PATTERN, special_tokens={},
                             mergeable_ranks=data_gym_to_mergeable_bpe_ranks(
                                 str(folder / "vocab.bpe"), str(folder / "encoder.json")))
    ranks, merges = small_vocabulary(texts)
    small = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    ids = list(range(len(ranks)))
    random.Random(11).shuffle(ids)  # an id need not be equal to the rank
    letters = alphabet()
    name = lambda token: "".join(letters[b] for b in token)
    golden = {"encoder": {name(token): ids[rank] for token, rank in ranks.items()},
              "merges": [f"{name(left)} {name(right)}" for left, right in merges],
              "cases": [{"text": text, "gpt2": full.encode_ordinary(text),
                         "small": [ids[i] for i in small.encode_ordinary(text)]}
                        for text in texts]}
    target = SOURCE / "tests/datasets/gpt2_tokenizer_golden.json"
    target.write_text(json.dumps(golden, separators=(",", ":")).replace('{"text"', '\n{"text"') + "\n")


if __name__ == "__main__":
    main()
