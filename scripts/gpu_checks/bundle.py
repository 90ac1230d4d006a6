"""The files that go to the machine with the GPU: --build makes them, every stage uses them."""

import functools
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

from . import layouts
from .commands import CommandFailed, all_ranks_need, run, run_ranks
from .parsing import missing_libraries, resolved_libraries
from .report import holds_results_alone

MEBIBYTE = 1 << 20
LARGEST = 48 * MEBIBYTE
PROGRAMS = ("lockstep", "libexec/lockstep", "benchmarks/gpu_bench", "tests/cuda_test",
            "tests/straying_rank")
TARGETS = ("lockstep", "gpu_bench", "cuda_test", "straying_rank")
ENTRIES = {"lockstep", "libexec", "benchmarks", "tests", "lib", "losses.json", "out"}
# Every machine has these: the C and C++ libraries, which only work with its own loader.
OF_THE_SYSTEM = ("ld-linux", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so",
                 "libgcc_s.so", "libstdc++.so")


@functools.cache
def torch_folder():
    """Returns the folder `torch` of the wheel that this Python finds."""
    spec = importlib.util.find_spec("torch")
    if not spec:
        raise CommandFailed("this Python has no torch: run scripts/gpu_check by one that has")
    return pathlib.Path(spec.submodule_search_locations[0])


def library_folders():
    nvidia = sorted(torch_folder().parent.glob("nvidia/*/lib"))
    return [torch_folder() / "lib", *nvidia]


class Bundle:
    """The folder build-gpu."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def __truediv__(self, name):
        return self.folder / name

    @staticmethod
    def callers_environment():
        """For programs of others: the caller's, without launcher variables."""
        ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM", "OMPI", "PMIX",
                "NCCL_")
        return {k: v for k, v in os.environ.items() if not k.startswith(ours)}

    def environment(self, more=None):
        """For our programs: the bundle's libraries, then libtorch's, then the caller's, where some
        hosts have the driver; no launcher variables."""
        kept = self.callers_environment()
        folders = [str(folder) for folder in [self / "lib", *library_folders()]]
        if kept.get("LD_LIBRARY_PATH"):
            folders.append(kept["LD_LIBRARY_PATH"])
        return kept | {"LD_LIBRARY_PATH": ":".join(folders)} | (more or {})

    def recorded(self):
        """Returns the CPU's {layout: [(loss, norm)]}."""
        path = self / "losses.json"
        if not path.exists():
            raise CommandFailed(f"{path} is not there: run scripts/gpu_check --build")
        return {name: [tuple(pair) for pair in pairs]
                for name, pairs in json.loads(path.read_text()).items()}

    def check(self):
        """Raises CommandFailed with what is missing; returns a summary."""
        absent = [name for name in PROGRAMS if not (self / name).exists()]
        if absent:
            raise CommandFailed(f"{self.folder} lacks {', '.join(absent)}: run scripts/gpu_check "
                                "--build")
        for path in [*(self / name for name in PROGRAMS), *self.cuda_parts()]:
            listed = run(["ldd", path], self.environment(), 30).needs().output
            if missing := missing_libraries(listed):
                raise CommandFailed(f"{path.relative_to(self.folder)} needs {', '.join(missing)}, "
                                    "which is not here")
        return f"{len(PROGRAMS)} programs, {self.size() / MEBIBYTE:.1f} MiB, no library is missing"

    def cuda_parts(self):
        """Returns the libraries that the programs load if there is a driver."""
        return sorted((self / "lib").glob("liblockstep_*_cuda.so"))

    def files(self):
        """Returns the files that go to the other machine, without the results of earlier runs."""
        return [path for path in self.folder.rglob("*")
                if path.is_file() and self / "out" not in path.parents]

    def size(self):
        return sum(path.stat().st_size for path in self.files())


def build(source, build_folder, folder, compiles=True):
    """Builds the programs and copies them without symbols. Returns the Bundle."""
    if not (build_folder / "build.ninja").exists():
        raise CommandFailed(f"{build_folder} is no build folder: run make build LOCKSTEP_CUDA=ON")
    check_replaceable(pathlib.Path(folder))
    if compiles:
        # `cmake --build` runs the folder's own ninja: another version would rebuild everything.
        cmake = shutil.which("cmake") or pathlib.Path(sys.executable).parent / "cmake"
        subprocess.run([cmake, "--build", build_folder, "--target", *TARGETS], check=True,
                       cwd=source)
    shutil.rmtree(folder, ignore_errors=True)
    bundle = Bundle(folder)
    for name in PROGRAMS:
        copy_without_symbols(build_folder / name, bundle / name)
    for library in sorted((build_folder / "lib").glob("liblockstep_*.so")):
        copy_without_symbols(library, bundle / "lib" / library.name)
    copy_foreign_libraries(bundle)
    check_size(bundle)
    return bundle


def check_replaceable(folder):
    """Raises CommandFailed if what would be deleted is anything but an earlier bundle."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()}
    is_bundle = not names - ENTRIES and (folder / "lockstep").is_file()
    # A check may have run before there was a bundle.
    has_results_alone = names == {"out"} and holds_results_alone(folder / "out")
    if names and not is_bundle and not has_results_alone:
        raise CommandFailed(f"--folder {folder} would be deleted, and it is neither empty nor an "
                            f"earlier build-gpu: it holds {', '.join(sorted(names)[:3])}")


def copy_without_symbols(source, target):
    if not source.exists():
        raise CommandFailed(f"{source} is not built")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    run(["strip", "--strip-unneeded", target], dict(os.environ), 60).needs()


def is_foreign(name, path, folders):
    """Returns whether the other machine may lack a library, such as protobuf's."""
    if name.startswith(OF_THE_SYSTEM):
        return False
    return not any(pathlib.Path(path).is_relative_to(folder) for folder in folders)


def copy_foreign_libraries(bundle):
    folders = [bundle.folder.resolve(), *(f.resolve() for f in library_folders())]
    for name in PROGRAMS:
        listed = run(["ldd", bundle / name], bundle.environment(), 30).needs().output
        for library, path in resolved_libraries(listed).items():
            if is_foreign(library, os.path.realpath(path), folders):
                shutil.copy2(os.path.realpath(path), bundle / "lib" / library)


def check_size(bundle, largest=LARGEST):
    if bundle.size() <= largest:
        return
    files = sorted(bundle.files(), key=lambda path: -path.stat().st_size)
    big = ", ".join(f"{path.name} {path.stat().st_size / MEBIBYTE:.1f}" for path in files[:3])
    raise CommandFailed(f"{bundle.folder} has {bundle.size() / MEBIBYTE:.1f} MiB, allowed: "
                        f"{largest / MEBIBYTE:.0f}; the largest: {big}")


def record_losses(bundle, folder, tell, chosen=layouts.LAYOUTS):
    """Trains each layout on this machine's CPU, with as many ranks, and keeps the curves."""
    config, recorded = layouts.write_config(folder), {}
    for number, layout in enumerate(chosen):
        output = pathlib.Path(folder) / f"recorded{number}"
        command = layouts.train_command(bundle, config, layout, "cpu", output)
        all_ranks_need(run_ranks(command, layout.ranks, bundle.environment(), 300))
        recorded[layout.name] = layouts.curve(output)
        layouts.check_recorded(layout, recorded[layout.name])
        first, last = recorded[layout.name][0], recorded[layout.name][-1]
        tell(f"recorded {layout.name}: loss {first[0]:.5f} to {last[0]:.5f}, norm {last[1]:.5f}")
    (bundle / "losses.json").write_text(json.dumps(recorded))
