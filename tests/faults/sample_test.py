"""A few cases of the matrix of faults, always the same ones. `make faults` runs all of them."""

import sys
import unittest

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


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
