"""Programs whose file operations fail; tests/support/fault_injection.cpp describes the rules."""

import collections
import os

from support import BUILD

LIBRARY = BUILD / "tests/libfault_injection.so"


def faults(*rules, rank=None, count=None):
    """Returns the environment that applies `rules` ("op:action:nth:path") on one rank or on all;
    `count` is the file that calls() reads. For run() and Ranks.start()."""
    environment = {"LD_PRELOAD": LIBRARY, "LOCKSTEP_FAULTS": ";".join(rules),
                   "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
    if rank is not None:
        environment["LOCKSTEP_FAULTS_RANK"] = rank
    if count is not None:
        environment["LOCKSTEP_FAULTS_COUNT"] = count
    return environment


def calls(count, path="", rank=None):
    """Counts the calls of each operation on paths that contain `path`, of one rank or of all
    processes: {"read": 3, ...}."""
    found = collections.Counter()
    for line in count.read_text(errors="surrogateescape").splitlines():
        call, _, name = line.partition(" ")
        operation, _, caller = call.partition("@")
        found[operation] += path in name and (rank is None or caller == str(rank))
    return +found
