"""A job of two torchruns, as on two hosts, whose ranks are killed: each torchrun counts only the
failures of its own rank, and all ranks resume together."""

import os
import pathlib
import signal
import subprocess
import time
import unittest

from support import LOCKSTEP, TORCHRUN, EndToEnd, clean_environment, end, free_port, metrics, run


class TwoTorchruns(EndToEnd):
    def begin(self, port, output):
        """Starts a torchrun with one rank."""
        process = subprocess.Popen(
            [*map(str, (TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d",
                        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job",
                        "--max-restarts", 3, "--no-python", LOCKSTEP, "train", self.config,
                        "--output", output, "--set", "train.train_iters=200",
                        "--set", "checkpoint.save_interval=7"))],
            env=clean_environment(OMP_NUM_THREADS=1), stderr=subprocess.PIPE)
        self.addCleanup(end, process)
        self.addCleanup(process.stderr.close)
        return process

    def rank_of(self, torchrun):
        children = pathlib.Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
        return children.read_text().split()

    def kill_rank_of(self, torchrun, output, newer_than):
        """Kills its rank once the run has reached an iteration; returns that iteration."""
        deadline = time.monotonic() + 120
        while True:
            lines = metrics(output)[0] if (output / "metrics.jsonl").exists() else []
            victims = self.rank_of(torchrun)
            if lines and lines[-1]["iteration"] >= newer_than and victims:
                break
            self.assertIsNone(torchrun.poll(), "the run has ended")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.005)
        os.kill(int(victims[-1]), signal.SIGKILL)
        return lines[-1]["iteration"]

    def test_ranks_that_are_killed_resume_bit_for_bit(self):
        whole = run(LOCKSTEP, "launch", "-n", 2, "--", "train", self.config, "--output",
                    self.folder / "whole", "--set", "train.train_iters=200",
                    "--set", "checkpoint.save_interval=7")
        self.assertEqual(whole.returncode, 0, whole.stderr)
        output, port = self.folder / "killed", free_port()
        torchruns = [self.begin(port, output) for _ in range(2)]
        at = 0
        for victim in torchruns:  # their counts of restarts differ after the first
            at = self.kill_rank_of(victim, output, at + 15)
        errors = [torchrun.communicate(timeout=240)[1].decode() for torchrun in torchruns]
        self.assertEqual([torchrun.returncode for torchrun in torchruns], [0, 0], errors)
        self.assertEqual("".join(errors).count(f"loaded {output}/checkpoint/step_"), 2, errors)
        losses = [[line["lm_loss"] for line in metrics(self.folder / name)[0]]
                  for name in ("killed", "whole")]
        self.assertEqual(losses[0], losses[1])


if __name__ == "__main__":
    unittest.main()
