"""External projects that use the installed package: builds the examples out of the tree, runs them
on several ranks, and compiles the installed headers together."""

import re
import unittest

from installed import InstalledProjects
from support import SOURCE, TORCHRUN, launch

HEADERS_PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(headers LANGUAGES CXX)
find_package(Lockstep REQUIRED)
add_library(headers OBJECT headers.cpp)
target_link_libraries(headers PRIVATE lockstep::lockstep)
"""


class Install(InstalledProjects):
    def test_custom_loop_learns_on_one_and_two_ranks(self):
        build = self.build(SOURCE / "examples/custom_loop", self.install())
        final = []
        for launcher in ([], [TORCHRUN, "--standalone", "--no-python", "--nproc-per-node", 2]):
            output = self.command(*launcher, build / "custom_loop")
            losses = [float(x) for x in re.findall(r"loss (\S+)", output)]
            self.assertEqual(len(losses), 7)
            self.assertGreater(losses[0], 1)
            self.assertLess(losses[-1], 0.05)
            final.append(losses[-1])
        self.assertNotEqual(final[0], final[1])  # two ranks saw twice as many samples

    def test_a_tensor_parallel_model_learns_the_same_on_every_layout(self):
        build = self.build(SOURCE / "examples/tensor_parallel_model", self.install())
        trained = []
        for ranks, tensor in ((1, 1), (2, 1), (2, 2), (4, 2)):
            output = self.on_ranks(ranks, build / "tensor_parallel_model", tensor)
            trained.append([float(x) for x in re.findall(r"loss (\S+)", output)])
        self.assertEqual(len(trained[0]), 7)
        self.assertGreater(trained[0][0], 3)
        self.assertLess(trained[0][-1], 0.1)
        for losses in trained[1:]:
            self.assertEqual(len(losses), 7)
            for one, other in zip(trained[0], losses):
                self.assertAlmostEqual(one, other, delta=1e-3)
        refused = launch(3, build / "tensor_parallel_model", 1)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("data-parallel ranks: allowed: 1, 2, 4, 8", refused.stderr.decode())

    def test_an_update_rule_of_ones_own_learns_alike_on_one_and_two_ranks(self):
        build = self.build(SOURCE / "examples/update_rule", self.install())
        runs = []
        for ranks in (1, 2):
            output = self.on_ranks(ranks, build / "update_rule")
            losses = [float(x) for x in re.findall(r"loss (\d\S*\d)", output)]
            self.assertEqual(len(losses), 7)
            self.assertGreater(losses[0], 1)
            self.assertLess(losses[-1], 0.1)
            runs.append((losses, int(re.search(r"(\d+) bytes of state", output)[1])))
        (one, whole), (two, half) = runs
        self.assertAlmostEqual(one[0], two[0], places=4)
        self.assertAlmostEqual(one[1], two[1], places=2)
        self.assertLess(half, 0.6 * whole)  # each rank keeps its shard

    def test_the_installed_program_has_both_of_its_parts(self):
        program = self.install() / "bin/lockstep"
        self.assertIn("pp                  0 1", self.command(
            program, "plan", "groups", "--world-size", 2, "--pipeline", 2))
        self.assertRegex(self.command(program, "--version"), r"lockstep \d")

    def test_public_headers_are_complete_and_do_not_leak(self):
        prefix = self.install()
        include = prefix / "include"
        headers = sorted(include.rglob("*.h"))
        self.assertGreater(len(headers), 30)
        for header in headers:
            for line in header.read_text().splitlines():
                self.assertNotRegex(line, r"#include .*(protobuf|\.pb\.h|fmt/|gloo|nlohmann|CLI/)",
                                    header)
                included = re.match(r'#include "(lockstep/[^"]+)"', line)
                if included:
                    self.assertTrue((include / included[1]).exists(), f"{header}: {line}")
        project = self.folder / "headers"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(HEADERS_PROJECT)
        (project / "headers.cpp").write_text(
            "".join(f'#include "{header.relative_to(include)}"\n' for header in headers))
        self.build(project, prefix)


if __name__ == "__main__":
    unittest.main()
