"""System calls that fail: the n-th of each kind, with each possible error, or with fewer bytes than
requested."""

import errno
import os

from case import LOST, SILENT, Cell, shorten
from commands import COMMANDS, QUICK, fresh
from faults import faults

ERRORS = {
    "open": ("EIO", "EMFILE", "ENOSPC", "EDQUOT", "EACCES", "EINTR"),
    "read": ("EIO", "EINTR", "short"),
    "write": ("EIO", "ENOSPC", "EDQUOT", "EINTR", "short"),
    "close": ("EIO", "ENOSPC", "EDQUOT", "EINTR"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT", "EINTR"),
    "rename": ("EIO", "ENOSPC", "EDQUOT", "EACCES"),
    "unlink": ("EIO", "EACCES"),
    "mkdir": ("EIO", "ENOSPC", "EDQUOT", "EMLINK"),
    "stat": ("EIO", "EACCES"),
    "list": ("EIO", "EMFILE"),
    "lock": ("EIO", "EINTR"),
    "mmap": ("ENOMEM", "ENODEV"),
    "link": ("EIO", "ENOSPC"),
    "truncate": ("EIO", "ENOSPC", "EINTR"),
}
CHANGES_NOTHING = ("EINTR", "short")  # the call is repeated
# A cell for each class of calls, so that the table shows which were tried.
CLASSES = {
    "opening": ("open", "mkdir", "stat", "list", "lock", "link"),
    "reading, mapping": ("read", "mmap"),
    "writing, syncing": ("write", "close", "fsync", "truncate"),
    "renaming, removing": ("rename", "unlink"),
}


def rules_of(command, operations):
    """Plans (rank, rule), with the calls that the rank makes; the rank is None if there is one."""
    def plan(world):
        return [(rank, f"{operation}:{action}:{nth}")
                for rank, numbers in command.undisturbed(world)[2].items()
                for operation in operations for nth in range(1, numbers[operation] + 1)
                for action in ERRORS[operation]]
    return plan


def fail_call(command):
    def body(case, planned):
        rank, rule = planned
        operation, action, nth = rule.split(":")
        folder, log = fresh(case, command), case.folder / "calls"
        result = command.run(case, folder, **faults(f"{rule}:{folder}/", rank=rank, count=log))
        # A rank may make fewer calls than without a fault.
        case.faults += int(command.calls_of(log, folder)[rank][operation] >= int(nth))
        told = result.stderr.decode()
        case.require(SILENT, result.returncode in (0, 1, 2),
                     lambda: f"status {result.returncode}: {shorten(told)}")
        if result.returncode == 0:
            command.check_done(case, folder, result)
        else:
            case.require(LOST, action not in CHANGES_NOTHING,
                         lambda: f"ended although it could go on: {shorten(told)}")
            reason = os.strerror(getattr(errno, action))
            case.require(SILENT, reason in told and str(folder) in told,
                         lambda: f"no path or not {reason!r}: {shorten(told)}")
            if rank is not None:
                case.require(SILENT, f"rank {rank}" in told, lambda: f"no rank: {shorten(told)}")
        command.check_between(case, folder)
        command.check_again(case, folder, told)
    return body


def calls_that_there_are(name, group):
    """Returns whether a cell can have cases: a command without such calls has none."""
    reads_only = name in ("verify", "evaluate")
    return not (reads_only and group in ("writing, syncing", "renaming, removing"))


COUNTS = {"opening": 10, "reading, mapping": 6, "writing, syncing": 12, "renaming, removing": 6}
CELLS = [
    Cell(f"errno, EINTR, short: {group}", name, fail_call(command),
         400 if name in QUICK else COUNTS[group],
         int(name in ("save", "data build") and group == "writing, syncing"),
         rules_of(command, operations))
    for name, command in COMMANDS.items() for group, operations in CLASSES.items()
    if calls_that_there_are(name, group)
]
