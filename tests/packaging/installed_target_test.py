"""`make program` builds every file that an installation takes from the build folder."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

BUILD = pathlib.Path(os.environ["LOCKSTEP_BUILD"]).resolve()


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


class InstalledTarget(unittest.TestCase):
    def test_builds_what_is_installed(self):
        ninja = pathlib.Path(sys.executable).parent / "ninja"
        listing = subprocess.run([ninja, "-C", BUILD, "-t", "inputs", "lockstep_installed"],
                                 check=True, text=True, stdout=subprocess.PIPE)
        built = {line.removeprefix(f"{BUILD}/") for line in listing.stdout.splitlines()}
        files = installed_files()
        for expected in ("lockstep", "libexec/lockstep", "lib/liblockstep_core.so",
                         "lib/liblockstep_testing.so"):
            self.assertIn(expected, files)
        self.assertEqual(sorted(files - built), [])


if __name__ == "__main__":
    unittest.main()
