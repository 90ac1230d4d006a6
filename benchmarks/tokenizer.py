"""Times text to token ids: ours and the libraries', in turn.

python benchmarks/tokenizer.py BUILD [TOKENIZER_JSON...]

Compares GPT-2's encoding with tiktoken (vocabulary by `scripts/setup gpt2`, package by
`scripts/setup tiktoken`) and, under the Python of .venv-tokenizers, each tokenizer.json with PyPI's
tokenizers. All run on one thread; the last column is ours on two threads."""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
SOURCE = pathlib.Path(__file__).resolve().parents[1]
for packages in (SOURCE / ".venv/tiktoken", *SOURCE.glob(".venv-tokenizers/lib/*/site-packages")):
    sys.path.insert(0, str(packages))

ROUNDS = 9
PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def english():
    return b"".join((SOURCE / "data" / name).read_bytes() for name in ("alice29.txt",
                                                                       "asyoulik.txt")).decode()


def mixed():
    """Returns the sources of this tree, and lines in other scripts."""
    paths = [p for pattern in ("*/*.cpp", "*/*.h", "*/*/*.cpp", "*.md", "scripts/golden/*.py")
             for p in sorted(SOURCE.glob(pattern)) if not p.parts[-2].startswith("build")]
    code = "".join(p.read_text(errors="replace") for p in paths)
    lines = ("東京は日本の首都です。\nМосква — столица России.\nالقاهرة عاصمة مصر\n"
             "Çok güzel bir gün, değil mi?\nпривет мир 12345 ½ ٣٤٥\n")
    return code + lines * 4000


def tiktoken_gpt2():
    import tiktoken  # noqa: PLC0415
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks  # noqa: PLC0415
    ranks = data_gym_to_mergeable_bpe_ranks(str(SOURCE / "data/gpt2/vocab.bpe"),
                                            str(SOURCE / "data/gpt2/encoder.json"))
    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 50256})
    return f"tiktoken {tiktoken.__version__}", encoding.encode_ordinary


def hugging_face(file):
    import tokenizers  # noqa: PLC0415
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    return (f"tokenizers {tokenizers.__version__}",
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


class Program:
    """Our program, which waits between rounds."""

    def __init__(self, build, tokenizer, file):
        self.process = subprocess.Popen(
            [build / "benchmarks/data_pipeline", "tokenize", tokenizer, file], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def encode(self, threads):
        """Returns the seconds and the number of tokens."""
        self.process.stdin.write(f"{threads}\n")
        self.process.stdin.flush()
        seconds, tokens = self.process.stdout.readline().split()
        return float(seconds), int(tokens)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure(name, text, build, tokenizer, encode):
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        file.write(text.encode())
        file.flush()
        program = Program(build, tokenizer, file.name)
        ours, both, theirs = [], [], []
        for _ in range(ROUNDS + 1):
            seconds, tokens = program.encode(1)
            ours.append(seconds)
            both.append(program.encode(2)[0])
            begin = time.perf_counter()
            ids = encode(text)
            theirs.append(time.perf_counter() - begin)
            assert len(ids) == tokens, (len(ids), tokens)
        program.close()
    megabytes = len(text.encode()) / 1e6
    ratios = [b / a for a, b in zip(ours[1:], theirs[1:])]
    threads = statistics.median(a / b for a, b in zip(ours[1:], both[1:]))
    print(f"  {name:8} {megabytes:6.1f} MB   ours {megabytes / statistics.median(ours[1:]):6.1f} "
          f"MB/s   theirs {megabytes / statistics.median(theirs[1:]):6.1f} MB/s   theirs / ours "
          f"{statistics.median(ratios):.2f}   [{min(ratios):.2f}, {max(ratios):.2f}]   two threads "
          f"{threads:.2f}")


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    rivals = [("GPT-2", f"gpt2:{SOURCE}/data/gpt2", tiktoken_gpt2)] if sys.argv[2:] == [] else []
    rivals += [(path, f"hf:{path}", lambda path=path: hugging_face(path)) for path in sys.argv[2:]]
    for title, tokenizer, make in rivals:
        library, encode = make()
        print(f"{title}, {library}; median of {ROUNDS} rounds [lowest, highest]")
        measure("English", english() * 8, build, tokenizer, encode)
        measure("mixed", mixed(), build, tokenizer, encode)


if __name__ == "__main__":
    main()
