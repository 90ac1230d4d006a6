"""The tree itself: which room includes which, files of a readable length, no unused setting."""

import fnmatch
import pathlib
import re
import subprocess
import sys
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]

# The dependencies of the design: a room and the rooms that it may include.
ROOMS = {
    "core": set(),
    "kernels": {"core"},
    "parallel_state": {"core"},
    "distributed": {"core", "parallel_state"},
    "optimizer": {"core", "kernels", "parallel_state", "distributed"},
    "models": {"core", "kernels", "parallel_state"},
    "pipeline": {"core", "parallel_state"},
    "datasets": {"core"},
    "planner": {"core", "parallel_state", "distributed", "optimizer", "models", "pipeline",
                "datasets"},
    "checkpoint": {"core", "kernels", "parallel_state", "optimizer", "models", "datasets",
                   "planner"},
    "training": {"core", "kernels", "parallel_state", "distributed", "optimizer", "models",
                 "pipeline", "datasets", "planner", "checkpoint"},
    "testing": {"core", "parallel_state", "distributed", "optimizer", "models", "pipeline",
                "checkpoint"},
    "program": {"core", "parallel_state", "distributed", "pipeline", "datasets", "planner",
                "checkpoint", "training"},
}
# The same for a room's sub-rooms. "" is for the files outside sub-rooms, which may include all.
SUBROOMS = {
    "core": {"base": set(), "config": {"base"}, "parameters": {"base"}},
    "kernels": {"layers": {""}},
    "parallel_state": {
        "grids": set(),
        "secret": set(),
        "store": {"secret"},
        "guard": {"grids", "store"},
        "proof": {"grids", "guard"},
        "launch": {"grids", "secret", "store", "guard"},
        "transport": {"grids", "guard"},
        "transport/c10d": {"grids", "guard", "transport"},
        "transport/host": {"store", "transport", "transport/c10d"},
        "collectives": {"grids", "guard", "transport"},
        "state": {"grids", "store", "guard", "proof", "launch", "transport", "transport/c10d",
                  "collectives"},
        "mesh": {"grids", "collectives", "state"},
        "autograd": {"collectives", "mesh"},
    },
    "distributed": {
        "layout": set(),
        "buffer": {"layout"},
        "sync": {"layout", "buffer"},
        "gather": {"buffer", "sync"},
        "ddp": {"layout", "buffer", "sync", "gather"},
        "finalize": {"buffer", "sync", "ddp"},
        "mesh_fronts": {"layout", "buffer", "sync"},
        "reducer/hooks": {"buffer", "sync"},
        "reducer": {"buffer", "sync", "reducer/hooks"},
    },
    "optimizer": {"norm": set(), "rules": set(), "groups": set(),
                  "audit": {"", "norm", "rules", "groups"}},
    "models": {
        "layers": set(),
        "attention": {"layers"},
        "moe": {"layers", "attention"},
        "gpt": {"layers", "attention", "moe"},
    },
    "pipeline": {"schedule": set()},
    "datasets": {
        "files": set(),
        "pieces": set(),
        "tokenizers": {"files", "pieces"},
        "indexed": {"files", "tokenizers"},
        "documents": {"files", "tokenizers", "indexed"},
        "conversations": {"files", "tokenizers", "documents"},
        "samples": {"files", "tokenizers", "indexed", "conversations"},
    },
    "checkpoint": {
        "layout": set(),
        "files": {"layout"},
        "state": {"layout", "files"},
        "hugging_face": {"files", "state"},
    },
    "training": {"reports": set(), "telemetry": set(), "planned": {""},
                 "calibration": {"", "planned"}},
    "testing": {"ranks": set(), "layouts": {"ranks"}, "checks": {"ranks", "layouts"}},
}
# The headers that users include; these and those that they include are installed.
PUBLIC_HEADERS = {
    "lockstep.h", "core/config_io.h", "parallel_state/planning.h", "models/context_parallel.h",
    "models/key_value_cache.h", "models/moe_layer.h", "models/recompute.h",
    "optimizer/orthogonalize.h",
    "datasets/build_dataset.h", "datasets/dataset_summary.h", "datasets/merge_datasets.h",
    "datasets/microbatch_loader.h",
    "datasets/tokenizer.h", "planner/memory_plan.h", "checkpoint/checkpoint_folder.h",
    "checkpoint/checkpoint_reader.h", "checkpoint/checkpoint_saver.h",
    "checkpoint/hugging_face.h", "checkpoint/training_state.h", "testing/testing.h",
}
# The rooms that may name c10d.
C10D_ROOMS = {"parallel_state", "testing"}
# The description of a parameter, and the table that maps its axes to groups of ranks.
AXIS_TABLES = {"core/parameters/placement.h", "core/parameters/placement.cpp",
               "parallel_state/grids/axis_groups.cpp"}
# Counts the parameters that a token uses.
COUNTS_EXPERTS = {"planner/stage_shapes.cpp"}


def sources(*suffixes):
    patterns = ["*" + suffix for suffix in suffixes]
    listed = subprocess.run([SOURCE / "scripts/sources", *patterns], capture_output=True, text=True,
                            check=True).stdout
    return [pathlib.Path(name) for name in listed.splitlines()]


def text_of(path):
    return (SOURCE / path).read_text()


def subroom_of(path):
    """Returns the longest folder of SUBROOMS that contains a room's file: "transport/c10d"."""
    below = "/".join(path.parts[1:-1])
    known = [name for name in SUBROOMS.get(path.parts[0], {})
             if below == name or below.startswith(name + "/")]
    return max(known, key=len) if known else below


def words_of(listing, begin, end):
    """Returns the words of a CMake call, with the list variables of the same file expanded."""
    text = text_of(listing)
    match = re.search(rf"{begin} (.*?){end}", text, re.S)
    for word in match[1].split() if match else []:
        variable = re.fullmatch(r"\$\{(\w+)\}", word)
        if not variable:
            yield word
        else:
            for values in re.findall(rf"set\({variable[1]}\s+(.*?)\)", text, re.S):
                yield from values.split()


def headers_of_rooms():
    """Returns the path of each header, by the name in "lockstep/NAME"."""
    headers = {f"{path.parts[0]}/{path.name}": path for path in sources(".h")
               if path.parts[0] in ROOMS}
    return {"lockstep.h": pathlib.Path("lockstep.h"), **headers}


def with_included(names, headers):
    """Returns these headers and all that they include."""
    needed, todo = set(), set(names)
    while todo:
        name = todo.pop()
        needed.add(name)
        if name in headers:  # config.h is generated
            text = text_of(headers[name])
            todo |= set(re.findall(r'#include "lockstep/([^"]+)"', text)) - needed
    return needed


def installed_headers():
    installed = {"lockstep.h", "core/config.h"}
    for listing in sources("CMakeLists.txt"):
        match = re.search(r"HEADERS (.*?)(?:DEPS|PURE_LIBS|\))", text_of(listing), re.S)
        for header in match[1].split() if match and listing.parts[0] in ROOMS else []:
            if header.endswith(".h"):
                installed.add(f"{listing.parts[0]}/{pathlib.Path(header).name}")
    return installed


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

    def test_subrooms_include_only_what_stands_before_them(self):
        folder = {("core", "config.h"): "config"}  # generated
        for path in sources(".h"):
            if path.parts[0] in ROOMS:
                folder[path.parts[0], path.name] = subroom_of(path)
        checked = 0
        for path in sources(".h", ".cpp"):
            subroom = subroom_of(path) if path.parts[0] in SUBROOMS else None
            if subroom not in SUBROOMS.get(path.parts[0], {}):
                continue
            allowed = SUBROOMS[path.parts[0]][subroom]
            for room, header in re.findall(r'#include "lockstep/(\w+)/(\w+\.h)"', text_of(path)):
                if room == path.parts[0]:
                    checked += 1
                    self.assertIn(folder[room, header], allowed | {subroom},
                                  f"{path} includes {header}")
        self.assertGreater(checked, 200)

    def test_folders_and_cmake_lists_have_the_subrooms_of_the_table(self):
        for room, subrooms in SUBROOMS.items():
            listing = pathlib.Path(room, "CMakeLists.txt")
            listed = words_of(listing, "SUBROOMS", r"\n\s*(?:PURE|SOURCES)")
            self.assertEqual(list(listed), list(subrooms))
            found = {subroom_of(path) for path in sources(".h", ".cpp")
                     if path.parts[0] == room and len(path.parts) > 2}
            self.assertEqual(found, set(subrooms))

    def test_every_folder_has_a_readme_that_names_its_files(self):
        stems = {}
        for path in sources(".h", ".cpp", ".cu"):
            if path.parts[0] in ROOMS and "gloo_declarations" not in path.parts and \
                    "codegen" not in path.parts:
                stems.setdefault(path.parent, set()).add(path.stem)
        self.assertGreater(len(stems), 20)
        for folder, names in stems.items():
            patterns = re.findall(r"[\w*]+", text_of(folder / "README.md"))
            for name in names:
                self.assertTrue(any(fnmatch.fnmatch(name, pattern) for pattern in patterns),
                                f"{folder}/README.md does not name {name}")

    def test_what_is_installed_follows_from_the_public_headers(self):
        needed = with_included(PUBLIC_HEADERS, headers_of_rooms())
        self.assertEqual(installed_headers(), needed)

    def test_the_installed_headers_that_lockstep_h_leaves_out_are_listed(self):
        headers = headers_of_rooms()
        apart = installed_headers() - with_included({"lockstep.h"}, headers)
        below = set().union(*(with_included({name}, headers) - {name} for name in apart))
        rooms = {"datasets": "data sets", "planner": "the planner"}
        expected = {rooms.get(name.partition("/")[0], name) for name in apart - below}
        for path in ("lockstep.h", "docs/library.md"):
            sentence = re.search(r"Separate headers.*?\.(?=\s)", text_of(path), re.S)[0]
            listed = re.findall(r"\w+/\w+\.h", sentence)
            listed += [words for words in rooms.values() if words in sentence.replace("\n", " ")]
            self.assertEqual(sorted(listed), sorted(expected), path)

    def test_pure_sources_do_not_include_libtorch(self):
        pure = 0
        for listing in sources("CMakeLists.txt"):
            for name in words_of(listing, "PURE", r"\n\s*(?:SOURCES|HEADERS)"):
                if name.startswith('"'):
                    continue
                pure += 1
                self.assertNotRegex(text_of(listing.parent / name), r"#include <(torch|ATen|c10)/")
        self.assertGreater(pure, 15)

    def test_only_the_table_of_axes_chooses_by_is_expert(self):
        for path in sources(".h", ".cpp", ".cu"):
            if path.parts[0] not in ROOMS or str(path) in AXIS_TABLES | COUNTS_EXPERTS:
                continue
            for number, line in enumerate(text_of(path).splitlines(), 1):
                says_so = re.sub(r"\bis_expert = true\b", "", line)  # a layer describes itself
                self.assertNotIn("is_expert", says_so, f"{path}:{number}")
            self.assertNotRegex(text_of(path), r"case MeshAxis::", path)

    def test_no_name_of_a_parameter_decides_how_it_is_treated(self):
        for path in sources(".h", ".cpp", ".cu"):
            if path.parts[0] in ROOMS and not path.name.startswith("hugging_face"):
                self.assertNotRegex(text_of(path), r"name\.(starts_with|ends_with|find)\(\"", path)

    def test_files_are_read_in_one_way(self):
        other_ways = r"\bifstream\b|(?<!cout\.)\brdbuf\b|\bfopen\b|(?<!\w)::p?read\("
        for path in sources(".h", ".cpp", ".cu"):
            if path.parts[0] not in ROOMS or "codegen" in path.parts or \
                    path.name == "input_file.cpp":
                continue
            for line in text_of(path).splitlines():
                # Exceptions: the kernel's /proc files, and where standard output goes.
                if "/proc/" not in line and "std::cout." not in line:
                    self.assertNotRegex(line, other_ways, path)

    def test_files_have_a_readable_length(self):
        for path in sources(".h", ".cpp", ".cu", ".cuh", ".py"):
            self.assertLessEqual(len(text_of(path).splitlines()), 400, path)

    def test_comments_have_at_most_100_columns(self):
        # clang-format does not break long comments.
        for path in sources(".h", ".cpp", ".cu", ".cuh", ".proto"):
            for line in text_of(path).splitlines():
                if line.lstrip().startswith("//"):
                    self.assertLessEqual(len(line), 100, f"{path}: {line}")

    def test_every_kind_of_source_is_formatted(self):
        kinds = {path.suffix for path in sources("*") if path.suffix in (
            ".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh")}
        for call in ("clang-format -i", "clang-format --dry-run --Werror"):
            patterns, = re.findall(rf"scripts/sources (.*) \| xargs {call}$", text_of("Makefile"), re.M)
            self.assertEqual(set(re.findall(r"'\*(\.\w+)'", patterns)), kinds, call)

    def test_every_mutant_still_has_its_place(self):
        sys.path.insert(0, str(SOURCE / "tests/mutants"))
        from audited import AUDITED, BEYOND
        from mutants import MUTANTS, SURVIVORS
        names = [mutant.name for mutant in MUTANTS]
        self.assertEqual(len(set(names)), len(names))
        self.assertGreaterEqual(len(names), 24)
        self.assertLessEqual(set(SURVIVORS), set(names))
        self.assertLessEqual({*AUDITED, *BEYOND}, set(names))
        self.assertEqual({*AUDITED} & {*BEYOND}, set())
        tests = text_of("tests/CMakeLists.txt")
        for test in set(AUDITED.values()):
            self.assertRegex(tests, rf"_test\({test.partition(':')[0]}\b", test)
        for mutant in MUTANTS:
            self.assertRegex(mutant.source, r"\.cpp$", f"{mutant.name}: nothing compiles it alone")
            text = text_of(mutant.source)
            self.assertEqual(text.count(mutant.old), 1, f"{mutant.name} in {mutant.source}")
            self.assertNotEqual(mutant.old, mutant.new, mutant.name)
            for test in mutant.tests:
                name = test.partition(":")[0]
                self.assertRegex(tests, rf"_test\({name}\b", f"{mutant.name}: {name}")

    def test_types_of_headers_have_names_of_their_own(self):
        """Two types with the same name share a destructor across libraries, whatever they hold."""
        places = {}
        for path in sources(".h"):
            if path.parts[0] in ROOMS and "namespace lockstep {" in text_of(path):
                for name in re.findall(r"^(?:struct|class) (\w+)(?: final)?(?: : [^;{]*)? \{", text_of(path), re.M):
                    places.setdefault(name, []).append(str(path))
        self.assertGreater(len(places), 300)
        self.assertEqual({name: paths for name, paths in places.items() if len(paths) > 1}, {})

    def test_every_configuration_field_is_read(self):
        schema = text_of(pathlib.Path("core/config/config.proto"))
        fields = re.findall(r"^  (?:optional|repeated) \w+ (\w+) =", schema, re.M)
        self.assertGreater(len(fields), 60)
        code = "\n".join(text_of(p) for p in sources(".h", ".cpp", ".cu") if p.parts[0] in ROOMS)
        unread = [field for field in fields if not re.search(rf"[.>:]{field}\b", code)]
        self.assertEqual(unread, [], "nothing reads these")


if __name__ == "__main__":
    unittest.main()
