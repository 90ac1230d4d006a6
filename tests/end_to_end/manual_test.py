"""The manual says the same as --help, in troff that groff accepts without a warning."""

import re
import shutil
import subprocess
import unittest

from support import BUILD, LOCKSTEP, EndToEnd, run

GROFF = shutil.which("groff")


def words_of(text):
    """Returns the words of a page, regardless of line breaks and of the kind of hyphen."""
    return " ".join(text.replace("\u2010", "-").replace("\u2212", "-").split())


class Manual(EndToEnd):
    def setUp(self):
        super().setUp()
        self.pages = self.folder / "man pages"
        result = run(LOCKSTEP, "man", "--output", self.pages)
        self.assertEqual((result.returncode, result.stdout), (0, b""), result.stderr)

    def test_there_is_a_page_for_every_command(self):
        names = {path.name for path in self.pages.iterdir()}
        for name in ("lockstep", "lockstep-train", "lockstep-plan", "lockstep-plan-groups",
                     "lockstep-checkpoint-export", "lockstep-megatron-flags", "lockstep-man"):
            self.assertIn(f"{name}.1", names)
        for path in self.pages.iterdir():
            command = path.stem.removeprefix("lockstep").strip("-")
            if "-" not in command and command:
                printed = run(LOCKSTEP, "man", command)
                self.assertEqual(printed.stdout, path.read_bytes())
        self.assertEqual(run(LOCKSTEP, "man", "plan", "groups").stdout,
                         (self.pages / "lockstep-plan-groups.1").read_bytes())
        self.assert_failed(run(LOCKSTEP, "man", "tarin"), 2, "there is no page 'lockstep-tarin'; "
                           "did you mean 'lockstep-train'?")
        self.assert_failed(run(LOCKSTEP, "man", "train", "--output", self.pages), 2, "--output")

    @unittest.skipUnless(GROFF, "groff is not installed")
    def test_groff_warns_of_nothing(self):
        for path in sorted(self.pages.iterdir()):
            result = subprocess.run([GROFF, "-ww", "-man", "-Tutf8", "-z", path],
                                    capture_output=True, text=True, check=False)
            self.assertEqual((result.returncode, result.stderr), (0, ""), path.name)

    @unittest.skipUnless(shutil.which("mandoc"), "mandoc is not installed")
    def test_mandoc_finds_no_error(self):
        for path in sorted(self.pages.iterdir()):
            result = subprocess.run(["mandoc", "-Tlint", "-Werror", path], capture_output=True,
                                    text=True, check=False)
            self.assertEqual((result.returncode, result.stdout), (0, ""), path.name)

    def rendered(self, name):
        result = subprocess.run([GROFF, "-man", "-Tascii", "-P-c", "-rLL=10000n", "-rHY=0",
                                 self.pages / f"{name}.1"], capture_output=True, check=True)
        return words_of(re.sub(r".\x08", "", result.stdout.decode("ascii")))

    @unittest.skipUnless(GROFF, "groff is not installed")
    def test_a_page_has_every_word_of_help(self):
        for command in ("train", "plan schedule", "data build", "generate", "completion"):
            page = self.rendered("lockstep-" + command.replace(" ", "-"))
            text = run(LOCKSTEP, *command.split(), "--help").stdout.decode()
            found = 0
            for part in re.findall(r"^(?:Positionals|Options):\n((?:  .*\n)+)", text, re.MULTILINE):
                for option in re.findall(r"^  (--[a-z-]+)", part, re.MULTILINE):
                    self.assertIn(option, page, command)
                for line in part.splitlines():
                    found += bool(line[30:])
                    self.assertIn(words_of(line[30:]), page, command)
            self.assertGreater(found, 2, command)
        train = self.rendered("lockstep-train")
        fields = re.findall(r"^  (\w+\.\w+)$", run(LOCKSTEP, "train", "--help").stdout.decode(),
                            re.MULTILINE)
        self.assertGreater(len(fields), 100)
        for field in fields:
            self.assertIn(field, train)
        self.assertIn("in tokens", train)
        self.assertIn("\\n", train)
        self.assertIn("4 stopped because the training diverged", self.rendered("lockstep"))

    def test_manual_and_completions_are_installed(self):
        if "LOCKSTEP_SANITIZE:STRING=\n" not in (BUILD / "CMakeCache.txt").read_text():
            self.skipTest("a build with a sanitizer does not write them")
        prefix = self.folder / "prefix"
        installed = run("cmake", "--install", BUILD, "--prefix", prefix)
        self.assertEqual(installed.returncode, 0, installed.stderr.decode())
        pages = {path.name: path.read_bytes() for path in (prefix / "share/man/man1").iterdir()}
        self.assertEqual(pages, {path.name: path.read_bytes() for path in self.pages.iterdir()})
        for shell, path in (("bash", "bash-completion/completions/lockstep"),
                            ("zsh", "zsh/site-functions/_lockstep")):
            self.assertEqual((prefix / "share" / path).read_bytes(),
                             run(LOCKSTEP, "completion", shell).stdout)


if __name__ == "__main__":
    unittest.main()
