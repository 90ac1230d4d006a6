"""Runs docker/Dockerfile with dist/*.whl in a chroot, and trains and generates there as the image's
user. `make image-test` runs it, as root, with debootstrap and package registries. Skipped if the
machine cannot do this."""

import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
NOT_HERE = 77  # exit status of run_in_chroot on a machine that cannot make a root folder
DISK = 12 << 30  # bytes
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


class Image(unittest.TestCase):
    def make(self, recipe):
        """Makes the image. Skips the test if the machine cannot make one."""
        made = subprocess.run([*recipe, "--from", f"build:/src/dist={SOURCE / 'dist'}"],
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              check=False)
        if made.returncode == NOT_HERE:
            self.skipTest(made.stderr.strip().splitlines()[-1])
        self.assertEqual(made.returncode, 0, made.stderr)

    def test_the_image_trains_and_writes_a_text(self):
        with tempfile.TemporaryDirectory() as temporary:
            free = shutil.disk_usage(temporary).free
            if free < DISK:
                self.skipTest(f"{temporary} has {free >> 30} GiB free, needed: {DISK >> 30}")
            root = pathlib.Path(temporary, "root")
            begin = time.monotonic()
            recipe = [SOURCE / "docker/run_in_chroot", root]
            self.make(recipe)
            made = time.monotonic() - begin
            shutil.copy(SOURCE / "data/alice29.txt", root / "tmp/text.txt")
            result = subprocess.run([*recipe, "--entrypoint", "sh", "--", "-euc", SCRIPT],
                                    stdout=subprocess.PIPE, text=True, check=True)
            print(f"{result.stdout}\nthe image was made in {made:.0f} s")
        self.assertRegex(result.stdout, r"(?m)^lockstep \d+\.\d+\.\d+$")
        self.assertRegex(result.stdout, r"(?m)^tiny  +The model")
        self.assertTrue(re.search(r"^Alice .{20}", result.stdout, re.M | re.S))


if __name__ == "__main__":
    unittest.main(verbosity=2)  # prints the reason for a skip
