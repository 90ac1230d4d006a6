#!/usr/bin/env python3
"""Seeds the bugs of mutants.py, one at a time, and checks whether the tests see each.

A mutant is compiled and linked separately, in build-mutants/: the changed source with ninja's
command for it, the shared library of its room and, if the source needs no libtorch, the test
programs that contain it. Then the test programs of an existing build run with that library, those
that mutants.py names first. A mutant that passes all of them survives. A run of all mutants writes
tests/mutants/RESULT.md. It fails if fewer than 95 % were killed.

    run.py [--build DIR] [--jobs N] [--resume] [--audit] [NAME...]

--audit checks instead whether the gradient audit alone convicts those of audited.py: each is
compiled alone and preloaded. It fails if one is not convicted. A run of all of them writes the
second part of RESULT.md. --resume continues an interrupted run: it reuses the results of mutants
whose source has not changed since."""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import time

sys.dont_write_bytecode = True
from audited import AUDITED, BEYOND  # noqa: E402
from mutants import MUTANTS, SURVIVORS  # noqa: E402

SOURCE = pathlib.Path(__file__).resolve().parents[2]
RESULT = SOURCE / "tests/mutants/RESULT.md"
GOAL = 0.95
AUDIT_CASES = "112"  # 4 for each world
CAP_SECONDS = 300  # per test program; a rank that waits for another gives up after 20


class Build:
    """An existing build and its commands."""

    def __init__(self, folder):
        self.folder = folder
        self.compiled = json.loads(self.ninja("compdb"))

    def ninja(self, *tool):
        return subprocess.run(["ninja", "-t", *tool], cwd=self.folder, check=True, text=True,
                              capture_output=True).stdout

    def compilation(self, source, room):
        """Returns the file that compiles `source` (itself or one that includes it), the command and
        the object."""
        wanted = SOURCE / source
        for entry in self.compiled:
            in_room = f"/lockstep_{room}.dir/" in entry["output"] or \
                f"/lockstep_{room}_pure.dir/" in entry["output"]
            file = pathlib.Path(entry["file"])
            if in_room and (file == wanted or
                            file.parent.name == "Unity" and f'"{wanted}"' in file.read_text()):
                return file, entry["command"], entry["output"]
        sys.exit(f"{source}: no command compiles it in {self.folder}")

    @functools.lru_cache(maxsize=None)
    def link_command(self, target):
        command = self.ninja("commands", target).rstrip().split("\n")[-1]
        return re.sub(r" && (:|cd .*)$", "", command.removeprefix(": && "))

    @functools.cached_property
    def test_programs(self):
        programs = [path.name for path in (self.folder / "tests").iterdir()
                    if path.name.endswith("_test") and path.is_file() and
                    path.name != "cuda_test" and os.access(path, os.X_OK)]
        return sorted(programs, key=lambda name: ("layouts" in name, "oracle" in name, name))


def run(command, folder):
    done = subprocess.run(command, shell=True, cwd=folder, text=True, capture_output=True)
    if done.returncode != 0:
        sys.exit(f"{command}\n{done.stdout}{done.stderr}")


def failure_in(program, name, chosen, folder, libraries):
    """Returns what failed in test program `name`, at `program`; None if nothing did."""
    environment = dict(os.environ, OMP_NUM_THREADS="1",
                       LD_LIBRARY_PATH=":".join(str(path) for path in libraries))
    command = [program, "--gtest_fail_fast"] + ([f"--gtest_filter={chosen}"] if chosen else [])
    try:
        done = subprocess.run(command, env=environment, cwd=folder, timeout=CAP_SECONDS,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        code, output = done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as expired:
        code, output = None, (expired.stdout or b"").decode(errors="replace")
    if code == 0:
        return None
    failed = re.findall(r"\[  FAILED  \] ([\w/]+\.[\w/]+)", output)
    if failed:
        return f"{name}: {failed[0]}"
    begun = re.findall(r"\[ RUN      \] (\S+)", output)
    if not begun:
        sys.exit(f"{name} does not run:\n{output[-2000:]}")
    return f"{name}: {begun[-1]} ({'hangs' if code is None else 'crash'})"


def failure_without_mutant(build, test, folder):
    """Returns what fails in `test` of the build itself; None if nothing does."""
    name, _, chosen = test.partition(":")
    return failure_in(build.folder / "tests" / name, name, chosen, folder, [build.folder / "lib"])


def conviction_in(line):
    """Returns the audit's complaint about a parameter or the job in `line`, or None."""
    told = re.search(r"(?:rank \d+, `[^`]+`|rank \d+|job): [a-z ]+: expected .*", line) or \
        re.search(r"rank \d+ threw: .*", line) or \
        re.search(r"C\+\+ exception with description .*", line)
    if told is None:
        return None
    text = re.sub(r"adam, by range.*?wd_mult \S+, ", "..., ", told[0])
    return text[:250] + ("..." if len(text) > 250 else "")


def said_by_audit(build, test, folder, preloaded=""):
    """Returns the audit's first complaint in `test`; None if there is none."""
    name, _, chosen = test.partition(":")
    environment = dict(os.environ, OMP_NUM_THREADS="1", LOCKSTEP_RANDOM_CASES=AUDIT_CASES,
                       LD_LIBRARY_PATH=str(build.folder / "lib"), LD_PRELOAD=str(preloaded))
    program = subprocess.Popen([build.folder / "tests" / name, f"--gtest_filter={chosen}"],
                               env=environment, cwd=folder, text=True, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watch = threading.Timer(CAP_SECONDS, program.kill)
    watch.start()
    said = next(filter(None, map(conviction_in, program.stdout)), None)
    if said:
        program.kill()
    status = program.wait()
    watch.cancel()
    return f"status {status}" if status and not preloaded and not said else said


class Seeded:
    """A mutant and its build."""

    def __init__(self, mutant, build, folder):
        self.mutant, self.build, self.folder = mutant, build, folder / mutant.name
        self.room = mutant.source.split("/")[0]
        self.object = self.folder / (pathlib.Path(mutant.source).name + ".o")
        (self.folder / "lib").mkdir(parents=True, exist_ok=True)

    def changed_source(self):
        text = (SOURCE / self.mutant.source).read_text()
        if text.count(self.mutant.old) != 1:
            sys.exit(f"mutant {self.mutant.name}: {self.mutant.source} holds its old text "
                     f"{text.count(self.mutant.old)} times, allowed: once")
        return text.replace(self.mutant.old, self.mutant.new)

    def compile(self):
        compiled, command, old_object = self.build.compilation(self.mutant.source, self.room)
        original = SOURCE / self.mutant.source
        source = self.folder / original.name
        source.write_text(self.changed_source())
        if compiled != original:
            unity = self.folder / compiled.name
            unity.write_text(compiled.read_text().replace(f'"{original}"', f'"{source}"'))
            source = unity
        command = command.replace(f" -c {compiled}", f" -c {source}")
        command = re.sub(r" -MD -MT \S+ -MF \S+", "", command)
        run(command.replace(f" -o {old_object}", f" -o {self.object}"), self.build.folder)
        library = f"lib/liblockstep_{self.room}.so"
        link = self.build.link_command(library).replace(f" {old_object} ", f" {self.object} ")
        run(link.replace(f" -o {library}", f" -o {self.folder / library}"), self.build.folder)

    def compile_alone(self):
        """Builds a library of the changed source alone; when preloaded, its symbols take precedence
        over those of the room's library."""
        compiled, command, old_object = self.build.compilation(self.mutant.source, self.room)
        source = self.folder / pathlib.Path(self.mutant.source).name
        source.write_text(self.changed_source())
        command = command.replace(f" -c {compiled}", f" -c {source}")
        command = re.sub(r" -MD -MT \S+ -MF \S+", "", command)
        run(command.replace(f" -o {old_object}", f" -o {self.object}"), self.build.folder)
        library = self.folder / "lib/mutant.so"
        run(f"c++ -shared -o {library} {self.object}", self.build.folder)
        return library

    def program(self, name):
        """Returns the path of the test program `name` that contains the mutant."""
        archive = f" {self.room}/liblockstep_{self.room}_pure.a"
        link = self.build.link_command(f"tests/{name}")
        if archive not in link:
            return self.build.folder / "tests" / name
        path = self.folder / name
        if "_pure.dir" in self.build.compilation(self.mutant.source, self.room)[2]:
            link = link.replace(archive, f" {self.object}{archive}", 1)
        run(link.replace(f" -o tests/{name}", f" -o {path}"), self.build.folder)
        return path

    def failure_of(self, test):
        name, _, chosen = test.partition(":")
        return failure_in(self.program(name), name, chosen, self.folder,
                          [self.folder / "lib", self.build.folder / "lib"])

    def conviction(self, test, resume):
        """Returns the audit's complaint about the mutant in `test`; None if there is none."""
        known = self.folder / "audit.json"
        key = hashlib.sha256((self.changed_source() + test).encode()).hexdigest()
        if resume and known.is_file():
            found = json.loads(known.read_text())
            if found["source"] == key:
                return found["said"]
        said = said_by_audit(self.build, test, self.folder, self.compile_alone())
        known.write_text(json.dumps({"source": key, "said": said}))
        return said

    def judge(self, resume):
        """Returns the test that kills the mutant; None if none does."""
        known = self.folder / "result.json"
        key = hashlib.sha256(self.changed_source().encode()).hexdigest()
        if resume and known.is_file():
            found = json.loads(known.read_text())
            if found["source"] == key:
                return found["killer"]
        self.compile()
        killer = self.killer()
        known.write_text(json.dumps({"source": key, "killer": killer}))
        return killer

    def killer(self):
        named = [test.partition(":")[0] for test in self.mutant.tests]
        others = [name for name in self.build.test_programs if name not in named]
        for test in list(self.mutant.tests) + others:
            found = self.failure_of(test)
            if not found:
                continue
            # check_baseline() has run only the programs that mutants name.
            if test in others and (
                    broken := failure_without_mutant(self.build, test, self.folder)):
                sys.exit(f"without a mutant fails: {broken}")
            return found
        return None


def report(results):
    killed = sum(1 for _, killer in results if killer)
    lines = ["# Seeded bugs", "",
             f"`make mutants` seeded {len(results)} bugs, one at a time; the tests killed "
             f"{killed} ({100 * killed / len(results):.0f} %). Written by tests/mutants/run.py.", "",
             "| bug | where | what | killed by |", "|---|---|---|---|"]
    for mutant, killer in results:
        seen = killer or f"**survives**: {SURVIVORS.get(mutant.name, 'no reason is known')}"
        lines.append(f"| {mutant.name} | {mutant.source} | {mutant.kind} | {seen} |")
    RESULT.write_text("\n".join(lines) + "\n" + audit_part())
    return killed / len(results)


AUDIT_TITLE = "\n## By the audit alone\n"


def audit_part():
    """Returns the part of RESULT.md that --audit writes."""
    text = RESULT.read_text() if RESULT.is_file() else ""
    return text[text.index(AUDIT_TITLE):] if AUDIT_TITLE in text else ""


def report_audit(results):
    """`results`: the mutants of AUDITED, and the complaint that convicts each."""
    convicted = sum(1 for _, said in results if said)
    refused = sum(1 for _, said in results if said and " threw: " in said)
    lines = [AUDIT_TITLE, textwrap.fill(
             f"{time.strftime('%Y-%m-%d')}: `tests/mutants/run.py --audit` seeded the {len(results)} "
             "bugs of scale, group or count on the way of a gradient from backward to the update. The "
             "audit of gradients, which compares what it measures with what the descriptions say and "
             f"with no other run, convicts {convicted}; in {refused} of these the step that it makes ends "
             "with an error.", 100), "",
             "| bug | what | seen on | what the audit says first |", "|---|---|---|---|"]
    for mutant, said in results:
        text = (said or "**nothing**").replace("|", "\\|").replace("`", "")
        test = AUDITED[mutant.name].split(":")[1]
        lines.append(f"| {mutant.name} | {mutant.kind} | {test} | {text} |")
    lines += ["", "Of scale, group or count too, and not on that way:", "",
              "| bug | why the audit cannot see it |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in BEYOND.items()]
    lines += ["", "The other bugs are of waiting, of devices, of random numbers, of shapes, of "
              "checkpoints or of the update rule."]
    text = RESULT.read_text()
    RESULT.write_text(text.removesuffix(audit_part()) + "\n".join(lines) + "\n")
    return convicted == len(results)


def run_audit(build, chosen, folder, options):
    def convict(mutant):
        begin = time.monotonic()
        said = Seeded(mutant, build, folder).conviction(AUDITED[mutant.name], options.resume)
        print(f"{mutant.name:32} {time.monotonic() - begin:6.1f} s  {said or 'NOT CONVICTED'}",
              flush=True)
        return mutant, said

    for test in sorted({AUDITED[mutant.name] for mutant in chosen}):
        if said := said_by_audit(build, test, folder):
            sys.exit(f"without a mutant {test} says: {said}")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(convict, chosen))
    if len(chosen) == len(AUDITED):
        sys.exit(0 if report_audit(results) else "the audit does not convict all")
    sys.exit(0 if all(said for _, said in results) else "the audit does not convict all")


def check_named_tests(build, mutants):
    """Every test with a filter that a mutant names exists in its program."""
    for test in sorted({test for mutant in mutants for test in mutant.tests if ":" in test}):
        name, _, chosen = test.partition(":")
        listed = subprocess.run([build.folder / "tests" / name, "--gtest_list_tests",
                                 f"--gtest_filter={chosen}"], text=True, capture_output=True)
        if not re.search(r"^  \S", listed.stdout, re.M):
            sys.exit(f"mutants.py names {test}; no test of {name} matches")


def check_baseline(pool, build, mutants, folder):
    """The test programs that mutants name pass without a mutant."""
    names = sorted({test.partition(":")[0] for mutant in mutants for test in mutant.tests})
    failures = pool.map(lambda name: failure_without_mutant(build, name, folder), names)
    broken = [failure for failure in failures if failure]
    if broken:
        sys.exit("without a mutant fails: " + ", ".join(broken))


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--build", type=pathlib.Path, default=SOURCE / "build")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments.add_argument("--resume", action="store_true")
    arguments.add_argument("--audit", action="store_true")
    arguments.add_argument("names", nargs="*")
    options = arguments.parse_args()
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        sys.exit(f"no such mutants: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]
    build = Build(options.build.resolve())
    folder = SOURCE / "build-mutants"

    def judge(mutant):
        begin = time.monotonic()
        killer = Seeded(mutant, build, folder).judge(options.resume)
        print(f"{mutant.name:32} {time.monotonic() - begin:6.1f} s  {killer or 'SURVIVES'}",
              flush=True)
        return mutant, killer

    folder.mkdir(exist_ok=True)
    if options.audit:
        run_audit(build, [m for m in chosen if m.name in AUDITED], folder, options)
    check_named_tests(build, chosen)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        if not options.resume:
            check_baseline(pool, build, chosen, folder)
        results = list(pool.map(judge, chosen))
    killed = sum(1 for _, killer in results if killer) / len(results)
    if not options.names:
        killed = report(results)
    sys.exit(0 if killed >= GOAL else f"killed {100 * killed:.0f} %, allowed: >= {100 * GOAL:.0f} %")


if __name__ == "__main__":
    main()
