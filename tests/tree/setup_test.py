"""scripts/setup on machines that lack something: one sentence with what to do, and no change. Small
programs stand in for the real ones to simulate the machines."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]


class Setup(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        shutil.copytree(SOURCE / "scripts", self.root / "scripts")
        self.bin = self.root / "bin"
        self.bin.mkdir()

    def program(self, name, script, folder=None):
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + script + "\n")
        path.chmod(0o755)

    def setup(self, *parts, status=1, **extra):
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.root), **extra}
        result = subprocess.run([self.root / "scripts/setup", *parts], env=environment,
                                capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        if status != 0:
            sentences = [line for line in result.stderr.splitlines() if line.startswith("setup: ")]
            self.assertEqual(len(sentences), 1, result.stderr)
        return result.stdout + result.stderr

    def test_an_old_compiler(self):
        self.program("c++", 'case "$1" in --version) echo "c++ (Debian 10.2)";; *) echo 10;; esac')
        output = self.setup("compiler")
        self.assertIn("g++ 10, and Lockstep needs 12 or newer", output)

    def test_no_compiler(self):
        output = self.setup("compiler", CXX="no-such-compiler")
        self.assertIn("no C++ compiler 'no-such-compiler' was found; install one", output)

    def test_packages_are_missing_and_nobody_is_root(self):
        self.program("dpkg-query", 'case "$*" in *libcli11*) echo not-installed;; '
                                   "*) echo installed;; esac")
        self.program("id", "echo 1000")
        self.program("sudo", "exit 1")
        self.program("apt-get", "touch $HOME/called")
        output = self.setup("packages")
        self.assertIn("run: sudo apt-get install libcli11-dev", output)
        self.assertFalse((self.root / "called").exists())

    def test_packages_are_installed_through_sudo_where_it_asks_nothing(self):
        self.program("dpkg-query", 'case "$*" in *libcli11*) echo not-installed;; '
                                   "*) echo installed;; esac")
        self.program("id", "echo 1000")
        self.program("sudo", 'case "$1" in -n) exit 0;; esac; echo "$@" >> $HOME/called')
        self.setup("packages", status=0)
        self.assertIn("apt-get install -y --no-install-recommends libcli11-dev",
                      (self.root / "called").read_text())

    def test_nothing_is_missing(self):
        self.program("dpkg-query", "echo installed")
        self.program("apt-get", "touch $HOME/called")
        self.assertEqual(self.setup("packages", status=0), "")
        self.assertFalse((self.root / "called").exists())

    def test_no_registry(self):
        self.program("python", 'case "$*" in *--version*) exit 0;; *) exit 1;; esac',
                     self.root / ".venv/bin")
        output = self.setup("venv")
        self.assertIn("needs a Python package registry (set PIP_INDEX_URL", output)
        output = self.setup("text")
        self.assertIn("the training text could not be fetched", output)
        output = self.setup("gpt2")
        self.assertIn("GPT-2's vocabulary could not be fetched", output)

    def test_requirements_are_installed_once(self):
        self.program("python", 'echo "$@" >> $HOME/called', self.root / ".venv/bin")
        self.setup("venv", status=0)
        self.setup("venv", status=0)
        calls = (self.root / "called").read_text().splitlines()
        self.assertEqual(sum("install" in call for call in calls), 1)

    def test_a_damaged_text_is_not_used(self):
        self.program("python", 'cd "$HOME" && mkdir -p x/tests/testdata && '
                               "echo no > x/tests/testdata/alice29.txt && "
                               "echo no > x/tests/testdata/asyoulik.txt && "
                               'while [ "$1" != --dest ]; do shift; done; '
                               'tar -czf "$2/brotli.tar.gz" x', self.root / ".venv/bin")
        self.assertIn("is not what scripts/text.sha256 expects", self.setup("text"))

    def test_an_unknown_part(self):
        self.assertIn("unknown part 'everything'", self.setup("everything"))


if __name__ == "__main__":
    unittest.main()
