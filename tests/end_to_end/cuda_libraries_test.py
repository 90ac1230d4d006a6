"""Which processes load libtorch's CUDA library, and what they do if they cannot."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from support import BUILD, LOCKSTEP, SMALL, run

WITH_CUDA = "set(LOCKSTEP_TORCH_CUDA ON)" in (BUILD / "LockstepConfig.cmake").read_text()
SANITIZED = not re.search(r"^LOCKSTEP_SANITIZE:STRING=$", (BUILD / "CMakeCache.txt").read_text(),
                          re.M)
# Loads our libraries as a program that is linked with them does, then prints what was loaded.
LOADER = """
import ctypes, sys
for name in sys.argv[1:]:
    ctypes.CDLL(name)
print("libtorch_cuda" in open("/proc/self/maps").read())
"""
PARTS = ("kernels", "parallel_state")


def has_driver():
    return subprocess.run([sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"],
                          capture_output=True, check=False).returncode == 0


@unittest.skipUnless(WITH_CUDA, "this build has no CUDA")
@unittest.skipIf(SANITIZED, "a sanitizer's libraries are no guests of another program")
class CudaLibrariesTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def is_loaded(self, *names, **environment):
        paths = [BUILD / "lib" / f"liblockstep_{name}.so" for name in ("core", *names)]
        result = run(sys.executable, "-c", LOADER, *paths, **environment)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout == b"True\n"

    def a_driver(self):
        """Returns a folder with a driver that has no device."""
        folder = self.folder / "driver"
        folder.mkdir()
        subprocess.run(["c++", "-shared", "-x", "c++", os.devnull, "-o", folder / "libcuda.so.1"],
                       check=True)
        return folder

    def train(self, device="auto", **environment):
        text = self.folder / "text"
        text.write_text("what a model reads " * 100)
        config = self.folder / "small.textproto"
        config.write_text(SMALL.format(text=text))
        return run(LOCKSTEP, "train", config, "--set", "train.train_iters=2", "--set",
                   f"train.device={device}", "--output", self.folder / "run", **environment)

    def a_copy(self, **others):
        """Returns a folder with our libraries; `others` replaces some (None: removes them)."""
        copy = self.folder / "lib"
        copy.mkdir(exist_ok=True)
        for library in (BUILD / "lib").iterdir():
            if library.is_file() and library.stem not in others:
                shutil.copy(library, copy)
        for name, content in others.items():
            (copy / f"{name}.so").unlink(missing_ok=True)
            if content is not None:
                (copy / f"{name}.so").write_text(content)
        return copy

    def test_a_driver_decides(self):
        self.assertEqual(self.is_loaded(), has_driver())
        self.assertTrue(self.is_loaded(LD_LIBRARY_PATH=self.a_driver()))
        self.assertFalse(self.is_loaded(LD_LIBRARY_PATH=self.folder / "driver",
                                        LOCKSTEP_LOAD_CUDA=0))

    def test_without_a_driver_where_asked_with_our_parts(self):
        self.assertFalse(self.is_loaded(LOCKSTEP_LOAD_CUDA=0))
        self.assertTrue(self.is_loaded(*PARTS, *(f"{part}_cuda" for part in PARTS),
                                       LOCKSTEP_LOAD_CUDA=1))

    def test_doctor_tells_the_versions_without_a_driver(self):
        for load in (0, 1):
            report = json.loads(run(LOCKSTEP, "doctor", "--json", LOCKSTEP_LOAD_CUDA=load).stdout)
            self.assertRegex(report["versions"]["cuda"], r"^13\.\d+$")
            self.assertRegex(report["versions"]["nccl"], r"^2\.\d+\.\d+$")

    def test_a_driver_without_devices_leaves_the_cpu(self):
        result = self.train(LD_LIBRARY_PATH=self.a_driver(), CUDA_VISIBLE_DEVICES="")
        self.assertEqual(result.returncode, 0, result.stderr.decode())

    def test_another_value_is_refused(self):
        for value in ("yes", "", "2"):
            result = self.train(LOCKSTEP_LOAD_CUDA=value)
            self.assertEqual(result.returncode, 2, value)
            self.assertIn(f"environment variable LOCKSTEP_LOAD_CUDA: found '{value}', allowed: 0 or "
                          "1", result.stderr.decode())

    def test_a_libtorch_without_cuda(self):
        """As in the CPU-only wheels: refused if there is a driver, otherwise no problem."""
        torch = re.search(r"^LOCKSTEP_TORCH_ROOT:PATH=(.*)$",
                          (BUILD / "CMakeCache.txt").read_text(), re.M)[1]
        folder = self.folder / "torch"
        folder.mkdir()
        for library in pathlib.Path(torch, "lib").iterdir():
            if library.name != "libtorch_cuda.so":
                (folder / library.name).symlink_to(library)
        driver = f"{folder}:{self.a_driver()}"
        for environment in ({"LD_LIBRARY_PATH": driver},
                            {"LD_LIBRARY_PATH": folder, "LOCKSTEP_LOAD_CUDA": 1}):
            result = self.train(**environment)
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"CUDA: libtorch's library for it cannot be loaded: {folder}/"
                          "libtorch_cuda.so: cannot open", result.stderr.decode())
            self.assertIn("or LOCKSTEP_LOAD_CUDA=0, to use CPUs", result.stderr.decode())
        for library_path in (folder, driver):
            result = self.train(LD_LIBRARY_PATH=library_path, LOCKSTEP_LOAD_CUDA=0)
            self.assertEqual(result.returncode, 0, result.stderr.decode())
            doctor = run(LOCKSTEP, "doctor", LD_LIBRARY_PATH=library_path, LOCKSTEP_LOAD_CUDA=0)
            self.assertEqual(doctor.returncode, 0, doctor.stderr.decode())

    def test_a_part_that_cannot_be_loaded_is_named(self):
        """In a copy of our libraries, one file is not a library."""
        for part in PARTS:
            name = f"liblockstep_{part}_cuda"
            copy = self.a_copy(**{name: "no library"})
            environment = {"LD_LIBRARY_PATH": copy, "LOCKSTEP_LOAD_CUDA": 1}
            doctor = run(LOCKSTEP, "doctor", **environment)
            for result in (self.train(**environment), doctor):
                self.assertEqual(result.returncode, 2, result.stdout)
                self.assertRegex(result.stderr.decode(), f"CUDA: {copy}/{name}.so cannot be loaded: "
                                 ".*(too short|invalid ELF header).*; allowed: .*LOCKSTEP_LOAD_CUDA=0")
            result = self.train(device="cpu", **environment)
            self.assertEqual(result.returncode, 0, result.stderr.decode())

    def test_why_there_is_no_cuda(self):
        """The reason is given by a run that needs CUDA, and by doctor."""
        broken = self.folder / "broken"
        broken.mkdir()
        (broken / "libcuda.so.1").write_text("no library")
        without = self.a_copy(liblockstep_kernels_cuda=None)
        cases = [({"LOCKSTEP_LOAD_CUDA": 0}, "LOCKSTEP_LOAD_CUDA is '0'"),
                 ({"LD_LIBRARY_PATH": broken},
                  f"NVIDIA's driver cannot be loaded: {broken}/libcuda.so.1: "),
                 ({"LD_LIBRARY_PATH": without}, "this build has no CUDA")]
        if not has_driver():
            cases.append(({}, "NVIDIA's driver cannot be loaded: libcuda.so.1: "))
        for environment, why in cases:
            result = self.train(device="cuda", **environment)
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"found visible CUDA devices: 0 ({why}", result.stderr.decode())
            report = json.loads(run(LOCKSTEP, "doctor", "--json", **environment).stdout)
            self.assertIn(why, report["devices"]["no_cuda"])
        result = self.train(LD_LIBRARY_PATH=without, LOCKSTEP_LOAD_CUDA=1)
        self.assertEqual(result.returncode, 2)
        self.assertIn("LOCKSTEP_LOAD_CUDA: found '1', allowed: 0, as this build has no CUDA",
                      result.stderr.decode())


if __name__ == "__main__":
    unittest.main()
