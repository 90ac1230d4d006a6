"""The completions of bash and zsh, run by these shells."""

import re
import shutil
import subprocess
import unittest

from support import LOCKSTEP, EndToEnd, run

BASH = """
source "$1"
compopt() { :; }
COMP_LINE=$2 COMP_POINT=${#2}
[ -z "$3" ] || COMP_WORDBREAKS=$3
_lockstep
printf '%s\\n' "${COMPREPLY[@]}"
"""
# compadd and its companions work inside of zsh's own completion only.
ZSH = """
compdef() { : }
compset() { : }
_files() { print -r -- "FILES $*" }
compadd() {
  while [[ $1 == -* ]]; do [[ $1 == -- ]] && { shift; break }; [[ $1 == -S ]] && shift; shift; done
  print -rl -- "$@"
}
source "$1"
words=("${(@s: :)2}")
CURRENT=$#words
_lockstep
"""


class Completion(EndToEnd):
    def setUp(self):
        super().setUp()
        for shell in ("bash", "zsh"):
            script = run(LOCKSTEP, "completion", shell)
            self.assertEqual(script.returncode, 0, script.stderr)
            (self.folder / shell).write_bytes(script.stdout)
        (self.folder / "some.textproto").touch()
        (self.folder / "other").touch()

    def bash(self, line, breaks=""):
        """What bash offers at the end of `line`."""
        result = subprocess.run(["bash", "--norc", "-c", BASH, "bash", self.folder / "bash", line,
                                 breaks], capture_output=True, text=True, check=True,
                                cwd=self.folder)
        self.assertEqual(result.stderr, "")
        return [word for word in result.stdout.split("\n") if word]

    def test_commands(self):
        inside = self.bash("lockstep ")
        for command in ("train", "plan", "checkpoint", "megatron-flags", "completion", "man"):
            self.assertIn(command, inside)
        self.assertEqual(self.bash("lockstep tr")[0], "train")
        self.assertEqual(set(self.bash("lockstep plan ")), {"groups", "buckets", "memory",
                                                            "schedule"})
        self.assertEqual(set(self.bash("lockstep checkpoint in")), {"inspect"})
        self.assertEqual(self.bash("lockstep nonsense "), [])

    def commands_of_help(self, *command):
        text = run(LOCKSTEP, *command, "--help").stdout.decode()
        part = re.search(r"^Subcommands:\n((?:  .*\n)+)", text, re.MULTILINE)
        return re.findall(r"^  ([a-z-]+)", part[1], re.MULTILINE) if part else []

    def test_every_option_of_every_command_of_help(self):
        todo, seen = [()], 0
        while todo:
            command = todo.pop()
            inside = self.commands_of_help(*command)
            todo += [(*command, name) for name in inside]
            line = " ".join(("lockstep", *command, ""))
            self.assertEqual(set(inside) - set(self.bash(line)), set(), command)
            text = run(LOCKSTEP, *command, "--help").stdout.decode()
            text = re.search(r"^Options:\n((?:  .*\n)+)", text, re.MULTILINE)[1]
            options = set(re.findall(r"^  (?:-\w,)?(--[a-z-]+)", text, re.MULTILINE))
            self.assertIn("--help", options, command)
            self.assertEqual(options, set(self.bash(line + "--")), command)
            seen += len(options)
        self.assertGreater(seen, 60)

    def test_paths_and_values_of_set(self):
        self.assertEqual(self.bash("lockstep train --set model.num_l"), ["model.num_layers="])
        self.assertGreater(len(self.bash("lockstep train --set ")), 100)
        for breaks, front in (("", ""), (" \t\n", "train.precision=")):
            self.assertEqual(self.bash("lockstep train x --set train.precision=", breaks),
                             [front + word for word in ("fp32", "fp64", "bf16", "fp16")])
        self.assertEqual(self.bash("lockstep train --set=train.precision=b"), ["bf16"])
        self.assertEqual(self.bash("lockstep train --set ddp.overlap_grad_reduce=t"), ["true"])
        self.assertEqual(self.bash("lockstep train --set model.num_layers="), [])
        self.assertEqual(self.bash("lockstep train --set a=b --set data.sp"), ["data.split="])

    def test_values_of_options_and_files(self):
        self.assertEqual(self.bash("lockstep plan schedule --schedule "),
                         ["1f1b", "gpipe", "zb-h1"])
        self.assertEqual(self.bash("lockstep plan schedule --svg "), [])  # bash's own: all files
        self.assertEqual(self.bash("lockstep train "), ["small.textproto", "some.textproto"])
        self.assertEqual(self.bash("lockstep plan memory o"), [])
        (self.folder / "folder with a space").mkdir()
        self.assertEqual(self.bash("lockstep train fol"), ["folder with a space"])

    def test_output(self):
        target = self.folder / "completions"
        result = run(LOCKSTEP, "completion", "bash", "--output", target)
        self.assertEqual((result.returncode, result.stdout), (0, b""))
        self.assertEqual(target.read_bytes(), (self.folder / "bash").read_bytes())
        self.assert_failed(run(LOCKSTEP, "completion", "fish"), 2, "found 'fish', allowed: bash, zsh")

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_zsh(self):
        def zsh(line):
            result = subprocess.run(["zsh", "-f", "-c", ZSH, "zsh", self.folder / "zsh", line],
                                    capture_output=True, text=True, check=True, cwd=self.folder)
            self.assertEqual(result.stderr, "")
            return result.stdout.split("\n")[:-1]
        for line in ("lockstep ", "lockstep plan ", "lockstep train --", "lockstep plan groups --"):
            self.assertEqual(zsh(line), self.bash(line), line)
        self.assertIn("model.num_layers", zsh("lockstep train --set model.num"))
        self.assertEqual(zsh("lockstep train --set train.precision="),
                         ["fp32", "fp64", "bf16", "fp16"])
        self.assertEqual(zsh("lockstep train "), ["FILES -g *.textproto"])
        self.assertEqual(zsh("lockstep plan schedule --schedule "), ["1f1b", "gpipe", "zb-h1"])
        self.assertEqual(zsh("lockstep train --output "), ["FILES "])


if __name__ == "__main__":
    unittest.main()
