"""Code shared by the tests of the wheel and of the Debian package: an installed program, run
without this tree's tools."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import time
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(SOURCE / "tests/end_to_end"), str(SOURCE / "packaging")]
from stage import RPATH, elf_files, needed  # pylint: disable=wrong-import-position
from support import BUILD  # pylint: disable=wrong-import-position

TORCH = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
CACHE = (BUILD / "CMakeCache.txt").read_text()
SANITIZED = not re.search(r"^LOCKSTEP_SANITIZE:STRING=$", CACHE, re.M)
WITH_CUDA = "set(LOCKSTEP_TORCH_CUDA ON)" in (BUILD / "LockstepConfig.cmake").read_text()
# The libraries of Debian's and Ubuntu's standard containers.
OF_SYSTEM = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|libdl|libpthread|librt|libz|ld-linux-x86-64)\.so")


class Installed(unittest.TestCase):
    """Sub-classes set the `path` of the installed program."""

    path = ""
    folder = pathlib.Path()

    @classmethod
    def command(cls, *words, status=0, **environment):
        """Runs with an empty environment except PATH, which leads to no compiler. The bytes that a
        model writes are not always UTF-8."""
        result = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                                errors="replace", cwd=cls.folder,
                                env={"PATH": cls.path} | environment, check=False, timeout=600)
        if result.returncode != status:
            raise AssertionError(f"{words}: {result.returncode}\n{result.stdout}{result.stderr}")
        return result.stdout

    def check_first_text(self):
        """From the bare program to a text that the model has written."""
        begin = time.monotonic()
        self.assertRegex(self.command("lockstep", "--version"), r"^lockstep \d+\.\d+\.\d+\n$")
        self.assertRegex(self.command("lockstep", "configs"), r"(?m)^tiny +\S")
        text = self.folder / "text"
        text.write_text("".join(f"{i} squared is {i * i}. " for i in range(900)))
        self.command("lockstep", "launch", "-n", 2, "--", "train", "tiny", "--set",
                     f"data.path={text}", "--set", "train.train_iters=20", "--set",
                     "train.sample_tokens=0", "--output", "run")
        self.assertEqual((self.folder / "run/metrics.jsonl").read_text().count('"lm_loss"'), 20)
        said = self.command("lockstep", "generate", "run/checkpoint", "--prompt", "7 squared is ",
                            "--max-tokens", 30)
        self.assertTrue(said.startswith("7 squared is "), said)
        self.assertGreater(len(said), 20)
        print(f"\nfrom --version to a text: {time.monotonic() - begin:.1f} s", file=sys.stderr)

    def check_libraries(self, prefix, others):
        """Every program and library finds its libraries in the tree, `others` or the system."""
        files = list(elf_files(prefix))
        self.assertGreater(len(files), 10)
        known = {file.name for folder in (prefix, *others) for file in folder.rglob("*.so*")}
        for file in files:
            paths = subprocess.run(["readelf", "--dynamic", "--wide", file], capture_output=True,
                                   text=True, check=True).stdout
            found = re.findall(r"R(?:UN)?PATH\)\s+Library r(?:un)?path: \[(.*)\]", paths)
            for path in ":".join(found).split(":") if found else []:
                self.assertTrue(path.startswith("$ORIGIN"), f"{file}: {path}")
            if file.name.startswith(("lockstep", "liblockstep")):
                self.assertTrue(found and found[0].startswith(RPATH), f"{file}: {found}")
            for name in needed(file):
                self.assertTrue(name in known or OF_SYSTEM.match(name), f"{file} needs {name}")

    def check_origin(self, prefix):
        """No file contains a path of the build machine. (nvcc writes some into its kernels.)"""
        for file in prefix.rglob("*"):
            if file.is_file() and not (WITH_CUDA and file.name == "liblockstep_kernels_cuda.so"):
                self.assertNotIn(bytes(SOURCE), file.read_bytes(), file)

    def check_consumer(self, prefix_path, torch):
        """Compiles an external project with the package."""
        build = self.folder / "loop"
        tools = {"PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"}
        self.command("cmake", "-S", SOURCE / "examples/custom_loop", "-B", build, "-G", "Ninja",
                     f"-DCMAKE_PREFIX_PATH={prefix_path}", **tools)
        found = re.search(r"^LOCKSTEP_TORCH_ROOT:PATH=(.*)$",
                          (build / "CMakeCache.txt").read_text(), re.M)[1]
        self.assertEqual(pathlib.Path(found), torch)
        self.command("cmake", "--build", build, **tools)
        losses = re.findall(r"loss (\S+)", self.command(build / "custom_loop"))
        self.assertEqual(len(losses), 7)
        self.assertLess(float(losses[-1]), 0.05)
