"""Small programs as the ranks of `lockstep launch`."""

import json
import pathlib
import subprocess
import sys
import time

from support import LOCKSTEP, EndToEnd, clean_environment, end, run

# A rank that writes how it was started; then it runs the Python code in the file RANK.do.
RANK = """
import json, os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def ignore(*signals):
    for number in signals: signal.signal(number, lambda *_: None)
partial = folder / (rank + ".partial")
do = folder / (rank + ".do")
code = do.read_text() if do.exists() else ""
if "ignore" in code: ignore(signal.SIGTERM)
partial.write_text(json.dumps({"arguments": sys.argv[2:], "process": os.getpid(),
                               "environment": dict(os.environ)}))
partial.rename(folder / (rank + ".started"))
exec(code)
"""
# Waits until all ranks have started.
TOGETHER = """
while len(list(folder.glob("*.started"))) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
"""


def alive(process):
    """Returns whether a process runs; a zombie that nobody has waited for does not."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended before or after open()
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


class SmallRanks(EndToEnd):
    """Small programs as ranks."""

    def setUp(self):
        super().setUp()
        self.program = self.folder / "a rank.py"
        self.program.write_text(f"#!{sys.executable}\n{RANK}")
        self.program.chmod(0o755)

    def do(self, rank, code):
        (self.folder / f"{rank}.do").write_text(code)

    def command(self, ranks, *arguments, options=()):
        return [str(word) for word in (LOCKSTEP, "launch", "-n", ranks, "--starter", "own",
                                       "--program", self.program, *options, "--", self.folder,
                                       *arguments)]

    def launch(self, ranks, *arguments, options=(), **environment):
        return run(*self.command(ranks, *arguments, options=options), **environment)

    def begin(self, ranks):
        process = subprocess.Popen(self.command(ranks), stderr=subprocess.PIPE,
                                   env=clean_environment())
        self.addCleanup(end, process)
        return process

    def started(self, rank):
        return json.loads((self.folder / f"{rank}.started").read_text())

    def wait_for(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def wait_for_files(self, ranks, suffix):
        self.wait_for(lambda: all((self.folder / f"{rank}.{suffix}").exists()
                                  for rank in range(ranks)))
