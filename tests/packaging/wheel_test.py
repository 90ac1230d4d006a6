"""The wheel: made, installed into a fresh virtual environment, used without a compiler."""

import base64
import csv
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

from installed import BUILD, SANITIZED, SOURCE, TORCH, WITH_CUDA, Installed

# The libraries of others in the wheel, compiled in and copied in.
OTHERS = ("CLI11", "nlohmann-json", "libprotobuf", "libutf8proc", "libzstd")


def make_environment(folder):
    """Makes a virtual environment with torch next to the packages to be installed, like pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages, = folder.glob("lib/python3*/site-packages")
    for name in ("torch", "nvidia"):
        (packages / name).symlink_to(TORCH.parent / name)
    (packages / "needs_of_torch.pth").write_text(f"{TORCH.parent}\n")
    return packages


@unittest.skipIf(SANITIZED, "a sanitizer's build is refused")
class Wheel(Installed):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        subprocess.run([sys.executable, SOURCE / "packaging/wheel.py", BUILD, cls.folder / "dist"],
                       check=True)
        cls.wheel, = (cls.folder / "dist").iterdir()
        cls.environment = cls.folder / "an environment"
        cls.packages = make_environment(cls.environment)
        subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check",
                        "--python", cls.environment / "bin/python", "install", "--no-deps",
                        cls.wheel], check=True)
        cls.path = str(cls.environment / "bin")

    def test_name_and_metadata(self):
        self.assertRegex(self.wheel.name, r"^lockstep-\d+\.\d+\.\d+-py3-none-manylinux_2_\d+_x86_64"
                                          r"(\.manylinux_2_\d+_x86_64)*\.whl$")
        with zipfile.ZipFile(self.wheel) as archive:
            info, = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
            metadata = archive.read(f"{info}/METADATA").decode()
            tags = archive.read(f"{info}/WHEEL").decode()
            record = archive.read(f"{info}/RECORD").decode()
            for line in ("Name: lockstep", "Requires-Dist: torch==2.11.0",
                         "License-Expression: Apache-2.0", "License-File: LICENSE"):
                self.assertIn(line + "\n", metadata)
            self.assertEqual({name.rpartition("/")[2] for name in archive.namelist()
                              if name.startswith(f"{info}/licenses/L")},
                             {"LICENSE", *(f"LICENSE.{name}" for name in OTHERS)})
            self.assertIn("built with CUDA" if WITH_CUDA else "built without CUDA", metadata)
            self.assertIn("Root-Is-Purelib: false", tags)
            listed = {name: digest for name, digest, _ in csv.reader(record.splitlines())}
            self.assertEqual(set(listed), {entry.filename for entry in archive.infolist()
                                           if not entry.is_dir()})
            for name, digest in listed.items():
                if not name.endswith("/RECORD"):
                    sha = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest())
                    self.assertEqual(digest, "sha256=" + sha.decode().rstrip("="), name)

    def test_libraries_are_found_from_where_the_files_stand(self):
        libraries = self.packages / "lockstep.libs"
        self.assertEqual(sorted(name.split("-")[0] for name in os.listdir(libraries)),
                         ["libprotobuf", "libutf8proc", "libzstd"])
        self.check_libraries(self.packages / "lockstep", (libraries, TORCH / "lib",
                                                          TORCH.parent / "nvidia"))
        self.check_origin(self.packages / "lockstep")

    def test_it_trains_and_writes_a_text_without_a_compiler(self):
        self.check_first_text()

    def test_no_python_stays_in_the_process(self):
        run = self.command("python", "-c", """
import subprocess
subprocess.run(["lockstep", "launch", "-n", "1", "--starter", "own", "--program", "/bin/sh", "--",
                "-c", "/usr/bin/readlink /proc/$PPID/exe"], check=True)
""")
        self.assertEqual(run, f"{self.packages.resolve()}/lockstep/bin/lockstep\n")

    def test_the_torchrun_of_its_environment_is_taken(self):
        torchrun = self.environment / "bin/torchrun"
        torchrun.write_text("#!/bin/sh\necho torchrun of the environment\n")
        torchrun.chmod(0o755)
        self.addCleanup(torchrun.unlink)
        lockstep = self.environment / "bin/lockstep"
        said = self.command(lockstep, "launch", "-n", 2, "--", "train", "tiny", PATH="/nowhere")
        self.assertEqual(said, "torchrun of the environment\n")

    def test_a_project_of_ones_own(self):
        prefix = self.command("python", "-c", "import lockstep; print(lockstep.cmake_prefix_path)")
        self.check_consumer(prefix.rstrip("\n"), self.packages.resolve() / "torch")


if __name__ == "__main__":
    unittest.main()
