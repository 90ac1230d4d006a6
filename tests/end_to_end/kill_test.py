"""A run that is killed again and again, also during saves. After each start it resumes from its
last checkpoint, and its losses are those of an undisturbed run, bit for bit. The program gets few
kills here; tests/checkpoint/kill_test.cpp makes many.

LOCKSTEP_KILLS sets the number of kills (default 4)."""

import os
import random
import time
import unittest

from support import LOCKSTEP, Ranks, metrics, run

KILLS = int(os.environ.get("LOCKSTEP_KILLS", "4"))
SEED = int(os.environ.get("LOCKSTEP_KILL_SEED", "1"))
ITERATIONS = 4000


class Kills(Ranks):
    settings = ("--set", "ddp.use_distributed_optimizer=true", "--set", "checkpoint.keep=2",
                "--set", "checkpoint.save_interval=3", "--set", "train.eval_iters=0",
                "--set", "parallel.distributed_timeout_seconds=20")

    def iterations(self, output):
        try:
            return metrics(output)[0]
        except FileNotFoundError:
            return []

    def wait_for_progress(self, output, processes, moment):
        """Waits until the run has written another iteration, and `moment` seconds more."""
        def written():
            try:  # a run that starts anew removes the file
                return (output / "metrics.jsonl").stat().st_mtime_ns
            except FileNotFoundError:
                return 0
        before = written()
        deadline = time.monotonic() + 60
        while written() in (0, before) or not self.iterations(output):
            self.assertLess(time.monotonic(), deadline)
            for process in processes:
                if process.poll() is not None:
                    self.fail(f"ended with {process.returncode}: {process.communicate()[1].decode()}")
            time.sleep(0.005)
        time.sleep(moment)

    def wait_for_save(self, folder, moment):
        """Waits until a checkpoint is being written, and `moment` seconds more."""
        deadline = time.monotonic() + 20
        while not list(folder.glob("step_*.partial")) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moment)

    def test_every_life_goes_on_from_the_last_checkpoint(self):
        moments = random.Random(SEED)
        output = self.folder / "out"
        folder = output / "checkpoint"
        inside = 0
        for kill in range(KILLS):
            processes = self.start(
                2, "--output", output, *self.settings, "--set", f"checkpoint.load={folder}",
                "--set", "checkpoint.load_if_present=true",
                "--set", f"train.train_iters={ITERATIONS}",
                "--set", f"checkpoint.async_save={'true' if kill % 2 else 'false'}")
            self.wait_for_progress(output, processes, moments.uniform(0, 0.2))
            if moments.random() < 0.6:
                self.wait_for_save(folder, moments.uniform(0, 0.01))
            inside += bool(list(folder.glob("step_*.partial")))
            victims = moments.choice(([0], [1], [0, 1]))
            for victim in victims:
                processes[victim].kill()
            for process in processes:
                process.communicate(timeout=40)
            if any(manifest.parent.suffix != ".partial"
                   for manifest in folder.glob("step_*/manifest.textproto")):
                result = run(LOCKSTEP, "checkpoint", "verify", folder)
                self.assertEqual(result.returncode, 0, result.stderr)
        last = self.iterations(output)[-1]["iteration"] + 5
        common = ("--set", f"train.train_iters={last}",
                  "--set", f"optimizer.lr_decay_iters={ITERATIONS}")
        whole = self.folder / "whole"
        # On a slow machine, all kills may come before the first checkpoint.
        for path, more in ((output, ("--set", f"checkpoint.load={folder}", "--set",
                                     "checkpoint.load_if_present=true")),
                           (whole, ("--set", "checkpoint.save_interval=100000"))):
            for process in self.start(2, "--output", path, *self.settings, *common, *more):
                error = process.communicate(timeout=120)[1].decode()
                self.assertEqual(process.returncode, 0, error)
        numbers = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples")
        found, expected = ([[line[name] for name in numbers] for line in self.iterations(path)]
                           for path in (output, whole))
        self.assertEqual(found, expected)
        print(f"{KILLS} kills, {inside} of them inside a save, over {last} iterations")


if __name__ == "__main__":
    unittest.main()
