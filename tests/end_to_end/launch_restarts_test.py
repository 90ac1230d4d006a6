"""`lockstep launch --max-restarts`: failed ranks are started again, and a training resumes from its
own newest checkpoint."""

import os
import pathlib
import signal
import subprocess
import time
import unittest

from small_ranks import TOGETHER, SmallRanks
from support import LOCKSTEP, EndToEnd, clean_environment, end, metrics, run


class Restarts(SmallRanks):
    def test_ranks_are_started_again_as_often_as_asked(self):
        fails_twice = TOGETHER + """
with open(folder / (rank + ".starts"), "a") as file:
    file.write(" ".join(os.environ[name] for name in (
        "TORCHELASTIC_RESTART_COUNT", "LOCKSTEP_JOB_ID")) + chr(10))
if rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] < "2": sys.exit(5)
if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2": time.sleep(60)
"""
        for allowed, status, starts in ((1, 5, 2), (2, 0, 3), (9, 0, 3)):
            for rank in range(2):
                self.do(rank, fails_twice)
                (self.folder / f"{rank}.starts").unlink(missing_ok=True)
            result = self.launch(2, options=["--max-restarts", allowed])
            self.assertEqual(result.returncode, status, result.stderr)
            told = result.stderr.decode()
            self.assertEqual(told.count("exited with status 5; ending the other ranks"),
                             min(starts, 2))
            self.assertEqual(told.count("lockstep launch: restarting all ranks (restart "),
                             starts - 1)
            lines = (self.folder / "1.starts").read_text().splitlines()
            self.assertEqual([line.split(" ", 1)[0] for line in lines],
                             [str(start) for start in range(starts)])
            self.assertEqual(len({line.split(" ", 1)[1] for line in lines}), 1)

    def test_ranks_that_a_new_start_would_not_help_are_not_started_again(self):
        for code in (0, 2, 3, 4):
            self.do(0, f"(folder / 'starts').open('a').write('x'); sys.exit({code})")
            result = self.launch(1, options=["--max-restarts", 3])
            self.assertEqual(result.returncode, code)
            self.assertEqual((self.folder / "starts").read_text(), "x")
            (self.folder / "starts").unlink()
        self.do(0, "(folder / 'starts').open('a').write('x'); (folder / '0.ready').touch(); "
                   "time.sleep(60)")
        process = subprocess.Popen(self.command(1, options=["--max-restarts", 3]),
                                   env=clean_environment(), stderr=subprocess.DEVNULL)
        self.addCleanup(end, process)
        self.wait_for_files(1, "ready")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=60), 1)
        self.assertEqual((self.folder / "starts").read_text(), "x")

    def test_a_rank_that_fails_at_the_end_of_a_run_starts_nothing_again(self):
        """Rank 0 has stopped or diverged, as all ranks were about to; rank 1 fails after that."""
        for code in (3, 4):
            result = self.launch_one_after_the_other(code, 1)
            self.assertEqual(result.returncode, 1, result.stderr)

    def test_of_ranks_that_stop_or_diverge_the_first_gives_the_status(self):
        for first, second in ((3, 4), (4, 3)):
            result = self.launch_one_after_the_other(first, second)
            self.assertEqual(result.returncode, first, result.stderr)

    def launch_one_after_the_other(self, first, second):
        """Rank 0 ends with status `first`; then rank 1 ends with `second`, and nothing restarts."""
        for path in self.folder.glob("*start*"):
            path.unlink()
        self.do(0, f"sys.exit({first})")
        self.do(1, f"""
(folder / "starts").open("a").write("x")
first = folder / "0.started"
while not first.exists(): time.sleep(0.01)
while pathlib.Path("/proc", str(json.loads(first.read_text())["process"])).exists():
    time.sleep(0.01)
sys.exit({second})
""")
        result = self.launch(2, options=["--max-restarts", 3])
        self.assertEqual((self.folder / "starts").read_text(), "x")
        return result


class UnreadErrors(SmallRanks):
    """Nobody reads what the launcher tells."""

    def launch_unread(self, *command, **options):
        """Starts it with a standard error whose reader has left; returns its exit status."""
        reader, writer = os.pipe()
        os.close(reader)
        try:
            process = subprocess.Popen([*map(str, command)], stderr=writer,
                                       env=clean_environment(), **options)
        finally:
            os.close(writer)
        self.addCleanup(end, process)
        return process.wait(timeout=60)

    def test_a_run_whose_rank_is_killed_goes_on(self):
        self.do(1, """
(folder / "starts").open("a").write("x")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os.kill(os.getpid(), signal.SIGKILL)
""")
        self.assertEqual(self.launch_unread(*self.command(2, options=["--max-restarts", 1])), 0)
        self.assertEqual((self.folder / "starts").read_text(), "xx")

    def test_ranks_find_sigpipe_as_the_launcher_did(self):
        self.program.write_text("#!/bin/sh\ngrep SigIgn: /proc/self/status >\"$1/ignored\"\n")
        for ignored in (False, True):
            # Python ignores the signal itself, and restores it for its children by default.
            self.assertEqual(self.launch_unread(*self.command(1), restore_signals=not ignored), 0)
            mask = int((self.folder / "ignored").read_text().split()[1], base=16)
            self.assertEqual(mask >> (signal.SIGPIPE - 1) & 1, ignored)


class RestartedTraining(EndToEnd):
    def losses(self, name):
        return [line["lm_loss"] for line in metrics(self.folder / name)[0]]

    def begin_with_restarts(self, output, *arguments):
        process = subprocess.Popen(
            [*map(str, (LOCKSTEP, "launch", "-n", 2, "--max-restarts", 9, "--", "train",
                        self.config, "--output", output, "--set", "train.train_iters=300",
                        "--set", "checkpoint.save_interval=7", *arguments))],
            env=clean_environment(), stderr=subprocess.PIPE)
        self.addCleanup(end, process)
        return process

    def ranks_of(self, process):
        """Returns the processes of the running ranks."""
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return [int(child) for child in children.read_text().split()]

    def iterations(self, output):
        return metrics(output)[0] if (output / "metrics.jsonl").exists() else []

    def kill_a_rank(self, process, output, rank, newer_than):
        """Kills a rank once the run has reached iteration `newer_than`; returns its iteration."""
        deadline = time.monotonic() + 120
        while True:
            lines = self.iterations(output)
            if lines and lines[-1]["iteration"] >= newer_than and len(self.ranks_of(process)) == 2:
                break
            self.assertIsNone(process.poll(), "the run has ended")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.002)
        os.kill(self.ranks_of(process)[rank], signal.SIGKILL)
        return lines[-1]["iteration"]

    def test_a_run_whose_ranks_are_killed_goes_on_by_itself_bit_for_bit(self):
        whole = self.run_whole("--output", self.folder / "whole", "--set", "train.train_iters=300")
        self.assertEqual(whole.returncode, 0, whole.stderr)
        output = self.folder / "killed"
        process = self.begin_with_restarts(output)
        at = 0
        for rank in (1, 0, 1):
            at = self.kill_a_rank(process, output, rank, at + 15)
        error = process.communicate(timeout=240)[1].decode()
        self.assertEqual(process.returncode, 0, error)
        self.assertEqual(error.count("restarting all ranks"), 3)
        self.assertEqual(error.count(f"loaded {output}/checkpoint/step_"), 3, error)
        self.assertEqual(self.losses("killed"), self.losses("whole"))
        self.assertEqual(run(LOCKSTEP, "checkpoint", "verify", output / "checkpoint").returncode, 0)

    def test_a_new_start_takes_no_checkpoint_of_another_job(self):
        output = self.folder / "run"
        other = self.run_whole("--output", output, "--set", "train.train_iters=40")
        self.assertEqual(other.returncode, 0, other.stderr)
        (output / "metrics.jsonl").unlink()
        process = self.begin_with_restarts(output, "--set", "train.seed=5",
                                           "--set", "checkpoint.save_interval=250")
        self.kill_a_rank(process, output, 0, 1)
        error = process.communicate(timeout=240)[1].decode()
        self.assertEqual(process.returncode, 0, error)
        self.assertNotIn("loaded ", error)
        self.assertEqual([line["iteration"] for line in self.iterations(output)],
                         list(range(1, 301)))

    def run_whole(self, *arguments):
        return run(LOCKSTEP, "launch", "-n", 2, "--starter", "own", "--", "train", self.config,
                   *arguments)


if __name__ == "__main__":
    unittest.main()
