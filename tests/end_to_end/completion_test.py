"""The completions of bash and zsh, run by the shells themselves."""

import re
import shutil
import subprocess
import unittest

from support import LOCKSTEP, EndToEnd, run

# A dot ends the completions of each line.
BASH = """
source "$1"
compopt() { :; }
[ -z "$2" ] || COMP_WORDBREAKS=$2
for COMP_LINE in "${@:3}"; do
  COMP_POINT=${#COMP_LINE}
  _lockstep
  printf '%s\\n' "${COMPREPLY[@]}" .
done
"""
# compadd and its companions only work inside zsh's own completion.
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
    @classmethod
    def setUpClass(cls):
        cls.scripts = {shell: run(LOCKSTEP, "completion", shell) for shell in ("bash", "zsh")}

    def setUp(self):
        super().setUp()
        for shell, script in self.scripts.items():
            self.assertEqual(script.returncode, 0, script.stderr)
            (self.folder / shell).write_bytes(script.stdout)
        (self.folder / "some.textproto").touch()
        (self.folder / "other").touch()

    def bash_each(self, lines, breaks=""):
        """Returns bash's completions at the end of each of `lines`."""
        result = subprocess.run(["bash", "--norc", "-c", BASH, "bash", self.folder / "bash", breaks,
                                 *lines], capture_output=True, text=True, check=True,
                                cwd=self.folder)
        self.assertEqual(result.stderr, "")
        offers = [[]]
        for word in result.stdout.splitlines():
            if word == ".":
                offers.append([])
            else:
                offers[-1].append(word)
        return offers[:-1]

    def bash(self, line, breaks=""):
        offer, = self.bash_each([line], breaks)
        return offer

    def test_commands(self):
        inside = self.bash("lockstep ")
        for command in ("train", "plan", "checkpoint", "megatron-flags", "audit", "completion", "man"):
            self.assertIn(command, inside)
        self.assertEqual(self.bash("lockstep tr")[0], "train")
        self.assertEqual(set(self.bash("lockstep plan ")), {"groups", "buckets", "memory", "time", "best",
                                                            "schedule", "verify", "audit"})
        self.assertEqual(set(self.bash("lockstep checkpoint in")), {"inspect"})
        self.assertEqual(self.bash("lockstep nonsense "), [])

    def test_every_option_of_every_command_of_help(self):
        commands, inside, options = [()], {}, {}
        for command in commands:
            text = run(LOCKSTEP, *command, "--help").stdout.decode()
            part = re.search(r"^Subcommands:\n((?:  .*\n)+)", text, re.MULTILINE)
            names = re.findall(r"^  ([a-z-]+)", part[1], re.MULTILINE) if part else []
            commands += [(*command, name) for name in names]
            part = re.search(r"^Options:\n((?:  .*\n)+)", text, re.MULTILINE)[1]
            inside[command] = set(names)
            options[command] = set(re.findall(r"^  (?:-\w,)?(--[a-z-]+)", part, re.MULTILINE))
            self.assertIn("--help", options[command], command)
        lines = [" ".join(("lockstep", *command, "")) for command in commands]
        offers = self.bash_each([*lines, *(line + "--" for line in lines)])
        self.assertEqual(len(offers), 2 * len(commands))
        for command, words, flags in zip(commands, offers, offers[len(commands):]):
            self.assertEqual(inside[command] - set(words), set(), command)
            self.assertEqual(options[command], set(flags), command)
        self.assertGreater(sum(map(len, options.values())), 60)

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

    def configs(self):
        """Returns the names that `lockstep configs` lists."""
        names = [line.split()[0] for line in run(LOCKSTEP, "configs").stdout.decode().splitlines()]
        self.assertIn("tiny", names)
        return names

    def test_names_of_configurations(self):
        self.assertEqual(self.bash("lockstep configs --show "), self.configs())
        self.assertEqual(self.bash("lockstep configs --path moe"), ["moe_tiny"])

    def test_values_of_options_and_files(self):
        self.assertEqual(self.bash("lockstep plan schedule --schedule "),
                         ["1f1b", "gpipe", "zb-h1"])
        self.assertEqual(self.bash("lockstep plan schedule --svg "), [])  # bash offers all files
        files = ["small.textproto", "some.textproto"]
        self.assertEqual(self.bash("lockstep train "), [*self.configs(), *files])
        self.assertEqual(self.bash("lockstep train ti"), ["tiny"])
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
        self.assertEqual(zsh("lockstep train "), [*self.configs(), "FILES -g *.textproto"])
        self.assertEqual(zsh("lockstep plan schedule --schedule "), ["1f1b", "gpipe", "zb-h1"])
        self.assertEqual(zsh("lockstep train --output "), ["FILES "])


if __name__ == "__main__":
    unittest.main()
