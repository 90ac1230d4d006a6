"""lockstep::testing out of an installed package: a project of a user names each mistake of its model,
and the example with a test of its own."""

import re
import unittest

from installed import InstalledProjects
from support import LOCKSTEP, SOURCE, launch

SAVED_AT, STEPS = 30, 60  # of own_transformer


class TestingKit(InstalledProjects):
    def test_mistakes_of_users_are_named_from_a_project_of_their_own(self):
        source = SOURCE / "tests/testing/find_package"
        output = self.command(self.build(source, self.install()) / "mistakes")
        lines = [line.split(" | ") for line in output.splitlines() if " | " in line]
        self.assertGreaterEqual(len(lines), 15)
        for name, seconds, parameter, text in lines:
            with self.subTest(name):
                self.assertTrue(parameter)
                self.assertIn(parameter, text)
                self.assertLess(float(seconds), 10)
        self.assertGreaterEqual(len(re.findall(r": equal \(loss", output)), 12)

    def test_a_package_without_a_component_says_so(self):
        project = self.folder / "component"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(c LANGUAGES CXX)\n"
            "find_package(Lockstep REQUIRED COMPONENTS tests)\n")
        with self.assertRaisesRegex(AssertionError, "Lockstep has no component tests"):
            self.build(project, self.install())

    def test_a_transformer_of_ones_own(self):
        build = self.build(SOURCE / "examples/own_transformer", self.install())
        text = self.command(build / "model_test")
        for what in ("layouts", "gradients", "checkpoint", "communication"):
            self.assertIn(f"{what}: good", text)
        self.assertNotIn("BAD", text)
        program = build / "own_transformer"

        def losses(ranks, *arguments):
            output = self.on_ranks(ranks, program, *arguments)
            return [float(number) for number in re.findall(r"loss (\S+)", output)]

        expected = losses(1)
        self.assertEqual(len(expected), STEPS)
        self.assertGreater(expected[0], 3)
        self.assertLess(expected[-1], 0.5)
        saved = self.folder / "saved"
        runs = {(4, 2, 2, 1, "save", saved): expected, (2, 2, 1, 1): expected,
                (4, 2, 1, 2): expected, (4, 1, 1, 4): expected, (4, 1, 4, 1): expected,
                (1, 1, 1, 1, "load", saved): expected[SAVED_AT:],
                (4, 1, 2, 2, "load", saved): expected[SAVED_AT:]}
        for arguments, wanted in runs.items():
            with self.subTest(arguments):
                found = losses(*arguments)  # ranks, sizes, what to do
                self.assertEqual(len(found), len(wanted))
                for one, other in zip(found, wanted):
                    self.assertAlmostEqual(one, other, delta=1e-9)
        self.assertIn("all good", self.command(LOCKSTEP, "checkpoint", "verify", saved))
        self.assert_failed(launch(3, program, 1, 3, 1), 2, "PIPELINE: allowed: 1, 2, 4")


if __name__ == "__main__":
    unittest.main()
