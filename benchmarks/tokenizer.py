"""GPT-2's encoding on one thread: ours and tiktoken's, in turns, on mixed text.

python benchmarks/tokenizer.py BUILD; the vocabulary is scripts/setup gpt2's, tiktoken that of
scripts/setup tiktoken."""

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SOURCE / ".venv/tiktoken"))

import tiktoken  # noqa: E402
from tiktoken.load import data_gym_to_mergeable_bpe_ranks  # noqa: E402

ROUNDS = 9
PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def english():
    return b"".join((SOURCE / "data" / name).read_bytes() for name in ("alice29.txt",
                                                                       "asyoulik.txt")).decode()


def mixed():
    """The sources of this tree, and lines in other scripts."""
    paths = [p for pattern in ("*/*.cpp", "*/*.h", "*/*/*.cpp", "*.md", "scripts/golden/*.py")
             for p in sorted(SOURCE.glob(pattern)) if not p.parts[-2].startswith("build")]
    code = "".join(p.read_text(errors="replace") for p in paths)
    lines = ("東京は日本の首都です。\nМосква — столица России.\nالقاهرة عاصمة مصر\n"
             "Çok güzel bir gün, değil mi?\nпривет мир 12345 ½ ٣٤٥\n")
    return code + lines * 4000


def tiktoken_gpt2():
    ranks = data_gym_to_mergeable_bpe_ranks(str(SOURCE / "data/gpt2/vocab.bpe"),
                                            str(SOURCE / "data/gpt2/encoder.json"))
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256})


def measure(name, text, build, peer):
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        file.write(text.encode())
        file.flush()
        with subprocess.Popen([build / "benchmarks/data_pipeline", "tokenize",
                               SOURCE / "data/gpt2", file.name], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            ours, theirs = [], []
            for round_ in range(ROUNDS + 1):
                program.stdin.write("go\n")
                program.stdin.flush()
                seconds, tokens = program.stdout.readline().split()
                begin = time.perf_counter()
                ids = peer.encode_ordinary(text)
                elapsed = time.perf_counter() - begin
                assert len(ids) == int(tokens), (len(ids), tokens)
                if round_:
                    ours.append(float(seconds))
                    theirs.append(elapsed)
            program.stdin.close()
    megabytes = len(text.encode()) / 1e6
    ratios = [b / a for a, b in zip(ours, theirs)]
    print(f"  {name:8} {megabytes:6.1f} MB   ours {megabytes / statistics.median(ours):6.1f} MB/s   "
          f"tiktoken {megabytes / statistics.median(theirs):6.1f} MB/s   tiktoken / ours "
          f"{statistics.median(ratios):.2f}   [{min(ratios):.2f}, {max(ratios):.2f}]")


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    print(f"GPT-2's encoding, one thread, tiktoken {tiktoken.__version__}; median of {ROUNDS} "
          "rounds [lowest, highest]")
    peer = tiktoken_gpt2()
    measure("English", english() * 8, build, peer)
    measure("mixed", mixed(), build, peer)


if __name__ == "__main__":
    main()
