"""A full disk for one output at a time: a small tmpfs in its own mount namespace."""

import os
import pathlib
import shutil
import subprocess

from case import LEFT, LOST, SILENT, Cell, Skipped, left_over, shorten
from commands import COMMANDS, fresh
from support import run

PAGE = 4096


class SmallDisk:
    """A file system of `size` bytes at `at`, only visible in its own namespace."""

    def __init__(self, case, at, size):
        self.at = at
        options = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
        self.holder = subprocess.Popen(
            [*options, "sh", "-c", f"mount -t tmpfs -o size={size} lockstep-faults '{at}' && "
             "echo ready && exec sleep 100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        case.processes.append(self.holder)
        if self.holder.stdout.readline() != b"ready\n":
            raise Skipped(f"no tmpfs: {self.holder.stderr.read().decode().strip()}")
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", "--target", str(self.holder.pid), "--mount", *user]
        self.seen = pathlib.Path(f"/proc/{self.holder.pid}/root{at}")

    def resize(self, size):
        result = run(*self.enter, "mount", "-o", f"remount,size={size}", self.at)
        if result.returncode != 0:
            raise RuntimeError(result.stderr.decode())


def bytes_of(folder):
    """Returns the bytes that the files below a folder take on a tmpfs, in whole pages."""
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in folder.rglob("*")
               if path.is_file())


def merged(case, name, folder, part, disk):
    """Copies `part` from inside the namespace, and the other files from outside."""
    copy = case.folder / name
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / part, ignore_errors=True)
    shutil.copytree(disk.seen, copy / part)
    return copy


def fill(command, part):
    """Puts `part` of the outputs on the small disk. It has room for the existing files and a random
    share of the new ones."""
    def body(case):
        needed = needed_bytes(case, command, part)
        folder = fresh(case, command)
        there = bytes_of(folder / part)
        at = folder / part
        at.mkdir(parents=True, exist_ok=True)
        kept = case.folder / "kept"
        shutil.copytree(at, kept)
        size = case.draw(max(PAGE, there + PAGE * case.random.randrange(
            max(1, (needed - there) // PAGE))))
        disk = SmallDisk(case, at, size)
        result = run(*disk.enter, "cp", "-r", f"{kept}/.", at)
        case.require(LOST, result.returncode == 0, result.stderr.decode())
        result = command.run(case, folder, disk.enter)
        case.faults += 1
        told = result.stderr.decode()
        case.require(SILENT, result.returncode in (0, 1),
                     lambda: f"status {result.returncode}: {shorten(told)}")
        if result.returncode == 1:
            case.require(SILENT, "No space left on device" in told and str(folder) in told,
                         lambda: shorten(told))
        else:
            command.check_done(case, merged(case, "full", folder, part, disk), result)
        disk.resize(1 << 28)
        again = command.run(case, folder, disk.enter)
        case.require(LOST, again.returncode == 0,
                     lambda: f"with room again: {shorten(again.stderr.decode())}")
        final = merged(case, "final", folder, part, disk)
        expected, tree, _ = command.undisturbed(case.world)
        case.require(LOST, command.outputs(final) == expected,
                     "with room again it gives another result")
        extra = left_over(final, tree, told)
        case.require(LEFT, not extra, f"files {extra}")
    return body


def needed_bytes(case, command, part):
    """Returns the size of the part at the end; it is never larger before that."""
    def make(folder):
        command.prepare(case.world, folder)
        result = command.run(case, folder)
        if result.returncode != 0:
            raise RuntimeError(result.stderr.decode())
        return bytes_of(folder / part)
    command.undisturbed(case.world)
    return case.world.once(f"bytes {command.name} {part}", make)


PARTS = (("save", "run/checkpoint"), ("save", "run"), ("asynchronous save", "run/checkpoint"),
         ("asynchronous save", "run"), ("save, 2 ranks", "run"), ("load", "run"),
         ("index cache", "cache"), ("export", "parent"), ("import", "parent"),
         ("data build", "parent"), ("data merge", "parent"))


def with_parent(command):
    """Returns the same command with its output in a separate folder."""
    import copy
    changed = copy.copy(command)
    changed.name += ", output apart"
    changed.words = [str(word).replace("{folder}/out", "{folder}/parent/out")
                     for word in command.words]
    outputs = command.outputs
    changed.outputs = lambda folder: outputs(folder / "parent")

    def prepare(world, folder):
        (folder / "parent").mkdir()
    changed.make_more = prepare
    return changed


def cell(name, part):
    command = COMMANDS[name]
    phase = {"run": f"{name}: metrics and checkpoints", "parent": f"{name}: output",
             "cache": f"{name}: cache", "run/checkpoint": f"{name}: checkpoints"}[part]
    chosen = with_parent(command) if part == "parent" else command
    return Cell("full disk", phase, fill(chosen, part), 6,
                int(name == "save" and part == "run/checkpoint"))


CELLS = [cell(name, part) for name, part in PARTS]
