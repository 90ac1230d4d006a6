"""A case of the matrix: one fault, or a chain of the same faults, in one phase."""

import collections
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import threading
import time
import typing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "end_to_end"))

LOST = "nothing lost"      # the newest complete checkpoint, the reported numbers, an earlier output
SILENT = "nothing silent"  # each fault gives a status and a message with the file or the rank
HUNG = "nothing hangs"     # past its timeout
NAMED = "named in time"    # the rank that died or stopped
LEFT = "nothing left"      # no temporary file after the next start, no process after the end
PROMISES = (LOST, SILENT, HUNG, NAMED, LEFT)

NAMING_SECONDS = 5  # to name a rank that died
SLACK_SECONDS = 10  # for a machine with other work


class Broken(Exception):
    """A promise that did not hold."""

    def __init__(self, promise, found):
        super().__init__(f"{promise}: {found}")
        self.promise = promise


class Skipped(Exception):
    """This machine does not allow the fault."""


@dataclasses.dataclass
class Cell:
    """A fault in a phase. `body(case)` runs one case, or `body(case, planned)` if `plan(world)`
    lists what to try. `count` is the number of cases in the whole matrix, `sample` that in the
    sample."""
    fault: str
    phase: str
    body: typing.Callable
    count: int
    sample: int = 0
    plan: typing.Callable | None = None

    @property
    def name(self):
        return f"{self.fault}/{self.phase}"


class Case:
    """One case. Everything random comes from `random`, which depends only on the seed, the cell and
    the number of the case."""

    def __init__(self, world, cell, number, folder):
        self.world, self.cell, self.number, self.folder = world, cell, number, folder
        self.random = random.Random(f"{world.seed} {cell.name} {number}")
        self.faults = 0       # that took place
        self.kills = 0        # those of the faults that were a SIGKILL
        self.accepted = 0     # damage that a format without checksums cannot detect
        self.seconds = []     # from a death to the message that names the rank
        self.drawn = []       # the random choices, for the message of a case that fails
        self.processes = []   # that may still be running
        folder.mkdir(parents=True)

    def draw(self, what):
        self.drawn.append(str(what))
        return what

    def choose(self, values):
        return self.draw(self.random.choice(list(values)))

    def require(self, promise, condition, found):
        if not condition:
            raise Broken(promise, found() if callable(found) else found)

    def count_sent(self, sent, number=1):
        """Counts faults that took place: the signal `sent` reached `number` processes."""
        self.faults += number
        self.kills += number if sent == signal.SIGKILL else 0

    def limit(self, seconds):
        """Returns the time limit, adjusted to the speed of the machine (--patience)."""
        return seconds * self.world.patience

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


class World:
    """What the cases of one run of the matrix share: the seed, a folder, and inputs made once."""

    def __init__(self, seed, folder, patience=1, sample=False):
        self.seed, self.folder, self.patience = seed, pathlib.Path(folder), patience
        self.sample = sample
        self.lock = threading.Lock()
        self.locks = collections.defaultdict(threading.Lock)
        self.made = {}

    def once(self, key, make):
        """Calls make(folder) at the first use of `key`."""
        with self.lock:
            lock = self.locks[key]
        with lock:
            if key not in self.made:
                folder = self.folder / "made" / re.sub(r"\W+", "-", str(key))
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                self.made[key] = make(folder)
            return self.made[key]


def wait_until(condition, seconds, interval=0.005):
    """Returns whether `condition()` became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def plain(name):
    """Removes the part of an index cache's name that depends on the data set."""
    return re.sub(r"-[0-9a-f]{8}\.samples$", ".samples", name)


def tree_of(folder):
    """Returns the files and links below a folder, by their paths in it."""
    return {plain(str(path.relative_to(folder))) for path in folder.rglob("*")
            if path.is_symlink() or not path.is_dir()} if folder.exists() else set()


def left_over(folder, tree, told=""):
    """Returns the files below a folder that should not be there: not in `tree`, not of another
    step, not an earlier run's metrics, and not named in `told` as impossible to remove."""
    allowed = re.compile(r"(.*/)?(metrics\.previous(\.\d+)?\.jsonl$|checkpoint/step_\d+/[^/]+$)")
    stuck = re.findall(r"'(\S+)' cannot be removed", told)
    return sorted(name for name in tree_of(folder) - tree if not allowed.match(name)
                  and not any(f"/{part}/" in f"{path}/" for path in stuck
                              for part in (name, os.path.dirname(name)) if part))


def shorten(text, length=1500):
    text = text.strip()
    return text if len(text) <= length else text[:length // 2] + " ... " + text[-length // 2:]
