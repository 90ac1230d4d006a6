"""A source archive, which has no .git: its files are the same, and the tree's own test passes."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
# Leftovers of builds and runs. None of them belongs to the tree.
LEFT_BEHIND = ("build/a.cpp", "build-lint/core/b.h", ".venv/lib/c.py", "data/d.py", "runs/tiny/e.py",
               "tests/__pycache__/f.py", "core/base/__pycache__/g.h", "compile_commands.json",
               "timeline.svg")


def sources(folder, *patterns):
    listed = subprocess.run([folder / "scripts/sources", *patterns], cwd="/", capture_output=True,
                            text=True, check=True)
    return listed.stdout.splitlines()


class Archive(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="an archive ")
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name) / "lockstep-0.1.0"
        self.files = sources(SOURCE)
        for name in self.files:
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(SOURCE / name, target)

    def test_the_files_of_an_archive_are_those_of_the_clone(self):
        self.assertGreater(len(self.files), 500)
        for name in LEFT_BEHIND:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        self.assertEqual(sources(self.root), self.files)

    def test_patterns_choose_alike(self):
        for patterns in (("*.cpp",), ("*.h", "*.cu"), ("core/*.cpp",), ("README.md",), ("*.none",)):
            self.assertEqual(sources(self.root, *patterns), sources(SOURCE, *patterns), patterns)
        self.assertIn("core/config/config_io.cpp", sources(self.root, "core/*.cpp"))
        self.assertEqual(sources(self.root, "README.md"), ["README.md"])

    def test_an_archive_inside_another_clone(self):
        subprocess.run(["git", "init", "-q", self.root.parent], check=True)
        self.assertEqual(sources(self.root), self.files)

    def test_the_tree_test_passes(self):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        result = subprocess.run([sys.executable, "tests/tree/tree_test.py"], cwd=self.root,
                                capture_output=True, text=True, check=False, env=environment)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


if __name__ == "__main__":
    unittest.main()
