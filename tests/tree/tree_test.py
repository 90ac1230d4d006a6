"""The tree itself: which room includes which, files of a readable length, no setting that nothing
reads, no snippet in the README that is not compiled."""

import pathlib
import re
import subprocess
import sys
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]

# The arrows of the design: a room and what it may include.
ROOMS = {
    "core": set(),
    "kernels": {"core"},
    "parallel_state": {"core"},
    "distributed": {"core", "parallel_state"},
    "optimizer": {"core", "kernels", "parallel_state", "distributed"},
    "models": {"core", "kernels", "parallel_state"},
    "pipeline": {"core", "parallel_state"},
    "training": {"core", "kernels", "parallel_state", "distributed", "optimizer", "models",
                 "pipeline"},
}
# The rooms that may name c10d.
C10D_ROOMS = {"parallel_state"}


def sources(*suffixes):
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"],
                            cwd=SOURCE, capture_output=True, text=True, check=True).stdout
    return [pathlib.Path(name) for name in listed.split("\n")
            if name.endswith(suffixes) and (SOURCE / name).is_file()]


def text_of(path):
    return (SOURCE / path).read_text()


class Tree(unittest.TestCase):
    def test_rooms_include_only_what_the_design_allows(self):
        checked = 0
        for path in sources(".h", ".cpp", ".cu"):
            room = path.parts[0]
            if room not in ROOMS:
                continue
            for included in re.findall(r'#include "lockstep/(\w+)/', text_of(path)):
                checked += 1
                self.assertIn(included, ROOMS[room] | {room}, path)
            if room not in C10D_ROOMS:
                self.assertNotIn("distributed/c10d/", text_of(path), path)
        self.assertGreater(checked, 100)

    def test_pure_sources_do_not_include_libtorch(self):
        pure = 0
        for listing in sources("CMakeLists.txt"):
            match = re.search(r"PURE (.*?)\n\s*(?:SOURCES|HEADERS)", text_of(listing), re.S)
            for name in match[1].split() if match else []:
                if name.startswith('"'):
                    continue
                pure += 1
                self.assertNotRegex(text_of(listing.parent / name), r"#include <(torch|ATen|c10)/")
        self.assertGreater(pure, 15)

    def test_files_are_read_in_one_way(self):
        other_ways = r"\bifstream\b|(?<!cout\.)\brdbuf\b|\bfopen\b|(?<!\w)::p?read\("
        for path in sources(".h", ".cpp", ".cu"):
            if path.parts[0] not in ROOMS or "codegen" in path.parts or \
                    path.name == "input_file.cpp":
                continue
            for line in text_of(path).splitlines():
                if "/proc/" not in line:  # what the kernel tells of itself
                    self.assertNotRegex(line, other_ways, path)

    def test_files_have_a_readable_length(self):
        for path in sources(".h", ".cpp", ".cu", ".py"):
            self.assertLessEqual(len(text_of(path).splitlines()), 400, path)

    def test_every_mutant_still_has_its_place(self):
        sys.path.insert(0, str(SOURCE / "tests/mutants"))
        from mutants import MUTANTS, SURVIVORS
        names = [mutant.name for mutant in MUTANTS]
        self.assertEqual(len(set(names)), len(names))
        self.assertGreaterEqual(len(names), 24)
        self.assertLessEqual(set(SURVIVORS), set(names))
        tests = text_of("tests/CMakeLists.txt")
        for mutant in MUTANTS:
            text = text_of(mutant.source)
            self.assertEqual(text.count(mutant.old), 1, f"{mutant.name} in {mutant.source}")
            self.assertNotEqual(mutant.old, mutant.new, mutant.name)
            for test in mutant.tests:
                name = test.partition(":")[0]
                self.assertRegex(tests, rf"_test\({name}\b", f"{mutant.name}: {name}")

    def test_every_configuration_field_is_read(self):
        schema = text_of(pathlib.Path("core/config.proto"))
        fields = re.findall(r"^  (?:optional|repeated) \w+ (\w+) =", schema, re.M)
        self.assertGreater(len(fields), 60)
        code = "\n".join(text_of(p) for p in sources(".h", ".cpp", ".cu") if p.parts[0] in ROOMS)
        for field in fields:
            self.assertRegex(code, rf"[.>]{field}\b", f"nothing reads {field}")

    def test_the_readme_shows_code_that_is_compiled(self):
        snippets = []
        for path, mark in (("examples/custom_loop/main.cpp", "snippet"),
                           ("tests/optimizer/param_groups_test.cpp", "groups")):
            snippet = text_of(pathlib.Path(path)).split(f"  // [{mark}]\n")[1]
            snippets.append("\n".join(line.removeprefix("  ") for line in snippet.splitlines()))
        blocks = re.findall(r"```cpp\n(.*?)\n```", text_of(pathlib.Path("README.md")), re.S)
        self.assertEqual(blocks, snippets)

    def test_the_page_of_fronts_shows_the_loops_that_are_tested(self):
        loops = text_of(pathlib.Path("tests/distributed/front_loops_test.cpp"))
        page = text_of(pathlib.Path("docs/fronts.md"))
        sections = re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", page, re.S | re.M)
        self.assertEqual(len(sections), loops.count("  // [") // 2)
        for front, section in sections:
            snippet = loops.split(f"  // [{front}]\n")[1]
            snippet = "\n".join(line.removeprefix("  ") for line in snippet.splitlines())
            self.assertEqual(re.findall(r"```cpp\n(.*?)\n```", section, re.S), [snippet], front)

    def test_every_make_target_in_the_documents_exists(self):
        targets = set(re.findall(r"^([a-z-]+):", text_of(pathlib.Path("Makefile")), re.M))
        named = set()
        for path in ("README.md", "CONTRIBUTING.md"):
            named |= set(re.findall(r"(?:^|`)make ([a-z-]+)", text_of(pathlib.Path(path)),
                                    re.M))
        self.assertLessEqual(named, targets)
        self.assertGreater(len(named), 4)


if __name__ == "__main__":
    unittest.main()
