"""examples/own_transformer: its own test, and its output on every layout."""

import re
import unittest

from installed import InstalledProjects, losses_of
from support import SOURCE, launch

SAVED_AT, STEPS = 30, 60
LAYOUTS = 20  # that model_test compares with a single process


class OwnTransformer(InstalledProjects):
    def test_a_model_that_was_never_seen_and_its_own_test(self):
        build = self.build(SOURCE / "examples/own_transformer", self.install())
        tested = self.command(build / "model_test")
        equal = re.findall(r"^\d+ ranks, .*: equal \(loss", tested, re.M)
        self.assertEqual(len(equal), LAYOUTS, tested)
        program, folder = build / "own_transformer", self.folder / "saved on four"

        def losses(ranks, *arguments):
            return losses_of(self.on_ranks(ranks, program, *arguments))

        expected = losses(1)
        self.assertEqual(len(expected), STEPS)
        self.assertGreater(expected[0], 3)
        self.assertLess(expected[-1], 1)
        for ranks, *layout in ((2, 1, 2, 1), (4, 2, 1, 2)):
            with self.subTest(layout):
                self.assert_same(losses(ranks, *layout), expected)
        self.assert_same(losses(4, 2, 2, 1, "save", folder), expected)
        for ranks, *layout in ((1, 1, 1, 1), (4, 1, 1, 4)):
            with self.subTest(layout):
                self.assert_same(losses(ranks, *layout, "load", folder), expected[SAVED_AT:])
        self.assert_failed(launch(3, program, 1, 3, 1), 2, "own_transformer: ",
                           "PIPELINE: allowed: 1, 2, 4")
        self.assert_failed(launch(3, program, 1, 1, 1), 2, "data-parallel ranks: allowed: 1, 2, 4")


if __name__ == "__main__":
    unittest.main()
