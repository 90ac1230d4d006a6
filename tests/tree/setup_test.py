"""scripts/setup on machines that lack something: one sentence with what to do, and no change. Small
programs stand in for the real ones to simulate the machines. And when `make` configures anew."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]


class Machine(unittest.TestCase):
    """A folder with the scripts, and programs that hide the machine's."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        shutil.copytree(SOURCE / "scripts", self.root / "scripts")
        self.bin = self.root / "bin"
        self.bin.mkdir()

    def program(self, name, script, folder=None):
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + script + "\n")
        path.chmod(0o755)

    def venv(self, script):
        """Makes a .venv whose Python is a shell script, and whose pip works."""
        self.program("python", script, self.root / ".venv/bin")
        self.program("pip", "", self.root / ".venv/bin")

    def calls(self):
        return (self.root / "called").read_text().splitlines()

    def setup(self, *parts, status=1, root=None, **extra):
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.root), **extra}
        result = subprocess.run([(root or self.root) / "scripts/setup", *parts], env=environment,
                                capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        if status != 0:
            sentences = [line for line in result.stderr.splitlines() if line.startswith("setup: ")]
            self.assertEqual(len(sentences), 1, result.stderr)
        return result.stdout + result.stderr


class Setup(Machine):
    def test_an_old_compiler(self):
        self.program("c++", 'case "$1" in --version) echo "c++ (Debian 10.2)";; *) echo 10;; esac')
        output = self.setup("compiler")
        self.assertIn("g++ 10, and Lockstep needs 12 or newer", output)

    def test_no_compiler(self):
        output = self.setup("compiler", CXX="no-such-compiler")
        self.assertIn("no C++ compiler 'no-such-compiler' was found; install one", output)

    def test_packages_are_missing_and_nobody_is_root(self):
        self.program("dpkg-query", 'case "$*" in *libcli11*) echo not-installed;; '
                                   "*) echo installed;; esac")
        self.program("id", "echo 1000")
        self.program("sudo", "exit 1")
        self.program("apt-get", "touch $HOME/called")
        output = self.setup("packages")
        self.assertIn("run: sudo apt-get install libcli11-dev", output)
        self.assertFalse((self.root / "called").exists())

    def test_packages_are_installed_through_sudo_where_it_asks_nothing(self):
        self.program("dpkg-query", 'case "$*" in *libcli11*) echo not-installed;; '
                                   "*) echo installed;; esac")
        self.program("id", "echo 1000")
        self.program("sudo", 'case "$1" in -n) exit 0;; esac; echo "$@" >> $HOME/called')
        self.setup("packages", status=0)
        self.assertIn("apt-get install -y --no-install-recommends libcli11-dev",
                      (self.root / "called").read_text())

    def test_nothing_is_missing(self):
        self.program("dpkg-query", "echo installed")
        self.program("apt-get", "touch $HOME/called")
        self.assertEqual(self.setup("packages", status=0), "")
        self.assertFalse((self.root / "called").exists())

    def test_no_registry(self):
        self.venv('case "$*" in *--version*) exit 0;; *) exit 1;; esac')
        output = self.setup("venv")
        self.assertIn("needs a Python package registry (set PIP_INDEX_URL", output)
        output = self.setup("text")
        self.assertIn("the training text could not be fetched", output)
        output = self.setup("gpt2")
        self.assertIn("GPT-2's vocabulary could not be fetched", output)

    def test_requirements_are_installed_once(self):
        self.venv('echo "$@" >> $HOME/called')
        self.setup("venv", status=0)
        self.setup("venv", status=0)
        self.assertEqual(sum("install" in call for call in self.calls()), 1)

    def test_another_python_is_refused(self):
        for version in ("3.10.12", "3.15.0"):
            self.program("python3", f"""case "$1" in
              -V) echo "Python {version}" ;;
              -c) exec {sys.executable} -c "import sys
sys.version_info = tuple(int(part) for part in '{version}'.split('.'))
$2" ;;
              *) touch $HOME/called ;;
            esac""")
            output = self.setup("venv")
            self.assertIn(f"python3 is Python {version}, and libtorch's wheels need Python 3.11 to "
                          "3.14; put one first in PATH.", output)
        self.assertFalse((self.root / "called").exists())

    def test_a_venv_is_made_again_where_its_folder_was_moved(self):
        # It makes a .venv as `python3 -m venv` does.
        self.program("python3", """[ "$1" = -c ] && exit 0
          mkdir -p .venv/bin && cp "$HOME/tool" .venv/bin/python && cp "$HOME/tool" .venv/bin/pip
          echo made >> $HOME/called""")
        self.program("tool", "exit 0", self.root)
        old, new = self.root / "old place", self.root / "new place"
        shutil.copytree(self.root / "scripts", old / "scripts")

        def made(root):
            (self.root / "called").write_text("")
            self.setup("venv", status=0, root=root)
            return self.calls()

        self.assertEqual(made(old), ["made"])
        self.assertEqual(made(old), [])
        other = self.root / "another worktree"
        shutil.copytree(self.root / "scripts", other / "scripts")
        (other / ".venv").symlink_to(old / ".venv")
        self.assertEqual(made(other), [])
        (other / ".venv").unlink()
        old.rename(new)
        self.assertEqual(made(new), ["made"])
        (new / ".venv/.place").unlink()  # made before that file was written
        self.assertEqual(made(new), [])
        self.program("pip", "exit 1", new / ".venv/bin")
        self.assertEqual(made(new), ["made"])

    def test_a_venv_on_top_of_another_is_made_again_where_it_cannot_import_that_ones_packages(self):
        self.venv("""case "$*" in
          "-m venv "*) mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"
            cp "$HOME/tool" "$3/bin/python"
            echo made >> $HOME/called ;;
        esac""")
        self.program("tool", 'case "$2" in *torch*) exec test -e "$HOME/torch" ;; esac', self.root)
        packages = self.root / ".venv/lib/python3.11/site-packages"
        packages.mkdir(parents=True)
        for torch, times in ((True, 1), (True, 1), (False, 2), (True, 2)):
            (self.root / "torch").touch() if torch else (self.root / "torch").unlink()
            self.setup("hugging-face", status=0)
            self.assertEqual(self.calls(), times * ["made"])
        path = self.root / ".venv-hugging-face/lib/python3.11/site-packages/venv.pth"
        self.assertEqual(path.read_text(), f"{packages}\n")

    def test_a_compiler_of_cuda_12_is_none(self):
        self.venv('echo "$@" >> $HOME/called')
        for release, wheels in (("12.4", 1), ("13.0", 0)):
            nvcc = f"echo 'Cuda compilation tools, release {release}, V{release}.131'"
            self.program("nvcc", nvcc)
            self.program("nvcc", nvcc, self.root / "cuda/bin")
            (self.root / "called").write_text("")
            for stamp in (self.root / ".venv").glob(".requirements*"):
                stamp.unlink()
            self.setup("venv", status=0, LOCKSTEP_CUDA="ON", CUDA_HOME=str(self.root / "cuda"))
            self.assertEqual(sum("requirements-nvcc" in call for call in self.calls()), wheels)

    def test_a_text_with_other_ends_of_lines_is_the_same(self):
        texts = {"alice29.txt": b"one\ntwo\n", "asyoulik.txt": b"three\n"}
        (self.root / "scripts/text.sha256").write_text("".join(
            f"{hashlib.sha256(text).hexdigest()}  data/{name}\n" for name, text in texts.items()))
        (self.root / "data").mkdir()
        for name, text in texts.items():
            (self.root / "data" / name).write_bytes(text.replace(b"\n", b"\r\n"))
        self.assertEqual(self.setup("text", status=0), "")
        for name, text in texts.items():
            self.assertEqual((self.root / "data" / name).read_bytes(), text)

    def test_a_damaged_text_is_not_used(self):
        self.program("python", 'cd "$HOME" && mkdir -p x/tests/testdata && '
                               "echo no > x/tests/testdata/alice29.txt && "
                               "echo no > x/tests/testdata/asyoulik.txt && "
                               'while [ "$1" != --dest ]; do shift; done; '
                               'tar -czf "$2/brotli.tar.gz" x', self.root / ".venv/bin")
        self.assertIn("is not what scripts/text.sha256 expects", self.setup("text"))

    def test_an_unknown_part(self):
        self.assertIn("unknown part 'everything'", self.setup("everything"))


class Configure(Machine):
    """`make configure` with a cmake that only writes its arguments down."""

    def setUp(self):
        super().setUp()
        self.tree = self.root / "tree"
        shutil.copytree(SOURCE / "scripts", self.tree / "scripts")
        shutil.copy(SOURCE / "Makefile", self.tree)
        self.program("setup", "", self.tree / "scripts")
        self.program("cmake", f"""while [ "$1" != -B ]; do shift; done
          touch "$2/build.ninja"
          printf '%s\\n' "$@" > '{self.root}/called'
          case "$*" in *-DBAD*) exit 1 ;; esac""", self.tree / ".venv/bin")
        self.packages = self.tree / ".venv/lib/python3.11/site-packages"
        self.packages.mkdir(parents=True)

    def configure(self, *words, fails=False, tree=None, target="configure"):
        """Returns the options that cmake gets; None if it is not called."""
        called = self.root / "called"
        called.unlink(missing_ok=True)
        result = subprocess.run(["make", "-C", tree or self.tree, target, *words],
                                capture_output=True, text=True, check=False,
                                env={"PATH": os.environ["PATH"]})
        self.assertEqual(result.returncode != 0, fails, result.stdout + result.stderr)
        return called.read_text().splitlines() if called.exists() else None

    def test_another_option_is_seen_whatever_its_quotes(self):
        first = self.configure()
        self.assertIn("-DLOCKSTEP_CUDA=AUTO", first)
        self.assertNotIn("CMAKE_CXX_COMPILER", "".join(first))
        self.assertIsNone(self.configure())
        flags = "CMAKE_ARGS=-DCMAKE_CXX_FLAGS='-O1 -g' -DNAME=\"a b\""
        self.assertLessEqual({"-DCMAKE_CXX_FLAGS=-O1 -g", "-DNAME=a b"}, set(self.configure(flags)))
        self.assertIsNone(self.configure(flags))
        self.assertIn("-DNAME=a", self.configure(flags.replace('"', "")))  # "b" is another word
        # Without --fresh, cmake forgets all other options when the compiler changes.
        self.assertLessEqual({"--fresh", "-DCMAKE_CXX_COMPILER=clang++", "-DLOCKSTEP_CUDA=OFF"},
                             set(self.configure("CXX=clang++", "LOCKSTEP_CUDA=OFF")))
        self.assertIsNone(self.configure("CXX=clang++", "LOCKSTEP_CUDA=OFF"))
        self.assertLessEqual({"--fresh", "-DCMAKE_CXX_COMPILER=g++"},
                             set(self.configure("CXX=g++", "LOCKSTEP_CUDA=OFF")))
        # The cache would keep the compiler.
        self.assertIn("--fresh", self.configure("LOCKSTEP_CUDA=OFF"))
        self.assertIsNone(self.configure("LOCKSTEP_CUDA=OFF"))
        self.configure("CXX=g++", "CMAKE_ARGS=-DBAD=1", fails=True)
        for _ in range(2):
            self.assertIn("--fresh", self.configure("CMAKE_ARGS=-DBAD=1", fails=True))
        self.assertIn("--fresh", self.configure("LOCKSTEP_CUDA=OFF"))

    def test_what_earlier_arguments_set_is_forgotten(self):
        self.configure()
        without = "CMAKE_ARGS=-DLOCKSTEP_HOST_TRANSPORT=OFF"
        self.assertIn("-DLOCKSTEP_HOST_TRANSPORT=OFF", self.configure(without))
        self.assertIsNone(self.configure(without))
        # Options that are given each time need no new cache, and keep what was compiled.
        cuda = self.configure(without, "LOCKSTEP_CUDA=OFF")
        self.assertLessEqual({"-DLOCKSTEP_HOST_TRANSPORT=OFF", "-DLOCKSTEP_CUDA=OFF"}, set(cuda))
        self.assertNotIn("--fresh", cuda)
        self.assertIn("--fresh", self.configure())
        self.assertIn("--fresh", self.configure("CMAKE_ARGS=-DX=1 --fresh"))
        self.assertIn("--fresh", self.configure())  # X was in the cache
        # The stamp of a version that did not write the place.
        (self.tree / "build/.configure").write_text("-S . -B build -G Ninja\n")
        self.assertIn("--fresh", self.configure())
        self.assertNotIn("--fresh", self.configure("LOCKSTEP_CUDA=OFF"))

    def test_another_place_or_python_begins_anew(self):
        self.configure()
        copy, moved = self.root / "the copy's place", self.root / "moved"
        shutil.copytree(self.tree, copy, symlinks=True)
        self.assertIn("--fresh", self.configure(tree=copy))
        self.assertIsNone(self.configure(tree=copy))
        self.assertIsNone(self.configure())
        self.tree.rename(moved)
        self.assertIn("--fresh", self.configure(tree=moved))
        self.assertIsNone(self.configure(tree=moved))
        packages = moved / self.packages.relative_to(self.tree)
        packages.parent.rename(packages.parents[1] / "python3.12")
        self.assertIn("--fresh", self.configure(tree=moved))
        self.assertIsNone(self.configure(tree=moved))
        # .venv is a link to that of another worktree.
        shutil.rmtree(copy / ".venv")
        (copy / ".venv").symlink_to(moved / ".venv")
        self.assertIn("--fresh", self.configure(tree=copy))
        self.assertIsNone(self.configure(tree=copy))
        # The same tree by another name.
        (self.root / "link").symlink_to(moved)
        self.assertIsNone(self.configure(tree=self.root / "link"))

    def test_the_other_folders_are_configured_in_the_same_way(self):
        for name in ("ninja", "clang-format", "clang-tidy"):
            self.program(name, "", self.tree / ".venv/bin")
        shutil.copy(SOURCE / ".gitignore", self.tree)
        (self.tree / "core").mkdir()
        (self.tree / "core/source.cpp").touch()  # lint wants one
        for target, folder, option in (
                ("plain", "build-plain", "-DLOCKSTEP_HOST_TRANSPORT=OFF"),
                ("fuzzers", "build-fuzz", "-DCMAKE_CXX_COMPILER=clang++-16"),
                ("lint", "build-lint", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")):
            with self.subTest(target):
                self.assertLessEqual({folder, option}, set(self.configure(target=target)))
                self.assertIsNone(self.configure(target=target))
                self.assertLessEqual({"-DX=1", option},
                                     set(self.configure("CMAKE_ARGS=-DX=1", target=target)))
                self.assertLessEqual({"--fresh", option}, set(self.configure(target=target)))
                if target == "fuzzers":  # which has a compiler of its own
                    continue
                self.assertLessEqual({"--fresh", "-DCMAKE_CXX_COMPILER=g++-13", option},
                                     set(self.configure("CXX=g++-13", target=target)))
                self.assertIsNone(self.configure("CXX=g++-13", target=target))
                without = self.configure(target=target)
                self.assertLessEqual({"--fresh", option}, set(without))
                self.assertNotIn("CMAKE_CXX_COMPILER", "".join(without))


if __name__ == "__main__":
    unittest.main()
