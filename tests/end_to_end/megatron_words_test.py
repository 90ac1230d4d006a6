"""docs/coming-from-megatron.md gives our fields and defaults for Megatron-LM's flags. It lists
every field that has Megatron Core's name and another default, with both defaults.

Tests that need Megatron Core are skipped if it is not installed (scripts/setup megatron)."""

import json
import pathlib
import re
import subprocess
import sys
import unittest

from support import BUILD, clean_environment, megatron_python, run

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/coming-from-megatron.md"

FIELD = r"`((?:model|parallel|ddp|optimizer|data|train|checkpoint)\.\w+)`"

THEIR_DEFAULTS = """
import dataclasses, json, torch
torch.cuda.current_device = lambda: torch.device("cpu")
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
print(json.dumps({field.name: str(field.default)
                  for kind in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
                  for field in dataclasses.fields(kind)
                  if field.default is not dataclasses.MISSING}))
"""


def table(heading):
    """Returns the rows of the first table after `heading`, without its two header lines."""
    text = PAGE.read_text().split(heading, 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def flags():
    """Returns the rows of all tables of flags: flags, default, our equivalent, our default."""
    text = PAGE.read_text().split("## Flags", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`--.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in row.split(" |")] for row in rows]


def our_values():
    """Returns the value of each field by its path, in a configuration that only sets the CPU."""
    values, group = {}, ""
    printed = run(BUILD / "lockstep", "train", "/dev/null", "--set", "train.device=cpu",
                  "--print-config").stdout.decode()
    for line in printed.splitlines():
        if line.endswith(" {"):
            group = line[:-2]
        elif match := re.match(r"  (\w+): (.*)", line):
            values[f"{group}.{match[1]}"] = match[2].strip('"')
    return values


def program_says():
    """Returns what the program's own table has for a flag: a field, "not there" or "not needed"."""
    printed = run(BUILD / "lockstep", "megatron-flags", "--list").stdout.decode()
    listed = dict(re.findall(r"^\| `(--\S+)` \| (.*?) \|", printed, re.MULTILINE))
    families = {name[:-1]: here for name, here in listed.items() if name.endswith("*")}

    def says(flag):
        found = [here for family, here in families.items() if flag.startswith(family)]
        return listed.get(flag) or found[-1]
    return says


def fields_with_a_default():
    help_text = run(BUILD / "lockstep", "train", "--help").stdout.decode()
    blocks = re.findall(r"^  (\w+\.\w+)\n    (\((?:.|\n)*?\)\n)", help_text, re.MULTILINE)
    return {path for path, facts in blocks if ", default " in " ".join(facts.split())}


def same(ours, theirs):
    words = {"True": "true", "False": "false", "torch.float32": "fp32"}
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return ours == words.get(theirs, theirs)


class MegatronWords(unittest.TestCase):
    @unittest.skipUnless(megatron_python(), "megatron-core is not installed")
    def test_every_other_default_is_listed(self):
        ran = subprocess.run([megatron_python(), "-W", "ignore", "-c", THEIR_DEFAULTS],
                             capture_output=True, timeout=300, env=clean_environment(), check=True)
        theirs = json.loads(ran.stdout)
        values, with_default = our_values(), fields_with_a_default()
        self.assertGreater(len(values), 100)
        self.assertGreater(len(with_default), 80)
        expected, compared = [], 0
        for path, ours in values.items():
            name = path.split(".")[1]
            if name not in theirs or (path not in with_default and theirs[name] == "None"):
                continue
            compared += 1
            if not same(ours, theirs[name]):
                expected.append([f"`{path}`", ours, theirs[name]])
        self.assertGreater(compared, 50)
        self.assertEqual(sorted(table("## Same name, other default")), sorted(expected))

    def test_our_defaults_are_as_listed(self):
        values = our_values()
        for path, ours, _ in table("## Same name, other default"):
            self.assertEqual(values[path.strip("`")], ours, path)

    def test_each_flag_has_our_field_and_default_or_says_that_there_is_none(self):
        values, seen = our_values(), set()
        for names, theirs, here, ours in flags():
            seen |= set(re.findall(r"`--([^`]+)`", names))
            self.assertNotEqual(theirs, "", names)
            field = re.match(FIELD, here)
            if not field:
                self.assertRegex(here, r"^(not there|not needed|always on)(:|$)", names)
            elif not ours.startswith("unset"):
                self.assertTrue(same(values[field[1]], ours.split(" on ")[0]), (names, ours))
        self.assertGreater(len(seen), 100)

    def test_the_program_has_the_same_flags_without_counterpart(self):
        says, compared = program_says(), 0
        for names, _, here, _ in flags():
            match = re.match("not there|not needed", here)
            for name in re.findall(r"`(--[^`]+)`", names) if match else ():
                compared += 1
                self.assertEqual(says(name), match[0], name)
        self.assertGreater(compared, 20)

    def test_fields_that_are_named_exist(self):
        help_text = run(BUILD / "lockstep", "train", "--help").stdout.decode()
        paths = set(re.findall(r"^  (\w+\.\w+)$", help_text, re.MULTILINE))
        cells = [row[0] for heading in ("## Same name, other meaning", "## Other name, same meaning")
                 for row in table(heading)] + [row[2] for row in flags()]
        for cell in cells:
            for path in re.findall(FIELD, cell):
                self.assertIn(path, paths)


if __name__ == "__main__":
    sys.exit(unittest.main())
