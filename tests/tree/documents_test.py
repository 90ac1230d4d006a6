"""The documents: links and anchors exist, code is compiled, commands have bash's syntax and are run
or say why not, quoted messages exist, and the README is short."""

import pathlib
import re
import subprocess
import sys
import textwrap
import unittest
from xml.etree import ElementTree

from tree_test import SOURCE, sources, text_of

sys.path.insert(0, str(SOURCE / ".ci"))
from documents import REASONS, blocks_of, commands, pages  # noqa: E402

LANGUAGES = {"cmake", "cpp", "json", "sh", "text", "textproto", "yaml"}
README = pathlib.Path("README.md")
TUTORIALS = pathlib.Path("docs/tutorials")


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors_of(path):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    anchors = set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_blocks(text_of(path)), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number, unique = 0, anchor
        while unique in anchors:
            number += 1
            unique = f"{anchor}-{number}"
        anchors.add(unique)
    return anchors


def links_of(path):
    """Returns the targets of links and pictures outside code."""
    text = re.sub(r"`[^`\n]*`", "", without_blocks(text_of(path)))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def literals():
    """Yields the text of each program and script, with adjacent string literals joined."""
    names = [path for path in sources(".h", ".cpp") if path.parts[0] not in ("tests", "benchmarks")]
    names += [pathlib.Path("scripts/setup"), pathlib.Path("scripts/launch")]
    for path in names:
        yield re.sub(r'"[ \\]*\n\s*"', "", text_of(path)).replace('\\"', '"')


def is_excerpt(text, program):
    """Returns whether `text` is lines of `program`, at any indentation; the latter begins with an
    empty line."""
    return any("\n" + textwrap.indent(text, " " * depth) + "\n" in program
               for depth in range(0, 12, 2))


class Documents(unittest.TestCase):
    def test_links_and_anchors_lead_somewhere(self):
        checked = 0
        for path in sources(".md"):
            for link in links_of(path):
                if re.match(r"(https?|mailto):", link):
                    continue
                checked += 1
                name, _, anchor = link.partition("#")
                target = (path.parent / name) if name else path
                self.assertTrue((SOURCE / target).exists(), f"{path}: {link}")
                if anchor:
                    self.assertIn(anchor, anchors_of(target), f"{path}: {link}")
        self.assertGreater(checked, 120)

    def test_pictures_are_well_formed_and_shown(self):
        shown = {(SOURCE / path.parent / link).resolve() for path in sources(".md")
                 for link in links_of(path)}
        pictures = sources(".svg")
        self.assertGreater(len(pictures), 0)
        for path in pictures:
            self.assertIn("viewBox", ElementTree.parse(SOURCE / path).getroot().attrib, path)
            self.assertIn((SOURCE / path).resolve(), shown)

    def test_every_page_is_in_the_index_and_can_be_reached_from_the_readme(self):
        index = set(links_of(pathlib.Path("docs/README.md")))
        linked = {link.partition("#")[0] for link in links_of(README)}
        for page in pages():
            if page.parent.name == "docs" and page.name != "README.md":
                self.assertIn(page.name, index)
                self.assertIn(f"docs/{page.name}", linked)

        self.assertIn("tutorials/README.md", index)
        self.assertIn(f"{TUTORIALS}/README.md", linked)
        tutorials = set(links_of(TUTORIALS / "README.md"))
        self.assertLessEqual({path.name for path in (SOURCE / TUTORIALS).glob("*.md")},
                             tutorials | {"README.md"})

    def test_the_readme_is_short(self):
        self.assertLessEqual(len(text_of(README).splitlines()), 150)

    def test_pages_begin_with_a_heading(self):
        for path in sources(".md"):
            first = (SOURCE / path).read_text().split("\n", 1)[0]
            self.assertRegex(first, r"^(# \S|<)", f"{path}: {first}")

    def test_lines_of_text_have_at_most_100_columns(self):
        for page in [*pages(), SOURCE / "CONTRIBUTING.md", SOURCE / "CHANGELOG.md"]:
            path = page.relative_to(SOURCE)
            for line in without_blocks(text_of(path)).splitlines():
                if not line.startswith("|"):
                    self.assertLessEqual(len(line), 100, f"{path}: {line}")

    def test_no_place_is_left_for_what_was_to_be_written(self):
        left = re.compile(r"\b(MEASURED\w*|TODO|FIXME|TBD)\b")
        self.assertEqual([f"{page}: {word}" for page in pages() for word in left.findall(text_of(page))],
                         [])

    def test_every_block_names_its_language(self):
        for path in sources(".md"):
            for block in blocks_of(SOURCE / path):
                self.assertIn(block.language, LANGUAGES, block)

    def test_commands_are_run_by_ci_or_say_why_not(self):
        run = 0
        for block in commands():
            if block.reason:
                self.assertIn(block.reason, REASONS, block)
            run += not block.reason
            checked = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True,
                                     text=True, check=False)
            self.assertEqual(checked.stderr, "", block)
        self.assertGreater(run, 5)
        self.assertEqual({block.reason for block in commands()} - {""}, REASONS)
        self.assertIn(".ci/documents.py", text_of(pathlib.Path(".ci/run")))

    def test_commands_name_the_tools_of_the_venv(self):
        tools = re.compile(r"^ *(?:\w+=\S* +)*(cmake|ctest|ninja|torchrun)\b", re.M)
        self.assertTrue(tools.search("A=1 cmake --build b"))
        self.assertIsNone(tools.search(".venv/bin/cmake --build b"))
        for block in commands():
            if block.reason != "needs several hosts":
                before = block.text.split('export PATH="$PWD/.venv/bin:$PATH"')[0]
                self.assertIsNone(tools.search(before), block)

    def test_quoted_messages_exist(self):
        page = text_of(pathlib.Path("docs/errors.md"))
        messages = re.findall(r"^### `(.*)`$", page, re.M)
        self.assertGreater(len(messages), 30)
        self.assertEqual(len(messages), page.count("\n### "))
        texts = list(literals())
        for message in messages:
            for part in re.split(r"\.\.\.", message):
                part = part.strip()
                if len(part) > 3 and part not in FROM_ELSEWHERE:
                    self.assertTrue(any(part in text for text in texts), f"{message}: {part}")

    def test_the_variables_of_launchers_are_those_that_are_read(self):
        page = text_of(pathlib.Path("docs/multi-node.md"))
        named = set(re.findall(r"\b(?:(?:OMPI|SLURM|MASTER|TORCHELASTIC|LOCKSTEP|PMIX|LOCAL)_\w+"
                               r"|RANK|WORLD_SIZE)\b", page.split("## What a rank reads")[1]
                               .split("\n## ")[0]))
        reader = text_of(pathlib.Path("parallel_state/launch/launch_environment.cpp"))
        self.assertEqual(named, set(re.findall(r'"([A-Z]+(?:_\w+)?)"', reader)) -
                         {"False", "True"})

    def test_the_readme_and_the_library_page_show_code_that_is_compiled(self):
        shown = {"README.md": [("examples/custom_loop/main.cpp", "snippet")],
                 "docs/library.md": [("tests/models/router_step_test.cpp", "gpt"),
                                     ("examples/tensor_parallel_model/main.cpp", "snippet"),
                                     ("tests/optimizer/param_groups_test.cpp", "groups")]}
        for page, compiled in shown.items():
            snippets = []
            for path, mark in compiled:
                snippet = re.split(rf" *// \[{mark}\]\n", text_of(pathlib.Path(path)))[1]
                snippets.append(textwrap.dedent(snippet).rstrip("\n"))
            found = [b.text for b in blocks_of(SOURCE / page) if b.language == "cpp"]
            self.assertEqual(found, snippets, page)

    def test_tutorials_show_code_of_the_programs_that_they_link(self):
        shown = 0
        for path in sorted((SOURCE / TUTORIALS).glob("*-*.md")):
            page = path.relative_to(SOURCE)
            programs = ["\n" + (path.parent / link).read_text() for link in links_of(page)
                        if re.fullmatch(r"\.\./\.\./examples/\w+/\w+\.(h|cpp)", link)]
            for block in blocks_of(path):
                if block.language != "cpp":
                    continue
                shown += 1
                self.assertTrue(any(is_excerpt(block.text, text) for text in programs), block)
        self.assertGreater(shown, 20)

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
        for path in sources(".md"):
            named |= set(re.findall(r"(?:^|`)make ([a-z-]+)", text_of(path), re.M))
        self.assertLessEqual(named, targets)
        self.assertGreater(len(named), 4)


# Parts of messages from libtorch or the system.
FROM_ELSEWHERE = {"can't allocate memory", "cannot listen: Address already in use"}


if __name__ == "__main__":
    unittest.main()
