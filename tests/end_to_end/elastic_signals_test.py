"""train.elastic = dp when signals stop or end ranks, spares and the launcher itself: what
continues, with which status the launcher ends, and what it says.

LOCKSTEP_ELASTIC_SEED sets when ranks are killed (default 1)."""

import os
import pathlib
import signal
import time
import unittest

from elastic_test import COMMON, LARGE, TIMEOUT, Elastic, settings
from support import LOCKSTEP, TORCHRUN, run


class Signals(Elastic):
    def check_nobody_is_left(self):
        self.assertEqual(self.process.wait(timeout=60), 1, self.told())
        self.assertRegex(self.told().splitlines()[-1],
                         "^lockstep launch: no rank is left; the newest complete checkpoint is "
                         f"'{self.output}/checkpoint/step_[0-9]+'$")


class Stopped(Signals):
    def lose_all_but_a_stopped_one(self, **options):
        self.begin(3, iterations=8, **options)
        self.wait_for(lambda: len(self.ranks()) == 3)
        ranks = self.ranks()
        time.sleep(0.05)
        self.kill(ranks[1], number=signal.SIGSTOP)
        self.kill(ranks[0], ranks[2])

    def test_the_only_rank_left_before_the_ranks_have_met_is_killed(self):
        self.lose_all_but_a_stopped_one()
        self.assertEqual(self.process.wait(timeout=TIMEOUT + 15), 1, self.told())
        self.assertRegex(self.told(), r"rank 1 \(process \d+\) is stopped; killing it")
        self.assertIn("lockstep launch: no rank is left; no checkpoint has been saved", self.told())

    def test_then_a_restart_starts_all_again(self):
        self.lose_all_but_a_stopped_one(options=("--max-restarts", 1))
        self.check_done()
        self.assertIn("restarting all ranks (restart 1 of 1)", self.told())

    def test_sigterm_to_the_launcher_ends_a_stopped_rank_too(self):
        self.begin(2, iterations=4000)
        self.wait_for_iteration(5)
        for rank in self.ranks():
            self.kill(rank, number=signal.SIGSTOP)
        time.sleep(0.2)
        self.process.send_signal(signal.SIGTERM)
        self.assertEqual(self.process.wait(timeout=8), 3, self.told())

    def begin_with_spare(self, iterations):
        """Returns the processes of two active ranks and a spare."""
        self.begin(4, *LARGE, iterations=iterations)
        self.wait_for_iteration(5)
        ranks = self.ranks()
        self.kill(ranks[1])
        self.wait_for_round(1)
        self.assertIn("continuing with 2 ranks (before: 4, spare: 1)", self.told())
        return ranks[0], ranks[2], ranks[3]

    def test_a_stopped_spare_does_not_take_part(self):
        first, second, spare = self.begin_with_spare(100)
        self.kill(spare, number=signal.SIGSTOP)
        self.kill(second)
        self.wait_for_round(2)
        self.assertRegex(self.told(), r"a spare rank \(process \d+\) is stopped; killing it")
        self.assertIn("continuing with 1 rank (before: 2, spare: 0)", self.told())
        self.assertEqual(self.ranks(), [first])
        self.check_done()
        self.check_like_one_process(*LARGE)

    def test_a_stopped_spare_that_is_left_alone_is_killed(self):
        first, second, spare = self.begin_with_spare(4000)
        self.kill(spare, number=signal.SIGSTOP)
        self.kill(first, second)
        self.check_nobody_is_left()

    def test_a_lost_spare_does_not_change_the_status(self):
        _, _, spare = self.begin_with_spare(100)
        self.kill(spare)
        self.check_done(status=0)
        self.assertRegex(self.told(), r"a spare rank \(process \d+\) was killed by signal 9")
        self.check_like_one_process(*LARGE)


class Ended(Signals):
    def wait_until_sigterm_is_taken(self):
        """Until the launcher blocks SIGTERM in order to take it, the signal kills it."""
        def is_blocked():
            status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
            blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
            return blocked >> (signal.SIGTERM - 1) & 1
        self.wait_for(is_blocked)

    def test_sigterm_to_the_launcher_after_a_loss_is_a_stop(self):
        for restarts in (0, 3):
            for delay in (0, 0.1, 0.3, 0.5):
                with self.subTest(restarts=restarts, delay=delay):
                    self.output = self.folder / f"run {restarts} {delay}"
                    self.begin(3, options=("--max-restarts", restarts), iterations=4000)
                    self.wait_for_iteration(6)
                    self.kill(self.ranks()[1])
                    time.sleep(delay)
                    self.process.send_signal(signal.SIGTERM)
                    self.check_done(status=3)
                    self.assertNotIn("the run cannot continue", self.told())

    def test_sigterm_to_the_launcher_at_the_start_is_a_stop(self):
        for delay in (0.05, 0.2, 0.4, 0.6):
            with self.subTest(delay):
                self.output = self.folder / f"run {delay}"
                self.begin(3, iterations=4000)
                self.wait_until_sigterm_is_taken()
                time.sleep(delay)
                self.process.send_signal(signal.SIGTERM)
                self.check_done(status=3)

    def test_when_all_are_lost_the_last_line_names_the_checkpoint(self):
        self.begin(2, iterations=4000)
        self.wait_for_iteration(10)
        self.kill(*self.ranks())
        self.check_nobody_is_left()


class Surroundings(Elastic):
    def test_a_secret_whose_file_has_gone_is_kept_and_handed_on(self):
        secret = self.folder / "secret"
        for restarts in (0, 1):
            with self.subTest(restarts):
                self.output = self.folder / f"run {restarts}"
                secret.touch(mode=0o600)
                secret.write_text("what all ranks of this test know\n")
                self.begin(3, options=("--max-restarts", restarts), iterations=60,
                           LOCKSTEP_SECRET_FILE=secret)
                self.wait_for_iteration(6)
                secret.unlink()
                self.kill(self.ranks()[1])
                self.check_done()
                self.assertIn("restart 1 of 1" if restarts else "continuing with 2 ranks",
                              self.told())

    def test_under_torchrun_launch_says_that_no_rank_stays(self):
        result = run(LOCKSTEP, "launch", "-n", 2, "--starter", "torchrun", "--", "train",
                     self.config, "--output", self.output,
                     *settings(*COMMON, "train.train_iters=2"),
                     PATH=f"{TORCHRUN.parent}:{os.environ['PATH']}")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(b"with --starter torchrun a lost rank ends all ranks", result.stderr)


if __name__ == "__main__":
    unittest.main()
