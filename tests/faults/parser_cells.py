"""Random inputs for every parser: a million each, by libFuzzer with the sanitizers.

`make fuzzers` builds the programs."""

import os
import pathlib
import re
import subprocess

from case import HUNG, SILENT, Cell, Skipped, shorten

from support import SOURCE

FUZZ = pathlib.Path(SOURCE) / "tests/fuzz"
FUZZERS = pathlib.Path(SOURCE) / "build-fuzz/fuzz"
CASES, INPUTS = 4, 250_000  # per parser, and per case
SECONDS_OF_AN_INPUT = 20
TOO_LONG = 70  # libFuzzer's exit status if an input takes longer
# No detect_leaks: protobuf keeps its descriptors until the end.
SANITIZERS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}


def parsed(name):
    def body(case):
        program = FUZZERS / f"fuzz_{name}"
        if not program.exists():
            raise Skipped(f"no {program.name} in {FUZZERS.parent.name}/{FUZZERS.name}, which "
                          "`make fuzzers` builds")
        found = case.folder / "corpus"
        found.mkdir()
        limit = case.limit(SECONDS_OF_AN_INPUT)
        # libFuzzer would replace a seed of 0 by a random one.
        command = [program, f"-runs={INPUTS}", f"-seed={case.draw(case.random.randint(1, 2**31))}",
                   f"-timeout={limit:.0f}", "-rss_limit_mb=4096", "-max_len=65536",
                   "-print_final_stats=1", f"-artifact_prefix={case.folder}/", found,
                   FUZZ / "corpus" / name]
        process = subprocess.Popen([str(word) for word in command], env=os.environ | SANITIZERS,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        case.processes.append(process)
        text = process.communicate()[1].decode(errors="replace")
        executed = re.search(r"stat::number_of_executed_units: (\d+)", text)
        case.faults += int(executed[1]) if executed else 0
        case.require(HUNG, process.returncode != TOO_LONG, lambda: shorten(text))
        case.require(SILENT, process.returncode == 0 and case.faults >= INPUTS,
                     lambda: f"status {process.returncode}: {shorten(text)}")
    return body


CELLS = [Cell("random inputs", path.name.removesuffix("_fuzz.cpp"),
              parsed(path.name.removesuffix("_fuzz.cpp")), CASES)
         for path in sorted(FUZZ.glob("*_fuzz.cpp"))]
