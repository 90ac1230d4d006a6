"""A few cases of the matrix of faults, always the same ones. `make faults` runs all of them."""

import os
import pathlib
import shlex
import sys
import unittest
from unittest import mock

import run


class Sample(unittest.TestCase):
    def test_a_few_cases_of_each_kind(self):
        # Everything takes longer next to other tests.
        self.assertEqual(run.main(["--sample", "--seed", "1", "--jobs", "2", "--patience", "4"]), 0)

    def test_what_cannot_be_meant_is_refused(self):
        for words in (["--only", "no such cell"], ["--only", "SIGKILL", "--case", "-1"],
                      ["--case", "3"]):
            with self.assertRaises(SystemExit):
                run.main(words)

    def test_the_command_that_repeats_a_case_means_that_case(self):
        cell = next(cell for cell in run.CELLS if cell.name == "SIGKILL at a call/save")
        outcome = {"cell": cell.name, "case": 3, "seed": 7}
        for given, build in (([], None), (["--sample"], "a build"),
                             (["--patience", "4"], "/a/build"),
                             (["--sample", "--patience", "0.5"], "build")):
            environment = {} if build is None else {"LOCKSTEP_BUILD": build}
            first = run.read_arguments(["--seed", "7", *given])
            with self.subTest(given), mock.patch.dict(os.environ, environment):
                if build is None:
                    os.environ.pop("LOCKSTEP_BUILD", None)
                words = shlex.split(run.repeat_command(outcome, first))
                if build is not None:
                    self.assertEqual(words.pop(0), f"LOCKSTEP_BUILD={pathlib.Path.cwd() / build}")
                self.assertEqual(words[0], "tests/faults/run.py")
                again = run.read_arguments(words[1:])
                self.assertEqual(run.cases_of(None, again), [(cell, 3)])
                self.assertEqual((again.seed, again.sample, again.patience),
                                 (7, first.sample, first.patience))


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
