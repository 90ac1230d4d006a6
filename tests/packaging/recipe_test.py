"""docker/run_in_chroot: what it accepts in a Dockerfile, and what it refuses. And that the README's
command fits the Dockerfile."""

import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]


def load(name, path):
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


recipe = load("run_in_chroot", SOURCE / "docker/run_in_chroot")


class Recorded(recipe.Image):
    """Records the commands instead of running them."""

    def __init__(self, root, copied):
        super().__init__(root, copied)
        self.ran = []

    def run(self, command, user=None, folder=None):
        self.ran.append((user or self.user, folder or self.folder, command))

    def do_from(self, arguments):
        pass


class Recipe(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)

    def apply(self, text, copied=None):
        image = Recorded(self.root / "root", copied or {})
        for word, arguments in recipe.last_stage(text):
            image.apply(word, arguments)
        return image

    def test_the_recipe_of_this_tree(self):
        dist = self.root / "dist"
        dist.mkdir()
        (dist / "lockstep.whl").write_text("wheel")
        image = self.apply((SOURCE / "docker/Dockerfile").read_text(), {"build:/src/dist": dist})
        commands = [" ".join(command) for _, _, command in image.ran]
        self.assertEqual(len(commands), 3)
        self.assertIn("python3-venv", commands[0])
        self.assertIn("pip install --no-cache-dir /tmp/dist/lockstep-*.whl", commands[1])
        self.assertEqual((self.root / "root/tmp/dist/lockstep.whl").read_text(), "wheel")
        for compiler in ("g++", "gcc", "clang", "build-essential", "make"):
            self.assertNotRegex(commands[0], rf"\s{compiler.replace('+', '[+]')}\b")
        self.assertEqual((image.user, image.folder), ("lockstep", "/home/lockstep"))
        self.assertEqual((image.entry, image.command), (["lockstep"], ["--help"]))
        self.assertTrue(image.environment["PATH"].startswith("/opt/lockstep/bin:"))

    def test_the_command_of_the_readme_keeps_the_run_in_the_callers_folder(self):
        page = (SOURCE / "docker/README.md").read_text()
        shown = re.search(r"^docker run (?:.*\\\n)*.*", page, re.M)[0]
        words = shlex.split(shown.replace("\\\n", ""))
        options, command = words[:words.index("lockstep")], words[words.index("lockstep") + 1:]
        image = self.apply(re.sub(r"^COPY .*", "", (SOURCE / "docker/Dockerfile").read_text(),
                                  flags=re.M))
        self.assertEqual(image.entry + command[:1], ["lockstep", "train"])
        self.assertEqual(options[options.index("-v") + 1], f"$PWD:{image.folder}")
        self.assertEqual(options[options.index("--user") + 1], "$(id -u):$(id -g)")
        self.assertFalse(pathlib.Path(command[command.index("--output") + 1]).is_absolute())

    def test_the_last_stage_counts_and_continued_lines_are_one(self):
        image = self.apply("FROM debian:bookworm-slim AS build\nRUN first\n# a comment\n"
                           "FROM debian:bookworm-slim\nRUN one \\\n  && two\nUSER some\nRUN three\n"
                           "ENV A=1 B='2 3'\nCMD " + json.dumps(["x", "y z"]) + "\n")
        self.assertEqual([(user, command[-1].split()) for user, _, command in image.ran],
                         [("root", ["one", "&&", "two"]), ("some", ["three"])])
        self.assertEqual((image.environment["A"], image.environment["B"]), ("1", "2 3"))
        self.assertEqual(image.command, ["x", "y z"])

    def test_what_it_does_not_know_is_refused(self):
        for text, part in (
                ("FROM debian:bookworm-slim\nVOLUME /data\n", "instruction VOLUME is not one of: CMD"),
                ("FROM debian:bookworm-slim\nCOPY --from=build /a /b\n", "give --from build:/a=FOLDER"),
                ("FROM debian:bookworm-slim\nCOPY a b\n", "COPY a b"),
                ("RUN x\n", "no FROM"), ("", "no FROM")):
            with self.subTest(text), self.assertRaisesRegex(recipe.Unusable, part):
                self.apply(text)
        with self.assertRaisesRegex(recipe.Unusable, "FROM ubuntu:24.04: found another image"):
            recipe.Image(self.root, {}).apply("FROM", "ubuntu:24.04")

    def run_in_chroot(self, **programs):
        """Runs the program with only these shell scripts in PATH."""
        path = self.root / "path"
        path.mkdir()
        for name, script in programs.items():
            (path / name).write_text("#!/bin/sh\n" + script)
            (path / name).chmod(0o755)
        return subprocess.run(
            [sys.executable, SOURCE / "docker/run_in_chroot", self.root / "root"],
            env={"PATH": str(path)}, capture_output=True, text=True, check=False)

    def test_a_machine_that_cannot_make_a_root_folder_has_a_status_of_its_own(self):
        result = self.run_in_chroot()
        self.assertEqual(result.returncode, 77, result.stderr)
        self.assertRegex(result.stderr, "^run_in_chroot: not on this machine: (needs root|"
                         "debootstrap is not installed)\n$")

    @unittest.skipUnless(os.geteuid() == 0, "a chroot needs root")
    def test_what_is_not_permitted_has_that_status_too(self):
        own_mounts = 'shift; case $1 in *chroot) exit 0 ;; esac; exec "$@"'
        for scripts, told in (
                ({"unshare": "echo 'unshare: Operation not permitted' >&2; exit 1"},
                 "unshare failed with status 1: unshare: Operation not permitted"),
                ({"unshare": own_mounts}, "debootstrap failed with status 3: E: no mirror")):
            with self.subTest(told):
                result = self.run_in_chroot(**scripts, debootstrap="echo 'E: no mirror'; exit 3")
                self.assertEqual(result.returncode, 77, result.stderr)
                self.assertIn(f"not on this machine: {told}\n", result.stderr)
            shutil.rmtree(self.root / "path")


if __name__ == "__main__":
    unittest.main()
