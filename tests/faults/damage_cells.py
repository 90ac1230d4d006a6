"""Files that were damaged before they are read: flipped, cut, extended, swapped, forged sizes."""

import os
import re
import shutil
import subprocess
import tempfile

from case import HUNG, LOST, SILENT, Cell, shorten
from commands import COMMANDS, Command, Conversion, Reader, Train, build, content_of, fresh
from support import SOURCE, LOCKSTEP, clean_environment
from training import numbers_of, settings

MEMORY = 3 << 30  # bytes; no reader of small files may take more
FORGED = (2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1, 2 ** 40, 2 ** 31, 1 << 20, 0)
FORGED_TEXT = ("-1", "0", "4611686018427387904", "99999999999999999999999", "1e308", "nan", "3")


def flip(random, content, other):
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def flip_in_the_front(random, content, other):
    content[random.randrange(min(len(content), 64))] ^= 1 << random.randrange(8)


def truncate(random, content, other):
    del content[random.randrange(len(content)):]


def empty(random, content, other):
    content.clear()


def grow(random, content, other):
    content += random.randbytes(random.randint(1, 5000))


def clear_a_block(random, content, other):
    at = random.randrange(len(content))
    end = min(len(content), at + 64)
    content[at:end] = bytes(end - at)


def replace_a_block(random, content, other):
    at = random.randrange(len(content))
    end = min(len(content), at + 64)
    content[at:end] = random.randbytes(end - at)


def swap(random, content, other):
    content[:] = other


def forge_a_size(random, content, other):
    """Forges an eight-byte number near the beginning or, in a text file, any number."""
    if content[:8].isascii() and content[:1] in (b"{", b"f", b"m", b"i") + (b"#", b"\n"):
        numbers = list(re.finditer(rb"(?<![\w.])\d+(?![\w.])", bytes(content)))
        if numbers:
            chosen = random.choice(numbers)
            content[chosen.start():chosen.end()] = random.choice(FORGED_TEXT).encode()
            return
    at = 8 * random.randrange(max(1, min(len(content), 80) // 8))
    content[at:at + 8] = random.choice(FORGED).to_bytes(8, "little")[:len(content) - at]


def forge_a_number_of_the_header(random, content, other):
    """Replaces a number in a safetensors file's JSON header by one of the same length."""
    length = int.from_bytes(content[:8], "little")
    numbers = list(re.finditer(rb"\d+", bytes(content[8:8 + length])))
    if not numbers:
        return flip(random, content, other)
    chosen = random.choice(numbers)
    width = chosen.end() - chosen.start()
    content[8 + chosen.start():8 + chosen.end()] = \
        str(random.randrange(10 ** width)).rjust(width, "0").encode()


DAMAGES = {"flip": flip, "flip in the front": flip_in_the_front, "truncate": truncate,
           "empty": empty, "grow": grow, "clear a block": clear_a_block,
           "replace a block": replace_a_block, "swap": swap, "forge a size": forge_a_size}
OF_SAFETENSORS = DAMAGES | {"forge a number": forge_a_number_of_the_header}


def run_measured(case, command, folder):
    """Like Command.run(); also checks the peak memory of the process."""
    words = [str(word) for word in command.line(case.world, folder)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        process = subprocess.Popen(["timeout", "-s", "KILL", str(case.limit(120)), *words],
                                   stdout=out, stderr=error, cwd=SOURCE, env=clean_environment())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        error.seek(0)
        case.require(HUNG, process.returncode not in (-9, 137), "killed at its limit of time")
        case.require(SILENT, usage.ru_maxrss * 1024 < MEMORY, f"took {usage.ru_maxrss >> 10} MiB")
        return subprocess.CompletedProcess(words, process.returncode, out.read(), error.read())


class Kind:
    """A kind of file. `path` is in the case's folder; `other`, in the inputs, is what it is swapped
    with. `strict`: every damage must be detected, by a checksum or a note."""

    fields = ()  # a message may name one of these instead of the file

    def __init__(self, name, path, other, command, strict, damages=None, count=24):
        self.name, self.path, self.other, self.command = name, path, other, command
        self.strict, self.damages, self.count = strict, damages or DAMAGES, count

    def body(self, case):
        command = self.command if isinstance(self.command, Command) else COMMANDS[self.command]
        command.undisturbed(case.world)
        folder = fresh(case, command)
        path = folder / self.path
        before = path.read_bytes()
        content = bytearray(before)
        name = case.choose(self.damages)
        self.damages[name](case.random, content, (build(case.world) / self.other).read_bytes())
        path.write_bytes(content)
        if content == before:
            return
        case.faults += 1
        result = run_measured(case, command, folder)
        told = result.stderr.decode(errors="replace")
        case.require(SILENT, result.returncode in (0, 1, 2),
                     lambda: f"status {result.returncode}: {shorten(told)}")
        if result.returncode != 0:
            named = any(f"{field}." in told for field in self.fields)
            case.require(SILENT, named or os.path.basename(self.path) in told or
                         str(folder) in told, lambda: f"no file is named: {shorten(told)}")
            self.check_nothing_made(case, command, folder)
        elif not self.is_same(case, command, folder, result):
            noted = f"/{os.path.basename(self.path)}' begins with" in told
            case.require(SILENT, noted or not self.strict,
                         lambda: f"read as other values, in silence: {shorten(told)}")
            case.accepted += 1

    def is_same(self, case, command, folder, result):
        expected = command.undisturbed(case.world)[0]
        if isinstance(command, Reader):
            return result.stdout.replace(str(folder).encode(), b"") == expected
        return command.outputs(folder) == expected

    @staticmethod
    def check_nothing_made(case, command, folder):
        if isinstance(command, Conversion):
            case.require(LOST, command.outputs(folder) == {},
                         "refused, and yet there is something of the output")


class Configuration(Kind):
    """An error in a field's value names the field."""

    fields = ("model", "parallel", "ddp", "optimizer", "data", "train", "checkpoint", "lora")


class Metrics(Kind):
    """A run resumes with a damaged metrics.jsonl: undamaged lines are kept, and the new lines are
    those of an undisturbed run."""

    def is_same(self, case, command, folder, result):
        expected = command.undisturbed(case.world)[0]["numbers"]
        found = numbers_of(folder / "run")
        case.require(LOST, found[-4:] == expected[-4:], lambda: f"the new lines: {found[-4:]}")
        return found == expected


def damaged(step, name):
    return f"run/checkpoint/{step}/{name}"


RUN = {"run": "run"}
IMPORT = Conversion("import (damaged)", ["checkpoint", "import", "--hf", "{folder}/hf",
                                         "{folder}/out"], {"hf": "hf"}, "out")
PLAN = Reader("plan memory", ["plan", "memory", "{folder}/config.textproto", "--json"],
              {"run/config.textproto": "config.textproto"})
INSPECT = Reader("data inspect", ["data", "inspect", "{folder}/set", "--json"],
                 {"set.idx": "set.idx", "set.bin": "set.bin"})
ON_SET = Train("on a data set", "data.path={folder}/set",
               inputs={"set.idx": "set.idx", "set.bin": "set.bin"})


def make_cache(world, folder):
    """Runs the command once to make its index cache, and removes everything else."""
    subprocess.run([str(word) for word in COMMANDS["index cache"].line(world, folder)], check=True,
                   capture_output=True, env=clean_environment(), cwd=SOURCE)
    shutil.rmtree(folder / "run")


class Cached(Kind):
    """A sample index, whose name depends on its data set."""

    def body(self, case):
        found = []

        def prepare(world, folder):
            make_cache(world, folder)
            found[:] = [str(path.relative_to(folder)) for path in folder.glob("cache/*.samples")]
        command = Train(f"index cache, found {case.number}", "data.path={folder}/set",
                        "data.cache_path={folder}/cache",
                        inputs={"set.idx": "set.idx", "set.bin": "set.bin"})
        command.make_more = prepare
        command.state_of = command.outputs
        command.outputs = lambda folder: {
            key: value for key, value in command.state_of(folder).items()
            if not key.startswith("cache")}
        command.undisturbed(case.world)
        kind = Kind(self.name, found[0], self.other, command, True)
        folder = case.folder / "work"
        prepared = fresh(case, command)
        kind.path = found[0]
        shutil.rmtree(prepared)
        assert folder == prepared
        kind.body(case)


KINDS = [
    Kind("checkpoint, shard (verify)", damaged("step_6", "rank_00000.safetensors"),
         damaged("step_3", "rank_00000.safetensors"), "verify", True, OF_SAFETENSORS, 40),
    Kind("checkpoint, shard (load)", damaged("step_6", "rank_00000.safetensors"),
         damaged("step_3", "rank_00000.safetensors"), "load", True, OF_SAFETENSORS),
    Kind("checkpoint, manifest (verify)", damaged("step_6", "manifest.textproto"),
         damaged("step_3", "manifest.textproto"), "verify", True, count=40),
    Kind("checkpoint, manifest (load)", damaged("step_6", "manifest.textproto"),
         damaged("step_3", "manifest.textproto"), "load", True),
    Kind("checkpoint, configuration (verify)", damaged("step_6", "config.textproto"),
         "run/config.textproto", "verify", True),
    Kind("checkpoint, latest (load)", "run/checkpoint/latest", "run/metrics.jsonl", "load", True, count=16),
    Kind("data set, .idx (inspect)", "set.idx", "otherset.idx", INSPECT, False, count=40),
    Kind("data set, .idx (train)", "set.idx", "otherset.idx", ON_SET, False),
    Kind("data set, .bin (train)", "set.bin", "otherset.bin", ON_SET, False),
    Cached("index cache (train)", "", "set.idx", "index cache", True, count=12),
    Kind("Hugging Face, model.safetensors (import)", "hf/model.safetensors",
         "newhf/model.safetensors", IMPORT, False, OF_SAFETENSORS, 40),
    Kind("Hugging Face, config.json (import)", "hf/config.json", "hf/generation_config.json",
         IMPORT, False, count=32),
    Kind("Hugging Face, generation_config.json (import)", "hf/generation_config.json",
         "hf/config.json", IMPORT, False, count=16),
    Configuration("configuration (plan memory)", "config.textproto", "text", PLAN, False, count=40),
    Metrics("metrics.jsonl (load)", "run/metrics.jsonl", "text", "load", False),
]
CELLS = [Cell("damage", kind.name, kind.body, kind.count,
              int("verify" in kind.name) * 2 + int("idx (inspect)" in kind.name))
         for kind in KINDS]
