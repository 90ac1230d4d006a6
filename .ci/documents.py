"""Runs the commands of README.md and docs/: every block marked sh, in the order of the text. README
comes first, then the pages by name, then the tutorials. A page's commands may rely on README's and
on those above them.

A block is skipped if the line above it is a comment that says why, as in
<!-- not run here: needs Slurm -->; REASONS lists the allowed reasons.

With --list, lists the blocks and runs nothing."""

import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[1]

# Why a block is not run, and what covers it instead.
REASONS = {
    ".ci/run runs both",
    "fails on purpose",
    "tests install the library and build the examples",
    "needs a downloaded model",  # bring_a_model_test runs it with a small one
    "needs a GPU",
    "needs Slurm",
    "needs lm-evaluation-harness",
    "takes hours",  # faults_sample_test runs a part of it
    "needs several hosts",
}


class Block:
    """A fenced block: its place, its language, its text, and why it is not run ("": it is run)."""

    def __init__(self, path, line, language, text, reason):
        self.path, self.line, self.language = path, line, language
        self.text, self.reason = text, reason

    def __str__(self):
        return f"{self.path.relative_to(SOURCE)}:{self.line}"


def blocks_of(path):
    blocks, lines, begin = [], path.read_text().splitlines(), None
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if begin is None:
            begin = number
            continue
        mark = re.fullmatch(r"<!-- not run here: (.*) -->", lines[begin - 2] if begin > 1 else "")
        blocks.append(Block(path, begin, lines[begin - 1][3:], "\n".join(lines[begin:number - 1]),
                            mark[1] if mark else ""))
        begin = None
    if begin is not None:
        raise ValueError(f"{path}:{begin}: the block has no end")
    return blocks


def pages():
    return [SOURCE / "README.md", *sorted((SOURCE / "docs").glob("*.md")),
            *sorted((SOURCE / "docs/tutorials").glob("*.md"))]


def commands():
    return [block for page in pages() for block in blocks_of(page) if block.language == "sh"]


def main():
    for block in commands():
        if block.reason:
            print(f"--- {block}: not run here: {block.reason}", flush=True)
            continue
        print(f"--- {block}", flush=True)
        if "--list" in sys.argv[1:]:
            continue
        ran = subprocess.run(["bash", "-euxo", "pipefail", "-c", block.text], cwd=SOURCE,
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        if ran.returncode != 0:
            sys.exit(f"{block}: exit status {ran.returncode}")


if __name__ == "__main__":
    main()
