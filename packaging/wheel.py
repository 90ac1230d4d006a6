"""Makes a wheel from a build folder: python packaging/wheel.py BUILD DIST

The wheel depends on the torch that it was built against and uses its libraries. auditwheel copies
in the other libraries that a bare Linux lacks (libprotobuf, libutf8proc, libzstd), and determines
the oldest glibc that can run it. One wheel serves every Python 3: the programs run no Python."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

from stage import COMPILED_IN, SOURCE, build_and_dist, fail, notice, run

# The libraries in the wheels that torch depends on.
OF_TORCH = ["libtorch*", "libc10*", "libcudart*", "libgomp*", "libnccl*"]
# The libraries that auditwheel copies in, with their packages as in COMPILED_IN.
COPIED_IN = {"libprotobuf": ["libprotobuf[0-9]*", "protobuf"],
             "libutf8proc": ["libutf8proc[0-9]*", "utf8proc"],
             "libzstd": ["libzstd1", "libzstd", "zstd"]}
# The same, where SentencePiece was found.
SENTENCEPIECE = {
    "libsentencepiece": ["libsentencepiece[0-9]*", "sentencepiece-libs", "sentencepiece"]}


def describe(build):
    if not build.cuda:
        return "It was built without CUDA kernels and NCCL: it trains on CPUs."
    return f"It was built with CUDA 13 kernels ({build.architectures}) and NCCL."


def write_project(build, folder):
    """Writes the project that setuptools makes a wheel from, around the installed tree."""
    shutil.copytree(SOURCE / "packaging/python", folder, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__"))
    prefix = build.install(folder)
    (folder / "lockstep/_build.py").write_text(
        f'version = "{build.version}"\ntorch_version = "{build.torch_version}"\n'
        f'cuda_architectures = "{build.architectures}"\n')
    with (folder / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("\n" + describe(build) + "\n")
    shutil.copy(SOURCE / "LICENSE", folder)
    others = COMPILED_IN | COPIED_IN
    if (prefix / "lib/liblockstep_sentencepiece.so").exists():
        others |= SENTENCEPIECE
    for name, packages in others.items():
        shutil.copy(notice(name, packages), folder / f"LICENSE.{name}")


def main():
    build, dist = build_and_dist(__doc__.splitlines()[0])
    with tempfile.TemporaryDirectory() as temporary:
        project, plain = pathlib.Path(temporary, "project"), pathlib.Path(temporary, "plain")
        write_project(build, project)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--no-build-isolation", "--wheel-dir", plain, project)
        wheel, = plain.glob("*.whl")
        for older in dist.glob("lockstep-*.whl"):
            older.unlink()
        repaired = subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", wheel, "--wheel-dir", dist,
             *(word for name in OF_TORCH for word in ("--exclude", name))],
            capture_output=True, text=True, check=False)
        if repaired.returncode != 0:
            fail(f"auditwheel: {repaired.stderr}")
    made, = dist.glob("lockstep-*.whl")
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB. {describe(build)}")


if __name__ == "__main__":
    main()
