"""A run that is killed again and again, at least every fourth time inside a save. After each start
it resumes from its last checkpoint, and its losses are those of an undisturbed run, bit for bit.
The program gets few kills here; tests/checkpoint/kill_test.cpp makes many.

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

    def assert_running(self, processes):
        for process in processes:
            if process.poll() is not None:
                self.fail(f"ended with {process.returncode}: {process.communicate()[1].decode()}")

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
            self.assert_running(processes)
            time.sleep(0.005)
        time.sleep(moment)

    def is_saving(self, folder):
        return any(folder.glob("step_*.partial"))

    def wait_for_save(self, folder, processes, moments):
        """Waits until a checkpoint is being written, and some milliseconds more inside a save."""
        deadline = time.monotonic() + 60
        while True:
            if self.is_saving(folder):
                time.sleep(moments.uniform(0, 0.01))
                if self.is_saving(folder):
                    return
            self.assertLess(time.monotonic(), deadline)
            self.assert_running(processes)
            time.sleep(0.001)

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
            in_save = kill % 4 == 3 or moments.random() < 0.6
            if in_save:
                self.wait_for_save(folder, processes, moments)
            inside += in_save or self.is_saving(folder)
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
