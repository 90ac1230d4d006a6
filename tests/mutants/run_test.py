"""run.py with small programs in place of a build's tests: which of them kills a mutant."""

import functools
import pathlib
import sys
import tempfile
import types
import unittest

import run
from mutants import Mutant

FAILS = "echo '[ RUN      ] Suite.Case'; echo '[  FAILED  ] Suite.Case'; exit 1"
FAILS_WITH_MUTANT = 'case "$LD_LIBRARY_PATH" in *a-mutant*) ' + FAILS + ";; esac"


class Killer(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        (self.root / "tests").mkdir()

    def killer(self, named, **programs):
        """Returns what kills a mutant that names the program `named`."""
        for name, script in programs.items():
            path = self.root / "tests" / name
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        build = types.SimpleNamespace(folder=self.root, test_programs=sorted(programs),
                                      link_command=lambda target: "")
        mutant = Mutant("a-mutant", "kind", "core/source.cpp", "old", "new", [named])
        return run.Seeded(mutant, build, self.root).killer()

    def test_the_first_program_that_fails_kills(self):
        killer = functools.partial(self.killer, b_test=FAILS_WITH_MUTANT)
        self.assertEqual(killer("a_test", a_test=FAILS_WITH_MUTANT), "a_test: Suite.Case")
        self.assertEqual(killer("a_test", a_test="exit 0"), "b_test: Suite.Case")
        self.assertIsNone(self.killer("a_test", a_test="exit 0", b_test="exit 0"))

    def test_a_program_that_fails_without_the_mutant_kills_nothing(self):
        with self.assertRaises(SystemExit) as end:
            self.killer("a_test", a_test="exit 0", b_test=FAILS)
        self.assertEqual(end.exception.code, "without a mutant fails: b_test: Suite.Case")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
