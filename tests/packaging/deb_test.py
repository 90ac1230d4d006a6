"""The Debian package: made, unpacked into a folder, and used without a compiler or .venv."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from installed import BUILD, OF_SYSTEM, SANITIZED, SOURCE, TORCH, Installed
from stage import elf_files


def make(dist):
    return subprocess.run([sys.executable, SOURCE / "packaging/deb.py", BUILD, dist],
                          capture_output=True, text=True, check=False)


@unittest.skipIf(SANITIZED, "a sanitizer's build is refused")
class Deb(Installed):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        made = make(cls.folder / "dist")
        if made.returncode != 0:
            raise AssertionError(made.stdout + made.stderr)
        cls.package, = (cls.folder / "dist").iterdir()
        cls.root = cls.folder / "a root"
        cls.home = cls.root / "usr/lib/lockstep"
        subprocess.run(["dpkg-deb", "--extract", cls.package, cls.root], check=True)
        cls.path = str(cls.root / "usr/bin")

    def test_what_the_package_says_of_itself(self):
        self.assertRegex(self.package.name, r"^lockstep_\d+\.\d+\.\d+_amd64\.deb$")
        fields = dict(re.findall(r"^(\S+): (.*)$", subprocess.run(
            ["dpkg-deb", "--field", self.package], capture_output=True, text=True,
            check=True).stdout, re.M))
        self.assertEqual((fields["Package"], fields["Architecture"]), ("lockstep", "amd64"))
        for package in ("libc6 (>=", "libgomp1", "libprotobuf32 (>=", "libstdc++6 (>=",
                        "libutf8proc2 (>=", "libzstd1 (>=", "zlib1g (>="):
            self.assertIn(package, fields["Depends"])
        listing = subprocess.run(["dpkg-deb", "--contents", self.package], capture_output=True,
                                 text=True, check=True).stdout
        for line in listing.splitlines():
            self.assertRegex(line, r"^([d-]rwxr-xr-x|-rw-r--r--|lrwxrwxrwx) ", line)
            self.assertIn(" root/root ", line)
            self.assertRegex(line, r" \./(usr/|$|usr$)", line)
        self.assertIn("./usr/share/doc/lockstep/copyright", listing)
        libraries = re.findall(r"\S+/(lib\S+\.so\S*)$", listing, re.M)
        self.assertIn("liblockstep_training.so", libraries)
        for name in libraries:
            self.assertNotRegex(name, r"torch_cuda|c10_cuda|lockstep_\w+_cuda|nccl")

    def test_the_licenses_of_others_come_along(self):
        documents = self.root / "usr/share/doc/lockstep"
        found = {path.name for path in documents.iterdir() if path.stat().st_size > 0}
        self.assertLessEqual({"CLI11.copyright", "nlohmann-json.copyright", "libtorch.LICENSE"},
                             found)
        records = {path.parent.name.partition("-")[0]: path.read_text()
                   for path in TORCH.parent.glob("*.dist-info/RECORD")}
        others = [path.relative_to(self.home) for path in self.home.rglob("lib*.so*")
                  if path.relative_to(self.home).parts[0] not in ("lockstep", "torch")]
        self.assertGreater(len(others), 0)
        for library in others:
            owner, = (name for name, text in records.items() if f"\n{library}," in f"\n{text}")
            self.assertIn(f"{owner}.License.txt", found, library)

    def test_manual_and_completions_lie_where_debian_looks_for_them(self):
        for path in ("man/man1/lockstep-train.1.gz", "bash-completion/completions/lockstep",
                     "zsh/vendor-completions/_lockstep"):
            self.assertTrue((self.root / "usr/share" / path).exists(), path)
        self.assertEqual([path.name for path in (self.home / "lockstep/share").iterdir()],
                         ["lockstep"])

    def test_libraries_are_found_from_where_the_files_stand(self):
        self.check_libraries(self.home / "lockstep",
                             (self.home, pathlib.Path("/usr/lib/x86_64-linux-gnu")))
        self.check_origin(self.home / "lockstep")
        for file in elf_files(self.home):
            found = self.command("/usr/bin/ldd", file)
            for path in re.findall(r"=> (/.*) \(0x", found):
                inside = pathlib.Path(path).is_relative_to(self.root)
                self.assertTrue(inside or OF_SYSTEM.match(path.rpartition("/")[2]) or
                                re.search(r"/lib(gomp|protobuf|utf8proc|z|zstd|util)\.so", path),
                                f"{file}: {path}")
            self.assertNotIn("not found", found, file)

    def test_it_trains_and_writes_a_text_without_a_compiler(self):
        self.check_first_text()

    def test_a_project_of_ones_own(self):
        self.check_consumer(self.root / "usr", self.home / "torch")


if __name__ == "__main__":
    unittest.main()
