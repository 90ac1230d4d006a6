"""Commands that read and write files: their inputs and outputs, and what must hold after a
fault."""

import os
import pathlib
import re
import shutil

from case import LEFT, LOST, SILENT, left_over, plain, shorten, tree_of
from faults import calls, faults
from support import LOCKSTEP, run
from training import (complete_steps, config_of, numbers_of, settings, shards_of)

STEPS = 4  # iterations of the trainings in this file


def build(world):
    """Makes the inputs of all commands: texts, data sets, two checkpoints and an export of each."""
    def make(folder):
        text = folder / "text"
        text.write_text("".join(f"{i} cubed is {i ** 3}. " for i in range(500)))
        other = folder / "other"
        other.write_text("".join(f"{i} and {i + 1}. " for i in range(400)))
        def done(*command):
            result = run(LOCKSTEP, *command, timeout=600)
            if result.returncode != 0:
                raise RuntimeError(result.stderr.decode())
        for name, source in (("set", text), ("otherset", other)):
            done("data", "build", "--input", source, "--tokenizer", "byte",
                 "--output", folder / name)
        done("train", config_of(world), "--output", folder / "run", *settings(
            "train.train_iters=6", "model.position_embedding_type=rope", "checkpoint.keep=9"))
        done("checkpoint", "export", "--hf", folder / "hf", folder / "run/checkpoint/step_3")
        done("checkpoint", "export", "--hf", folder / "newhf", folder / "run/checkpoint/step_6")
        return folder
    return world.once("inputs", make)


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def content_of(*paths):
    """Returns {name: bytes} of files, and of the files in folders."""
    found = {}
    for path in paths:
        names = sorted(path.rglob("*")) if path.is_dir() else [path]
        found |= {plain(str(name.relative_to(path.parent))): name.read_bytes() for name in names
                  if name.is_file()}
    return found


QUICK = ("data build", "data build over a data set", "data merge", "verify")  # take 0.05 s


class Command:
    """`inputs` are copied into a case's folder, which replaces {folder} in the words."""

    def __init__(self, name, words, inputs, outputs, ranks=1, prepare=None):
        self.name, self.words, self.inputs, self.outputs = name, words, inputs, outputs
        self.ranks, self.make_more = ranks, prepare

    def prepare(self, world, folder):
        made = build(world)
        for source, target in self.inputs.items():
            copy(made / source, folder / target)
        if self.make_more:
            self.make_more(world, folder)

    def line(self, world, folder, prefix=()):
        words = [str(word).replace("{folder}", str(folder)).replace(
            "{config}", str(config_of(world))) for word in self.words]
        launch = ("launch", "-n", self.ranks, "--starter", "own", "--") if self.ranks > 1 else ()
        return [*prefix, LOCKSTEP, *launch, *words]

    def run(self, case, folder, prefix=(), **environment):
        return run(*self.line(case.world, folder, prefix), timeout=case.limit(120), **environment)

    def calls_of(self, log, folder):
        """Returns the number of calls of each operation in a folder, by rank: {None: ...} if there
        is one rank, whose environment has no RANK."""
        ranks = range(self.ranks) if self.ranks > 1 else (None,)
        return {rank: calls(log, f"{folder}/", rank) for rank in ranks}

    def undisturbed(self, world):
        """Returns (the outputs, the files at the end, what calls_of() returns)."""
        def make(folder):
            # The name is as long as those of the cases, because calls are counted by path.
            self.prepare(world, folder)
            log = folder.parent / f"{folder.name}.calls"
            result = run(*self.line(world, folder), timeout=600, **faults(count=log))
            if result.returncode != 0:
                raise RuntimeError(f"{self.name}: {result.stderr.decode()}")
            return self.outputs(folder), tree_of(folder), self.calls_of(log, folder)
        return world.once(f"command {self.name}", make)

    def check_done(self, case, folder, result):
        """After status 0, everything is there except files that a message names."""
        expected, tree, _ = self.undisturbed(case.world)
        missing = tree - tree_of(folder)
        told = result.stderr.decode()
        unnamed = {name for name in missing if not re.match(r"run/checkpoint/(step_\d+/|latest)", name)
                   and os.path.basename(name) not in told}
        case.require(SILENT, not unnamed, lambda: f"status 0 without {unnamed}: {shorten(told)}")
        case.require(SILENT, self.outputs(folder) == expected,
                     lambda: f"status 0 with another result: {shorten(told)}")

    def check_again(self, case, folder, told=""):
        """The next start does everything, and leaves nothing but what `told` of the first names."""
        result = self.run(case, folder)
        case.require(LOST, result.returncode == 0,
                     lambda: f"the next start: status {result.returncode}: "
                     f"{shorten(result.stderr.decode())}")
        expected, tree, _ = self.undisturbed(case.world)
        case.require(LOST, self.outputs(folder) == expected, "the next start gives another result")
        extra = left_over(folder, tree, told)
        case.require(LEFT, not extra, f"files {extra}")

    def check_between(self, case, folder):
        """Checks the state after a fault and before the next start."""


class Conversion(Command):
    """A command whose output is complete, or as it was before, or not there at all."""

    def __init__(self, name, words, inputs, output, over=None, sequel=False):
        super().__init__(name, words, {**inputs, **({over: output} if over else {})},
                         lambda folder: content_of(folder / output))
        self.output, self.over = output, over

    def check_between(self, case, folder):
        found = self.outputs(folder)
        earlier = {}
        if self.over:
            old = content_of(build(case.world) / self.over)
            earlier = {str(pathlib.Path(self.output, *pathlib.Path(name).parts[1:])): content
                       for name, content in old.items()}
        whole = self.undisturbed(case.world)[0]
        allowed = [whole, earlier] if self.over else [whole, {}]
        case.require(LOST, found in allowed, lambda: f"a mixture: {sorted(found)}")


class Import(Conversion):
    """The checkpoint is complete or not there; files next to it may be missing. A lock that could
    not be removed is empty, and harmless."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        all_of = self.outputs
        self.outputs = lambda folder: {name: content for name, content in all_of(folder).items()
                                       if os.path.basename(name) != "lock"}

    def check_between(self, case, folder):
        if complete_steps(folder / self.output):
            result = run(LOCKSTEP, "checkpoint", "verify", folder / self.output)
            case.require(LOST, result.returncode == 0, result.stderr.decode())
            whole = self.undisturbed(case.world)[0]
            found = {name: content for name, content in self.outputs(folder).items()
                     if "/step_0/" in name}
            case.require(LOST, all(whole[name] == content for name, content in found.items()),
                         "another checkpoint")


class DataBuild(Command):
    """The index is written last and removed first: if it is there, the data set is complete."""

    def __init__(self, name, words, inputs, over=None):
        more = {f"{over}.{end}": f"out.{end}" for end in ("idx", "bin")} if over else {}
        super().__init__(name, words, {**inputs, **more}, self.files)
        self.over = over

    @staticmethod
    def files(folder):
        return content_of(folder / "out.idx", folder / "out.bin")

    def check_between(self, case, folder):
        found = self.files(folder)
        if "out.idx" not in found:
            return
        made = build(case.world)
        allowed = [self.undisturbed(case.world)[0]]
        if self.over:
            allowed.append({f"out.{end}": (made / f"{self.over}.{end}").read_bytes()
                            for end in ("idx", "bin")})
        case.require(LOST, found in allowed, lambda: f"a mixture: {sorted(found)}")


class Train(Command):
    def __init__(self, name, *pairs, inputs=None, ranks=1, start=0):
        words = ["train", "{config}", "--output", "{folder}/run", *settings(
            f"train.train_iters={start + STEPS}", "checkpoint.load={folder}/run/checkpoint",
            "checkpoint.load_if_present=true", "checkpoint.keep=1",
            "parallel.distributed_timeout_seconds=20", "model.position_embedding_type=rope",
            *pairs)]
        super().__init__(name, words, inputs or {}, self.state, ranks)
        self.end = start + STEPS

    def state(self, folder):
        step = folder / "run/checkpoint" / f"step_{self.end}"
        found = {"numbers": numbers_of(folder / "run"), "shards": shards_of(step)}
        # The content of a cache contains the data set's path.
        return found | {name: len(content) > 0 for name, content in
                        content_of(folder / "cache").items()}

    def check_between(self, case, folder):
        steps = complete_steps(folder / "run/checkpoint")
        if steps:
            result = run(LOCKSTEP, "checkpoint", "verify", folder / "run/checkpoint")
            case.require(LOST, result.returncode == 0, result.stderr.decode())
        if self.inputs.get("run") == "run":
            case.require(LOST, steps, "the checkpoint that was there has gone")
        wanted = self.undisturbed(case.world)[0]["numbers"]
        found = numbers_of(folder / "run")
        case.require(LOST, found == wanted[:len(found)], f"metrics {found}, undisturbed {wanted}")


class Reader(Command):
    """A command that only prints: its output is compared."""

    def __init__(self, name, words, inputs):
        super().__init__(name, words, inputs, lambda folder: None)

    def undisturbed(self, world):
        def make(folder):
            self.prepare(world, folder)
            log = folder.parent / f"{folder.name}.calls"
            result = run(*self.line(world, folder), timeout=600, **faults(count=log))
            if result.returncode != 0:
                raise RuntimeError(f"{self.name}: {result.stderr.decode()}")
            return result.stdout.replace(str(folder).encode(), b""), tree_of(folder), \
                self.calls_of(log, folder)
        return world.once(f"command {self.name}", make)

    def check_done(self, case, folder, result):
        told = result.stdout.replace(str(folder).encode(), b"")
        case.require(SILENT, told == self.undisturbed(case.world)[0],
                     lambda: f"status 0 with another result: {shorten(told.decode())}")

    def check_again(self, case, folder, told=""):
        result = self.run(case, folder)
        case.require(LOST, result.returncode == 0, lambda: shorten(result.stderr.decode()))
        self.check_done(case, folder, result)


RESUMED = {"run": "run"}
OWN_TEXT = settings("data.path={folder}/text")[1]
COMMANDS = {command.name: command for command in (
    Train("start", OWN_TEXT, inputs={"text": "text"}),
    Train("load", OWN_TEXT, inputs={"text": "text", **RESUMED}, start=6),
    Train("save", "checkpoint.save_interval=1"),
    Train("asynchronous save", "checkpoint.save_interval=1", "checkpoint.async_save=true"),
    Train("index cache", "data.path={folder}/set", "data.cache_path={folder}/cache",
          inputs={"set.idx": "set.idx", "set.bin": "set.bin"}),
    Train("load, 2 ranks", OWN_TEXT, inputs={"text": "text", **RESUMED}, start=6, ranks=2),
    Train("save, 2 ranks", "checkpoint.save_interval=1", ranks=2),
    Conversion("export", ["checkpoint", "export", "--hf", "{folder}/out",
                          "{folder}/run/checkpoint"], RESUMED, "out"),
    Conversion("export over an export", ["checkpoint", "export", "--hf", "{folder}/out",
                                         "{folder}/run/checkpoint"], RESUMED, "out", "hf"),
    Import("import", ["checkpoint", "import", "--hf", "{folder}/hf", "{folder}/out"],
               {"hf": "hf"}, "out"),
    DataBuild("data build", ["data", "build", "--input", "{folder}/text", "--tokenizer", "byte",
                             "--output", "{folder}/out"], {"text": "text"}),
    DataBuild("data build over a data set",
              ["data", "build", "--input", "{folder}/text", "--tokenizer", "byte",
               "--output", "{folder}/out"], {"text": "text"}, "otherset"),
    DataBuild("data merge", ["data", "merge", "--input", "{folder}/set", "{folder}/otherset",
                             "--output", "{folder}/out"],
              {f"{name}.{end}": f"{name}.{end}" for name in ("set", "otherset")
               for end in ("idx", "bin")}),
    Reader("verify", ["checkpoint", "verify", "{folder}/run/checkpoint"], RESUMED),
    Reader("evaluate", ["evaluate", "{folder}/run/checkpoint", "--input", "{folder}/text",
                        "--json"], {"text": "text", **RESUMED}),
)}


def fresh(case, command):
    """Makes a folder with the inputs of a command."""
    folder = case.folder / "work"
    folder.mkdir()
    command.prepare(case.world, folder)
    return folder
