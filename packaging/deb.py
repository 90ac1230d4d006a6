"""Makes a Debian package for CPUs from a build folder: python packaging/deb.py BUILD DIST

The package holds the wheel's tree without the libraries that use CUDA, and next to it the part of
libtorch that training on CPUs needs, in /usr/lib/lockstep."""

import gzip
import pathlib
import shutil
import subprocess
import tempfile

from stage import COMPILED_IN, SOURCE, build_and_dist, elf_files, fail, needed, notice, run

HOME = "usr/lib/lockstep"
# Where find_package(Lockstep) looks; it does not know HOME.
PACKAGE = "usr/lib/cmake/Lockstep"
INCLUDE = 'include("${{CMAKE_CURRENT_LIST_DIR}}/../../lockstep/lockstep/lib/cmake/Lockstep/{}")\n'
# Debian has this library, and a process must not load two copies of it.
OF_DEBIAN = {"libgomp.so.1"}
# Where shells look for completions in /usr/share, by where they are installed.
COMPLETIONS = {"bash-completion/completions": "bash-completion/completions",
               "zsh/site-functions": "zsh/vendor-completions"}


def copy_libtorch(build, packages):
    """Copies libtorch's headers, and all of its libraries that the programs need."""
    wheels = build.torch.parent
    folders = [build.torch / "lib", *sorted((wheels / "nvidia").glob("*/lib"))]
    todo, seen = list(elf_files(packages)), set(OF_DEBIAN)
    while todo:
        for name in set(needed(todo.pop())) - seen:
            seen.add(name)
            for library in (folder / name for folder in folders if (folder / name).exists()):
                copy = packages / library.relative_to(wheels)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(library, copy)
                todo.append(library)
    for name in ("include", "version.py"):
        copy = shutil.copytree if (build.torch / name).is_dir() else shutil.copy2
        copy(build.torch / name, packages / "torch" / name)


def copy_licenses(wheels, packages, documents):
    """Copies the licenses of everything that is not Debian's."""
    shutil.copy(SOURCE / "LICENSE", documents / "copyright")
    for name, their_packages in COMPILED_IN.items():
        shutil.copy(notice(name, their_packages), documents / f"{name}.copyright")
    distribution, = wheels.glob("torch-*.dist-info")
    for file in sorted((distribution / "licenses").glob("*")):
        shutil.copy(file, documents / f"libtorch.{file.name}")
    for library in sorted((packages / "nvidia").rglob("*.so*")):
        begin = f"{library.relative_to(packages)},"
        licenses = [file for distribution in wheels.glob("nvidia_*.dist-info")
                    if any(line.startswith(begin) for line in
                           (distribution / "RECORD").read_text().splitlines())
                    for file in (distribution / "licenses").glob("*")]
        if not licenses:
            fail(f"found no license of {library.name} in {wheels}/nvidia_*.dist-info")
        for file in licenses:
            name = file.parents[1].name.partition("-")[0]
            shutil.copy(file, documents / f"{name}.{file.name}")


def move_shared(installed, shared):
    """Moves manual pages and completions to where programs of Debian look for them."""
    pages = shared / "man/man1"
    pages.mkdir(parents=True)
    for page in sorted((installed / "man/man1").glob("*.1")):
        (pages / (page.name + ".gz")).write_bytes(gzip.compress(page.read_bytes(), mtime=0))
    shutil.rmtree(installed / "man")
    for source, target in COMPLETIONS.items():
        (shared / target).parent.mkdir()
        (installed / source).rename(shared / target)
        (installed / source).parent.rmdir()


def write_root(build, root):
    """Writes the file system of the package."""
    packages = root / HOME
    build.install(packages, cuda=False)
    copy_libtorch(build, packages)
    shared = root / "usr/share"
    (shared / "doc/lockstep").mkdir(parents=True)
    copy_licenses(build.torch.parent, packages, shared / "doc/lockstep")
    move_shared(packages / "lockstep/share", shared)
    program = root / "usr/bin/lockstep"
    program.parent.mkdir()
    program.symlink_to("../lib/lockstep/lockstep/bin/lockstep")
    (root / PACKAGE).mkdir(parents=True)
    for name in ("LockstepConfig.cmake", "LockstepConfigVersion.cmake"):
        (root / PACKAGE / name).write_text(INCLUDE.format(name))
    for path in root.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def debian_packages(temporary, root):
    """Returns the Debian packages that the programs and libraries depend on. CPack would first run
    `file` on each of libtorch's ten thousand headers, which takes longer than all the rest."""
    files = list(elf_files(root / HOME))
    control = pathlib.Path(temporary, "debian/control")
    control.parent.mkdir()
    control.write_text("Source: lockstep\n\nPackage: lockstep\nArchitecture: amd64\n")
    folders = sorted({file.parent for file in files})
    found = run("dpkg-shlibdeps", "-O", "--ignore-missing-info", *(f"-l{path}" for path in folders),
                *(f"-e{file}" for file in files), cwd=temporary, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL).stdout
    return found.strip().removeprefix("shlibs:Depends=")


def main():
    build, dist = build_and_dist(__doc__.splitlines()[0])
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary, "root")
        write_root(build, root)
        run("cpack", "--config", SOURCE / "packaging/CPackConfig.cmake", "-G", "DEB", "-B", temporary,
            "-D", f"CPACK_INSTALLED_DIRECTORIES={root};/",
            "-D", f"CPACK_PACKAGE_VERSION={build.version}",
            "-D", f"CPACK_DEBIAN_PACKAGE_DEPENDS={debian_packages(temporary, root)}")
        package, = pathlib.Path(temporary).glob("*.deb")
        made = pathlib.Path(shutil.copy(package, dist))
    print(f"{made}: {made.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
