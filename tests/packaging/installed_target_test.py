"""What CMake configures: `make program` builds every file that an installation takes; and a tree of
one library with this tree's CMake files, on systems that differ from the one of CI."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["LOCKSTEP_BUILD"]).resolve()
TOOLS = pathlib.Path(sys.executable).parent
TORCH = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
# The rooms of the small tree: a library with a header whose name has a digit, and a program.
CORE = """
file(WRITE "${LOCKSTEP_GENERATED_DIR}/config.h" "")
lockstep_room(core SOURCES core.cpp HEADERS fp8.h "${LOCKSTEP_GENERATED_DIR}/config.h")
"""
PROGRAM = """
add_executable(lockstep main.cpp)
target_link_libraries(lockstep PRIVATE lockstep_core)
set_target_properties(lockstep PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/libexec")
lockstep_needs_loaded_parts(lockstep)
install(TARGETS lockstep RUNTIME DESTINATION libexec)
"""
CONSUMER = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
foreach(time first second)
  find_package(Lockstep QUIET)
  if(Lockstep_FOUND)
    message(STATUS "${time} time: found")
  else()
    message(STATUS "${time} time: ${Lockstep_NOT_FOUND_MESSAGE}")
  endif()
endforeach()
if(NEEDED)
  find_package(Lockstep REQUIRED)
endif()
"""
# These two need no compiler.
LOOKING = """
cmake_minimum_required(VERSION 3.25)
project(looking LANGUAGES NONE)
function(target_compile_features)
endfunction()
set(_lockstep_package TRUE)
include(cmake/LockstepTorch.cmake)
message(STATUS "torch: ${LOCKSTEP_TORCH_ROOT} ${Lockstep_NOT_FOUND_MESSAGE}")
"""
LINKS = """
cmake_minimum_required(VERSION 3.25)
project(links LANGUAGES NONE)
set(LOCKSTEP_INCLUDE_DIR "${PROJECT_BINARY_DIR}/headers")
include(cmake/LockstepRoom.cmake)
lockstep_link_headers(core base)
"""


def installed_files():
    """Returns the programs, libraries and generated files that the installation scripts name."""
    found = set()
    for script in BUILD.rglob("cmake_install.cmake"):
        for path in re.findall(rf'"{re.escape(str(BUILD))}/([^"$:]+)"', script.read_text()):
            if path.endswith((".so", ".h")) or path.startswith(("bin/", "libexec/")):
                found.add(path)
            elif "/" not in path and (BUILD / path).is_file() and os.access(BUILD / path, os.X_OK):
                found.add(path)
    return found


def inputs_of(target):
    """Returns the files that are built or read for a target of the build."""
    listing = subprocess.run([TOOLS / "ninja", "-C", BUILD, "-t", "inputs", target], check=True,
                             text=True, stdout=subprocess.PIPE)
    return {line.removeprefix(f"{BUILD}/") for line in listing.stdout.splitlines()}


class InstalledTarget(unittest.TestCase):
    def test_the_program_is_built_with_the_libraries_that_it_loads(self):
        modules = re.findall(r"^build (lib/\S+\.so): \w+_MODULE_LIBRARY_LINKER__",
                             (BUILD / "build.ninja").read_text(), re.M)
        loaded = installed_files() & set(modules)
        if not loaded:
            self.skipTest("this build has no library that is loaded when it is needed")
        self.assertEqual(sorted(loaded - inputs_of("lockstep")), [])

    def test_builds_what_is_installed(self):
        built = inputs_of("lockstep_installed")
        files = installed_files()
        for expected in ("lockstep", "libexec/lockstep", "lib/liblockstep_core.so",
                         "lib/liblockstep_testing.so"):
            self.assertIn(expected, files)
        self.assertEqual(sorted(files - built), [])


class Configuration(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="a c++ tree ")
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        self.build = self.root / "build"
        shutil.copytree(SOURCE / "cmake", self.root / "cmake")
        listing = (SOURCE / "CMakeLists.txt").read_text()
        for name, text in {
                "CMakeLists.txt": listing,
                "docs/Doxyfile.in": (SOURCE / "docs/Doxyfile.in").read_text(),
                **{f"{room}/CMakeLists.txt": ""
                   for room in re.findall(r"^add_subdirectory\((\w+)\)", listing, re.M)},
                "core/CMakeLists.txt": CORE, "core/core.cpp": "int answer() { return 42; }\n",
                "core/fp8.h": "", "program/CMakeLists.txt": PROGRAM,
                "program/main.cpp": "int answer();\nint main() { return answer(); }\n",
                "lockstep.h": "", "consumer/CMakeLists.txt": CONSUMER}.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text)

    def run_tool(self, *words, status=0, **environment):
        result = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                                check=False, env=os.environ | environment)
        output = result.stdout + result.stderr
        self.assertEqual(result.returncode, status, output)
        return " ".join(output.split())

    def configure(self, *options, status=0, cuda="OFF", **environment):
        return self.run_tool(
            TOOLS / "cmake", "-S", self.root, "-B", self.build, "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}", f"-DLOCKSTEP_TORCH_ROOT={TORCH}",
            f"-DLOCKSTEP_CUDA={cuda}", "-DLOCKSTEP_PRECOMPILE=OFF", "-DLOCKSTEP_BUILD_TESTS=OFF",
            "-DLOCKSTEP_BUILD_BENCHMARKS=OFF", *options, status=status, **environment)

    def test_programs_start_whatever_the_folder_of_the_libraries(self):
        for option, folder in (("-DCMAKE_INSTALL_PREFIX=/usr", "lib"),
                               ("-DCMAKE_INSTALL_LIBDIR=lib64", "lib64")):
            with self.subTest(option):
                self.configure(option)
                self.run_tool(TOOLS / "cmake", "--build", self.build, "--target", "lockstep")
                self.run_tool(self.build / "libexec/lockstep", status=42)
                prefix = self.root / f"prefix {folder}"
                self.run_tool(TOOLS / "cmake", "--install", self.build, "--prefix", prefix)
                self.assertTrue((prefix / folder / "liblockstep_core.so").exists())
                self.run_tool(prefix / "libexec/lockstep", status=42)
        self.check_package(self.root / "prefix lib")

    def check_package(self, prefix):
        """Without libtorch the package is not found, and a project may go on without it."""
        consumer = [TOOLS / "cmake", "-S", self.root / "consumer", "-B", self.root / "consumed",
                    "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}",
                    f"-DCMAKE_PREFIX_PATH={prefix}"]
        found = self.run_tool(*consumer, f"-DLOCKSTEP_TORCH_ROOT={TORCH}")
        self.assertIn("-- first time: found -- second time: found --", found)
        lacking = self.run_tool(*consumer, f"-DLOCKSTEP_TORCH_ROOT={self.root}")
        told = f"No libtorch found (looked in: {self.root}). Install torch"
        self.assertEqual(re.findall(rf"(\w+) time: {re.escape(told)}", lacking),
                         ["first", "second"])
        self.assertIn("or set LOCKSTEP_TORCH_ROOT to the folder `torch`", self.run_tool(
            *consumer, f"-DLOCKSTEP_TORCH_ROOT={self.root}", "-DNEEDED=ON", status=1))

    def test_the_reference_has_every_installed_header(self):
        self.configure()
        inputs = re.search(r"^INPUT (.*?)^\S", (self.build / "Doxyfile").read_text(), re.M | re.S)
        self.assertEqual(re.findall(r'"(.*)"', inputs[1]),
                         [f"{self.root}/lockstep.h", f"{self.root}/core/fp8.h",
                          f"{self.build}/generated/config.h"])

    def test_a_library_that_the_program_loads_is_built_with_it(self):
        listing = (SOURCE / "datasets/CMakeLists.txt").read_text()
        files = {"datasets/CMakeLists.txt":
                 "lockstep_room(datasets PURE pure.cpp SOURCES room.cpp DEPS core)\n"
                 + listing[listing.index("# SentencePiece, if installed"):],
                 "datasets/pure.cpp": "", "datasets/room.cpp": "", "sentencepiece.so": "",
                 "datasets/tokenizers/sentencepiece_library.cpp": ""}
        for name, text in files.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text)
        self.configure(f"-DLOCKSTEP_SENTENCEPIECE_INCLUDE={self.root}",
                       f"-DLOCKSTEP_SENTENCEPIECE_LIBRARY={self.root}/sentencepiece.so")
        for target in ("lockstep", "lockstep_installed"):
            inputs = self.run_tool(TOOLS / "ninja", "-C", self.build, "-t", "inputs", target)
            self.assertIn("lib/liblockstep_sentencepiece.so", inputs, target)

    def test_libtorch_is_looked_for_again_where_it_is_gone(self):
        tree = self.root / "looking"
        shutil.copytree(SOURCE / "cmake", tree / "cmake")
        (tree / "CMakeLists.txt").write_text(LOOKING)

        def found(torch, *options):
            """Returns what is found where the first python3 in PATH, a new one, has this torch."""
            python = pathlib.Path(tempfile.mkdtemp(dir=self.root), "python3")
            python.write_text(f"#!/bin/sh\necho '{torch}'\n")
            python.chmod(0o755)
            told = self.run_tool(TOOLS / "cmake", "-S", tree, "-B", tree / "build", "-G", "Ninja",
                                 f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}", *options,
                                 PATH=f"{python.parent}:/usr/bin:/bin")
            return re.search(r"-- torch: (.*?) --", told)[1]

        first, second = (tree / name / "torch" for name in ("first", "second"))
        version = re.search('LOCKSTEP_TORCH_VERSION "(.*)"',
                            (tree / "cmake/LockstepTorch.cmake").read_text())[1]
        (first / "lib").mkdir(parents=True)
        (first / "lib/libtorch_cpu.so").touch()
        (first / "version.py").write_text(f"__version__ = '{version}'\n")
        self.assertTrue(found("").startswith("No libtorch found"))
        self.assertEqual(found(first), f"{first}")
        self.assertEqual(found(""), f"{first}")  # kept
        first.parent.rename(second.parent)
        self.assertEqual(found(second), f"{second}")
        told = found(second, f"-DLOCKSTEP_TORCH_ROOT:PATH={first}")  # one that is asked for
        self.assertTrue(told.startswith(f"{first} No libtorch found (looked in: {first})."), told)

    def test_a_copied_build_folder_shows_no_header_of_the_other_tree(self):
        tree, copy = self.root / "links", self.root / "copied links"
        shutil.copytree(SOURCE / "cmake", tree / "cmake")
        (tree / "base").mkdir()
        (tree / "CMakeLists.txt").write_text(LINKS)
        for name in ("kept.h", "removed.h"):
            (tree / "base" / name).touch()

        def links(root, *options):
            self.run_tool(TOOLS / "cmake", "-S", root, "-B", root / "build", "-G", "Ninja",
                          f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}", *options)
            folder = root / "build/headers/lockstep/core"
            return {link.name: link.resolve() for link in folder.iterdir()}

        self.assertEqual(links(tree), {name: tree / "base" / name
                                       for name in ("kept.h", "removed.h")})
        shutil.copytree(tree, copy, symlinks=True)
        (copy / "base/removed.h").unlink()
        self.assertEqual(links(copy, "--fresh"), {"kept.h": copy / "base/kept.h"})

    def write_nvcc(self, release):
        nvcc = self.root / f"cuda {release}/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V1\n")
        nvcc.chmod(0o755)
        return nvcc

    def test_an_nvcc_of_another_cuda_is_none(self):
        nvcc = self.write_nvcc("12.4")
        told = self.configure(
            f"-DLOCKSTEP_NVCC:FILEPATH={nvcc}",  # as an earlier configuration has found it
            "-DCMAKE_IGNORE_PATH=/usr/local/cuda/bin;/usr/local/bin",
            cuda="ON", status=1, PATH=f"{nvcc.parent}:/usr/bin:/bin",
            CUDA_HOME=str(nvcc.parents[1]))
        self.assertIn("LOCKSTEP_CUDA=ON, but no nvcc of CUDA 13 was found. `make build", told)

    def test_an_nvcc_of_another_cuda_that_is_asked_for_is_refused(self):
        nvcc = self.write_nvcc("12.4")
        other = self.write_nvcc("13.0")
        for cuda in ("AUTO", "ON"):
            told = self.configure(f"-DLOCKSTEP_NVCC={nvcc}", cuda=cuda, status=1,
                                  CUDA_HOME=str(other.parents[1]))
            self.assertIn(f"LOCKSTEP_NVCC: found {nvcc}, allowed: an nvcc of CUDA 13", told)

    def test_cmakes_name_of_the_nvcc_and_a_bare_name_are_taken(self):
        first, second = self.write_nvcc("13.1"), self.write_nvcc("13.0")
        link = self.root / "link"
        link.symlink_to(first.parent)
        others = {"CUDA_HOME": str(second.parents[1]), "PATH": f"{link}:{os.environ['PATH']}"}
        for options in ([f"-DCMAKE_CUDA_COMPILER={first}"], ["-DLOCKSTEP_NVCC=nvcc"],
                        ["-DCMAKE_CUDA_COMPILER=nvcc"],
                        [f"-DLOCKSTEP_NVCC={first}", "-DCMAKE_CUDA_COMPILER=nvcc"]):
            shutil.rmtree(self.build, ignore_errors=True)
            for _ in range(2):  # these compile nothing, but CMake keeps them
                told = self.configure(*options, cuda="ON", status=1, **others)
                self.assertNotIn("allowed:", told)
                cache = (self.build / "CMakeCache.txt").read_text()
                found = re.findall(r"^(?:LOCKSTEP_NVCC|CMAKE_CUDA_COMPILER):\w+=(.+)", cache, re.M)
                self.assertEqual({pathlib.Path(path).resolve() for path in found}, {first}, options)
        told = self.configure(f"-DCMAKE_CUDA_COMPILER={self.write_nvcc('12.4')}", "--fresh",
                              cuda="ON", status=1, **others)
        self.assertIn("cuda 12.4/bin/nvcc, allowed: an nvcc of CUDA 13", told)

    def test_a_configured_folder_keeps_its_nvcc(self):
        old, new = self.write_nvcc("12.4"), self.write_nvcc("13.0")
        told = self.configure(
            f"-DLOCKSTEP_NVCC:FILEPATH={old}", f"-DCMAKE_CUDA_COMPILER:FILEPATH={old}",
            cuda="AUTO", status=1, CUDA_HOME=str(new.parents[1]))
        self.assertIn(f"CMAKE_CUDA_COMPILER: found {old}, allowed: {new}, which is", told)
        self.assertIn("configure with --fresh", told)

    def test_a_folder_whose_nvcc_has_gone_builds_without(self):
        gone = self.root / "gone/bin/nvcc"
        found = [f"-D{field}:FILEPATH={gone}" for field in ("LOCKSTEP_NVCC", "CMAKE_CUDA_COMPILER")]
        for options in (found, []):
            told = self.configure(
                *options, "-DCMAKE_IGNORE_PATH=/usr/local/cuda/bin;/usr/local/bin", cuda="AUTO",
                PATH="/usr/bin:/bin", CUDA_HOME="")
            self.assertIn("Building without CUDA: no nvcc of CUDA 13 was found", told)


if __name__ == "__main__":
    unittest.main()
