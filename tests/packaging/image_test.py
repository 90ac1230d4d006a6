"""Carries out docker/Dockerfile with dist/*.whl in a chroot, and trains and generates there as the
image's user. `make image-test` runs it, as root, with debootstrap and package registries."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = """
if command -v cc c++ gcc g++ clang make; then exit 1; fi
test "$(id -un)" = lockstep
lockstep --version
lockstep configs
begin=$(date +%s)
lockstep launch -n 2 -- train tiny --set data.path=/tmp/text.txt --set train.train_iters=40 \\
  --set train.sample_tokens=0 --output run
lockstep generate run/checkpoint --prompt 'Alice ' --max-tokens 60
echo "trained and generated in $(( $(date +%s) - begin )) s"
"""


@unittest.skipUnless(os.geteuid() == 0, "a chroot needs root")
@unittest.skipUnless(shutil.which("debootstrap"), "debootstrap is not installed")
class Image(unittest.TestCase):
    def test_the_image_trains_and_writes_a_text(self):
        with tempfile.TemporaryDirectory() as temporary:
            root = pathlib.Path(temporary, "root")
            begin = time.monotonic()
            recipe = [SOURCE / "docker/run_in_chroot", root]
            subprocess.run([*recipe, "--from", f"build:/src/dist={SOURCE / 'dist'}"], check=True,
                           stdout=subprocess.DEVNULL)
            made = time.monotonic() - begin
            shutil.copy(SOURCE / "data/alice29.txt", root / "tmp/text.txt")
            result = subprocess.run([*recipe, "--entrypoint", "sh", "--", "-euc", SCRIPT],
                                    stdout=subprocess.PIPE, text=True, check=True)
            print(f"{result.stdout}\nthe image was made in {made:.0f} s")
        self.assertRegex(result.stdout, r"(?m)^lockstep \d+\.\d+\.\d+$")
        self.assertRegex(result.stdout, r"(?m)^tiny  +The model")
        self.assertTrue(re.search(r"^Alice .{20}", result.stdout, re.M | re.S))


if __name__ == "__main__":
    unittest.main()
