#!/usr/bin/env python3
"""Runs the tests of an existing build with libraries and a program that a sanitizer watches.

    run.py address|thread [--build DIR] [--jobs N] [--only REGEX] [--resume]

clang compiles the libraries, the program and the tests in build-address/ or build-thread/.
`address`, which has UndefinedBehaviorSanitizer too, compiles only those tests that do not use
libtorch: the others are taken from --build and load the compiled libraries and the runtime, which
saves half of the time. `thread` compiles all, because it must see the locks of the tests.

A program runs as a whole. Each process writes its reports into a file of its own, so that no test
can hide one. Fails if there is a report, or a test that fails. results.jsonl in the build folder
has one line for each program. --resume continues an interrupted run; --built compiles nothing."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

SOURCE = pathlib.Path(__file__).resolve().parents[2]
SUPPRESSIONS = SOURCE / "tests/sanitizers"
LONGER = 6  # times as long as a test may take without a sanitizer
CLANG = "16"
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
# Tests that do not run with a sanitizer: a regular expression of their names, and why.
LEFT_OUT = {
    "cuda_test": "needs a GPU",
    "(calibration|calibrated_hosts)_test": "measures how fast this machine is",
    "sentencepiece_test": "loads its library with RTLD_DEEPBIND, which sanitizers refuse",
    "fuzz_.*": "make fuzz has the sanitizers",
    "(tree|documents|archive|setup|sanitizers|recipe|gpu_check|gpu_rehearsal|browser)_test":
        "runs neither the libraries nor the program",
    "(installed_target|wheel|deb|install|tutorials|own_transformer|testing_kit_install)_test":
        "compiles and installs programs of its own",
}
# Cases of tests that run otherwise.
LEFT_OUT_CASES = {
    "core_test": ["InputFile.LimitsAreNamed"],  # asks for more memory than a sanitizer can give
    # clang compiles without OpenMP.
    "parameters_test": ["ParallelFor.TakesAsManyThreadsAsLibtorchWasTold"],
    # These look at what glibc's allocator does; a sanitizer has its own.
    "distributed_optimizer_test": ["StepMemory.NothingOfTheSizeOfABufferIsAllocatedInAStep"],
    "telemetry_test": ["MemoryUse.GrowsWithWhatIsTouchedAndKeepsThePeak"],
}
# The same with ThreadSanitizer, whose operator new replaces that of allocation_counter.h.
LEFT_OUT_CASES_OF_THREAD = {
    "parallel_state_test": ["Collectives.ALabelIsCopiedOnceAGroup"],
    "parallel_functions_test": ["ParallelFunctions.ALabelAndThatOfItsGradientAreMadeOnceAGroup"],
    "pipeline_executor_test": ["Transfer.NoTextOfALabelIsMadeInAStep"],
}
# Threads of libtorch's backward run code of ours there: thread_devices.supp says what that takes.
ON_DEVICES = re.compile(r"device|nccl_rules|trainer_audit")


def ctest_commands(build):
    """Returns {name: (command, environment, seconds, whether libtorch is used)} of all programs."""
    listed = subprocess.run(["ctest", "--show-only=json-v1"], cwd=build, check=True, text=True,
                            capture_output=True).stdout
    programs = {}
    for test in json.loads(listed)["tests"]:
        if "command" not in test:  # not built, so --only must not choose it
            continue
        properties = {entry["name"]: entry["value"] for entry in test["properties"]}
        command = [word for word in test["command"] if not word.startswith("--gtest_")]
        # Single cases are discovered only in programs without libtorch.
        alone = len(command) == len(test["command"])
        name = test["name"] if alone else pathlib.Path(command[0]).name
        environment = dict(word.split("=", 1) for word in properties.get("ENVIRONMENT", []))
        programs[name] = (command, environment,
                          max(properties.get("TIMEOUT", 300), 0 if alone else 300), alone)
    return programs


def symbolizer():
    """Returns the program that names functions in reports, or None: then the runtimes look for
    one themselves. They end a program whose options name one that does not exist."""
    return shutil.which(f"llvm-symbolizer-{CLANG}") or shutil.which("llvm-symbolizer")


class Sanitizer:
    def __init__(self, kind, build, folder):
        self.kind, self.build, self.folder = kind, build, folder
        self.reports = folder / "reports"
        # ThreadSanitizer needs addresses where it expects them, also in programs of the build.
        self.prefix = ["setarch", "-R"] if kind == "thread" else []
        self.runtime = subprocess.run(
            [f"clang-{CLANG}", f"-print-file-name=libclang_rt.{kind[0]}san-x86_64.so"],
            check=True, text=True, capture_output=True).stdout.strip()

    def compile(self, pure):
        compiler = [f"-DCMAKE_C_COMPILER=clang-{CLANG}", f"-DCMAKE_CXX_COMPILER=clang++-{CLANG}"]
        if self.kind == "thread":  # the runtime and allocation_counter.h define operator new
            compiler.append("-DCMAKE_EXE_LINKER_FLAGS=-Wl,-z,muldefs")
        subprocess.run(["cmake", "-S", SOURCE, "-B", self.folder, "-G", "Ninja", *compiler,
                        f"-DLOCKSTEP_SANITIZE={SANITIZERS[self.kind]}", "-DLOCKSTEP_CUDA=OFF"],
                       check=True, stdout=subprocess.DEVNULL)
        targets = (["lockstep_testing", "test_helpers", *pure] if self.kind == "address" else
                   ["test_programs"])
        subprocess.run([*self.prefix, "ninja", "-k", "0", "-C", self.folder, "lockstep", *targets],
                       check=True, env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"})

    def options(self, name):
        log = f"log_path={self.reports}/{name}:log_exe_name=1"
        if symbolizer():
            log += f":external_symbolizer_path={symbolizer()}"
        if self.kind == "address":
            return {"ASAN_OPTIONS": f"{log}:detect_leaks=0:allocator_may_return_null=1"
                                    ":detect_odr_violation=0",
                    "UBSAN_OPTIONS": f"{log}:print_stacktrace=1"}
        devices = ON_DEVICES.search(name) is not None
        rules = SUPPRESSIONS / ("thread_devices.supp" if devices else "thread.supp")
        return {"TSAN_OPTIONS": f"{log}:suppressions={rules}:detect_deadlocks=0"
                                ":allocator_may_return_null=1"
                                f":ignore_noninstrumented_modules={int(not devices)}"}

    def own(self, name, command, alone):
        """Returns the program of this folder that runs in place of the build's; None: the build's
        runs."""
        if command[0].endswith("python") or (self.kind == "address" and alone):
            return None
        return self.folder / "tests" / name

    def check_built(self, programs):
        """Ends this process if a program of this folder is missing."""
        for name, (command, _, _, alone) in programs.items():
            own = self.own(name, command, alone)
            if own and not own.exists():
                ninja = shlex.join([*self.prefix, "ninja", "-C", str(self.folder), name])
                sys.exit(f"run.py: {own} is not built; leave out --built, or run: "
                         f"ASAN_OPTIONS=detect_leaks=0 {ninja}")

    def command(self, name, command, environment, alone):
        """Returns the command and the environment in which `name` meets the sanitizer."""
        own = self.own(name, command, alone)
        environment = environment | self.options(name)
        if command[0].endswith("python"):
            environment["LOCKSTEP_BUILD"] = str(self.folder)
        elif own:
            command = [str(own)]
        else:
            libraries = [self.folder / "lib", *torch_libraries(command[0])]
            environment["LD_LIBRARY_PATH"] = ":".join(map(str, libraries))
            environment["LD_PRELOAD"] = self.runtime
            if counts_memory(command[0]):  # its operator delete gets what the runtime allocated
                environment["ASAN_OPTIONS"] += ":alloc_dealloc_mismatch=0"
        cases = LEFT_OUT_CASES.get(name, [])
        if self.kind == "thread":
            cases = cases + LEFT_OUT_CASES_OF_THREAD.get(name, [])
        if cases:
            command = [*command, "--gtest_filter=-" + ":".join(cases)]
        return [*self.prefix, *command], environment


def torch_libraries(program):
    """Returns the folders where the program finds libtorch."""
    dynamic = subprocess.run(["readelf", "-d", program], check=True, text=True,
                             capture_output=True).stdout
    paths = re.search(r"R(?:UN)?PATH.*\[(.*)\]", dynamic).group(1).split(":")
    return [path for path in paths if path.startswith("/")]


def counts_memory(program):
    """Returns whether the program has an operator delete of its own."""
    return " T _ZdlPv\n" in subprocess.run(["nm", "-D", program], check=True, text=True,
                                           capture_output=True).stdout


def run(sanitizer, name, program):
    command, environment, seconds, alone = program
    command, environment = sanitizer.command(name, command, environment, alone)
    log = sanitizer.folder / "logs" / f"{name}.log"
    start = time.monotonic()
    with open(log, "wb") as output:
        try:
            status = subprocess.run(command, cwd=sanitizer.build / "tests", stdout=output,
                                    stderr=subprocess.STDOUT, timeout=LONGER * seconds,
                                    env=os.environ | environment).returncode
        except subprocess.TimeoutExpired:
            status = "timed out"
    reports = sorted(path.name for path in sanitizer.reports.glob(f"{name}.*"))
    tests = re.findall(r"\[  PASSED  \] (\d+) test|^Ran (\d+) test", log.read_text(errors="replace"),
                       re.MULTILINE)
    return {"name": name, "status": status, "reports": reports,
            "tests": sum(int(a or b) for a, b in tests),
            "seconds": round(time.monotonic() - start, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=SANITIZERS)
    parser.add_argument("--build", type=pathlib.Path, default=SOURCE / "build")
    parser.add_argument("--folder", type=pathlib.Path, help="default: build-KIND")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1)
    parser.add_argument("--only", default="", help="programs whose name this finds")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--built", action="store_true")
    arguments = parser.parse_args()
    folder = (arguments.folder or SOURCE / f"build-{arguments.kind}").resolve()
    sanitizer = Sanitizer(arguments.kind, arguments.build.resolve(), folder)
    programs = ctest_commands(sanitizer.build)
    if not arguments.built:
        sanitizer.compile([name for name, program in programs.items() if not program[3]])
    left_out = {name: reason for name in programs for rule, reason in LEFT_OUT.items()
                if re.fullmatch(rule, name)}
    results = folder / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] \
        if arguments.resume and results.exists() else []
    known = {result["name"] for result in done}
    chosen = [name for name in programs
              if name not in known | left_out.keys() and re.search(arguments.only, name)]
    sanitizer.check_built({name: programs[name] for name in chosen})
    if not arguments.resume:
        results.unlink(missing_ok=True)
        for old in sanitizer.reports.glob("*"):
            old.unlink()
    for folder_name in ("logs", "reports"):
        (folder / folder_name).mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool, open(results, "a") as file:
        waiting = [pool.submit(run, sanitizer, name, programs[name]) for name in chosen]
        for future in concurrent.futures.as_completed(waiting):
            done.append(future.result())
            print(json.dumps(done[-1]), file=file, flush=True)
            print(f"{len(done)}/{len(chosen) + len(known)}", done[-1], flush=True)
    bad = [result for result in done if result["status"] != 0 or result["reports"]]
    print(f"{sum(result['tests'] for result in done)} tests in {len(done)} programs; "
          f"{len(bad)} programs failed or have reports: "
          f"{', '.join(result['name'] for result in bad) or 'none'}")
    for name, reason in left_out.items():
        print(f"left out: {name} ({reason})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
