"""The same GPT, weights and tokens in Megatron Core 0.16.1 and here, on two ranks without the
distributed optimizer: the gradients of the first step, gradient norms and ten losses agree.

Skipped if Megatron Core is not installed (scripts/setup megatron)."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

from support import BUILD, clean_environment, free_port, launch, megatron_python

HERE = pathlib.Path(__file__).resolve().parent


@unittest.skipUnless(megatron_python(), "megatron-core is not installed: run scripts/setup megatron")
class Megatron(unittest.TestCase):
    def test_gradients_and_ten_losses_agree(self):
        import torch
        with tempfile.TemporaryDirectory() as folder:
            ours_file, theirs_file = (pathlib.Path(folder) / name for name in ("ours", "theirs"))
            ran = launch(2, BUILD / "tests/gpt_steps", ours_file)
            self.assertEqual(ran.returncode, 0, ran.stderr.decode())
            ran = subprocess.run(
                [megatron_python(), "-W", "ignore", "-m", "torch.distributed.run",
                 "--nproc-per-node", "2", "--master-port", str(free_port()),
                 HERE / "megatron_gpt.py", ours_file, theirs_file],
                capture_output=True, timeout=300, env=clean_environment(), check=False)
            self.assertEqual(ran.returncode, 0, ran.stderr.decode())
            ours, theirs = (torch.load(file, weights_only=False) for file in (ours_file, theirs_file))
        names = [key for key in theirs if key.startswith("gradient ")]
        self.assertEqual(len(names), 2 * 6 + 2)
        for name in names:
            most = theirs[name].abs().max()
            self.assertGreater(most, 1e-6, name)
            apart = (ours[name].view_as(theirs[name]) - theirs[name]).abs().max() / most
            self.assertLess(apart, 1e-5, name)
        for curve in ("losses", "norms"):
            self.assertEqual(len(theirs[curve]), 10)
            apart = ((ours[curve] - theirs[curve]) / theirs[curve]).abs().max()
            self.assertLess(apart, 1e-5, f"{curve}: {ours[curve]} {theirs[curve]}")
        self.assertLess(theirs["losses"][9], theirs["losses"][0] - 0.1)


if __name__ == "__main__":
    sys.exit(unittest.main())
