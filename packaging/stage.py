"""Code that the wheel and the Debian package share. Both hold the installed tree in the layout of a
folder of Python packages: libtorch's folders `torch` and `nvidia` lie next to ours, `lockstep`.
Programs and libraries find each other and libtorch by paths relative to their own place."""

import argparse
import os
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[1]
# For every program and library. All lie two folders below the folder of the packages.
RPATH = "$ORIGIN/../lib:$ORIGIN/../../torch/lib:$ORIGIN/../../nvidia/cu13/lib"

# A line of LockstepConfig.cmake in a build with CUDA.
WITH_CUDA = "set(LOCKSTEP_TORCH_CUDA ON)"

# Libraries that are compiled into ours: {name: patterns of the packages of Debian and of others}.
COMPILED_IN = {"CLI11": ["libcli11-dev", "cli11*"],
               "nlohmann-json": ["nlohmann-json3-dev", "json-devel", "nlohmann?json*"]}
# Where Debian and where others keep the licenses of packages.
DOCUMENTS, LICENSES = pathlib.Path("/usr/share/doc"), pathlib.Path("/usr/share/licenses")


# Finds the tools of .venv, wherever this is called from.
os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"


def fail(message):
    sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: {message}")


def notice(library, packages):
    """Returns the file with the copyright and license of a library. Its packages are patterns: the
    number in a library's name changes from one release of a system to the next."""
    places = [path for package in packages for path in (
        *sorted(DOCUMENTS.glob(f"{package}/copyright")),
        *sorted(LICENSES.glob(f"{package}/*"), reverse=True))]  # LICENSE before COPYING
    given = os.environ.get("LOCKSTEP_NOTICES")
    if given:
        places.insert(0, pathlib.Path(given, library))
    found = next((path for path in places if path.is_file()), None)
    if not found:
        fail(f"found no license of {library}, which must come along with that library, in "
             f"{DOCUMENTS}/{packages[0]} or {LICENSES}/{packages[-1]}; copy it to a file "
             f"'{library}' in a folder, and set LOCKSTEP_NOTICES to that folder")
    return found


def run(*command, **options):
    return subprocess.run([str(word) for word in command], check=True, text=True, **options)


def build_and_dist(description):
    """Returns the Build and the output folder that the command line names; creates the folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("build", metavar="BUILD")
    parser.add_argument("dist", metavar="DIST", type=pathlib.Path)
    options = parser.parse_args()
    build = Build(options.build)
    options.dist.mkdir(parents=True, exist_ok=True)
    return build, options.dist


class Build:
    """The configuration of a build folder."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).resolve()
        if not (self.folder / "libexec/lockstep").exists():
            fail(f"{folder} holds no program; run: make program")
        cache = (self.folder / "CMakeCache.txt").read_text()
        if self._entry(cache, "LOCKSTEP_SANITIZE"):
            fail(f"{folder} is a sanitizer's build, allowed: one without")
        libraries = self._entry(cache, "CMAKE_INSTALL_LIBDIR") or "lib"
        if libraries != "lib":
            fail(f"{folder} has CMAKE_INSTALL_LIBDIR={libraries}, allowed: lib")
        self.version = self._entry(cache, "CMAKE_PROJECT_VERSION")
        self.torch = pathlib.Path(self._entry(cache, "LOCKSTEP_TORCH_ROOT"))
        config = (self.folder / "LockstepConfig.cmake").read_text()
        self.cuda = WITH_CUDA in config
        self.architectures = self._entry(cache, "CMAKE_CUDA_ARCHITECTURES") if self.cuda else ""
        listing = (SOURCE / "cmake/LockstepTorch.cmake").read_text()
        self.torch_version = re.search(r'LOCKSTEP_TORCH_VERSION "(.*)"', listing)[1]

    @staticmethod
    def _entry(cache, name):
        found = re.search(rf"^{name}:\w+=(.*)$", cache, re.M)
        return found[1] if found else ""

    def install(self, packages, cuda=True):
        """Installs into `packages`/lockstep, without the libraries that use CUDA unless `cuda`;
        returns that folder."""
        prefix = packages / "lockstep"
        run("cmake", "--install", self.folder, "--prefix", prefix, "--strip",
            stdout=subprocess.DEVNULL)
        config = prefix / "lib/cmake/Lockstep/LockstepConfig.cmake"
        text = config.read_text().replace(str(self.torch), "")
        if not cuda:
            text = text.replace(WITH_CUDA, "set(LOCKSTEP_TORCH_CUDA OFF)")
            for library in (prefix / "lib").glob("liblockstep_*_cuda.so"):
                library.unlink()
        config.write_text(text)
        for file in elf_files(prefix):
            run("patchelf", "--set-rpath", RPATH, file)
        return prefix


def elf_files(folder):
    """The programs and shared libraries below `folder`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def needed(file):
    """Returns the libraries that an ELF file needs."""
    output = run("readelf", "--dynamic", "--wide", file, stdout=subprocess.PIPE,
                 env=os.environ | {"LC_ALL": "C"}).stdout
    return re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", output)
