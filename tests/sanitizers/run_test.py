"""run.py on machines that lack something. Small programs stand in for the compiler and ctest."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import run


class Machine(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="a machine ")
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        self.bin, self.build, self.folder = (self.root / name for name in ("bin", "build", "own"))
        for folder in (self.bin, self.build / "tests", self.folder / "tests"):
            folder.mkdir(parents=True)
        self.program(self.bin / "clang-16", "echo /runtime.so")

    def program(self, path, script=""):
        path.write_text("#!/bin/sh\n" + script + "\n")
        path.chmod(0o755)
        return path

    def options(self, kind):
        """Returns the options of each sanitizer's runtime, as dictionaries."""
        with mock.patch.dict(os.environ, {"PATH": str(self.bin)}):
            options = run.Sanitizer(kind, self.build, self.folder).options("core_test")
        return {name: dict(word.split("=", 1) for word in text.split(":"))
                for name, text in options.items()}

    def test_the_options_name_a_symbolizer_that_exists(self):
        for kind, runtimes in (("address", {"ASAN_OPTIONS", "UBSAN_OPTIONS"}),
                               ("thread", {"TSAN_OPTIONS"})):
            for name in (None, "llvm-symbolizer", "llvm-symbolizer-16"):  # the compiler's is first
                if name:
                    self.program(self.bin / name)
                options = self.options(kind)
                self.assertEqual(set(options), runtimes)
                for values in options.values():
                    self.assertEqual(values.get("external_symbolizer_path"),
                                     str(self.bin / name) if name else None)
            for path in self.bin.glob("llvm-*"):
                path.unlink()

    def test_all_that_python_tests_start_is_compiled(self):
        used = set()
        for path in (run.SOURCE / "tests/end_to_end").glob("*.py"):
            used |= set(re.findall(r'BUILD / "tests(?:/|" / ")(?:lib)?(\w+)', path.read_text()))
        target = re.search(r"add_custom_target\(test_helpers DEPENDS([^)]*)\)",
                           (run.SOURCE / "tests/CMakeLists.txt").read_text())
        self.assertEqual(used, set(target.group(1).split()))
        with mock.patch.dict(os.environ, {"PATH": str(self.bin)}):
            sanitizer = run.Sanitizer("address", self.build, self.folder)
        with mock.patch.object(subprocess, "run") as started:
            sanitizer.compile(["pure_test"])
        self.assertEqual(started.call_args[0][0][-4:],
                         ["lockstep", "lockstep_testing", "test_helpers", "pure_test"])

    def run_built(self, *words):
        return subprocess.run(
            [sys.executable, run.__file__, *words, "--build", self.build, "--folder", self.folder,
             "--built"], capture_output=True, text=True, check=False,
            env=os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"})

    def test_a_program_that_is_not_built_is_named_with_the_command_that_builds_it(self):
        own = self.folder / "tests/pure_test"
        case = {"name": "A.B", "properties": [],
                "command": [str(self.build / "tests/pure_test"), "--gtest_filter=A.B"]}
        listed = self.root / "tests.json"
        listed.write_text(json.dumps({"tests": [case]}))
        self.program(self.bin / "ctest", f"cat '{listed}'")
        results = self.folder / "results.jsonl"
        results.write_text("earlier\n")
        for kind, prefix in (("address", ""), ("thread", "setarch -R ")):
            told = self.run_built(kind)
            self.assertEqual((told.returncode, told.stderr), (1, (
                f"run.py: {own} is not built; leave out --built, or run: "
                f"ASAN_OPTIONS=detect_leaks=0 {prefix}ninja -C '{self.folder}' pure_test\n")))
            self.assertEqual(results.read_text(), "earlier\n")
        self.assertEqual(self.run_built("address", "--only", "another").returncode, 0)
        self.program(own, "echo '[  PASSED  ] 1 test.'")
        self.assertIn("1 tests in 1 programs; 0 programs failed", self.run_built("address").stdout)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
