"""lockstep::testing from an installed package: a user's project finds each mistake of its model."""

import re
import unittest

from installed import InstalledProjects
from support import SOURCE


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


if __name__ == "__main__":
    unittest.main()
