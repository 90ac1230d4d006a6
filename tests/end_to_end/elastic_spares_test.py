"""lockstep launch --spares: waiting processes replace lost ranks, without a restart.

LOCKSTEP_ELASTIC_SEED sets when which ranks are killed (default 1)."""

import os
import pathlib
import signal
import time
import unittest

from elastic_copies_test import COPIES, IN_MEMORY
from elastic_test import COMMON, Elastic, numbers_of, settings
from small_ranks import alive
from support import LOCKSTEP, run


def variable(pid, name):
    for pair in pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0"):
        if pair.startswith(name + "="):
            return pair[len(name) + 1:]
    return None


class Spares(Elastic):
    def spares(self):
        return [pid for pid in self.ranks() if variable(pid, "LOCKSTEP_SPARE_OF")]

    def begin_held(self, ranks, spares, *pairs, **more):
        """Starts a run whose ranks are suspended until its spares are ready; returns the processes
        of both. So the run is short, however long the spares take to start."""
        self.begin(ranks, *pairs, options=("--spares", spares), **more)
        self.wait_for(lambda: len(self.ranks()) == ranks + spares)
        started = self.ranks()
        self.kill(*started[:ranks], number=signal.SIGSTOP)
        for spare in started[ranks:]:
            self.wait_for(lambda spare=spare: self.is_ready(spare))
        self.assertEqual(self.spares(), started[ranks:])
        return started[:ranks], started[ranks:]

    def release(self, ranks):
        self.kill(*ranks, number=signal.SIGCONT)

    def is_ready(self, spare):
        """Returns whether a spare waits: it catches SIGTERM and uses no processor time."""
        status = pathlib.Path(f"/proc/{spare}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return caught >> (signal.SIGTERM - 1) & 1 and not self.trains(spare)

    def trains(self, pid):
        """Returns whether a process uses processor time; a waiting one uses none."""
        def ticks():
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            return int(fields[11]) + int(fields[12])
        before = ticks()
        time.sleep(0.5)
        return ticks() > before

    def lose(self, number, *victims):
        """Kills ranks during the run; round `number` begins."""
        self.wait_for_iteration(self.last_iteration() + self.random.randint(3, 9))
        time.sleep(self.random.uniform(0, 0.05))
        before = self.ranks()
        self.kill(*victims)
        self.wait_for_round(number)
        return self.check_stay(before, *victims)


class TakingPart(Spares):
    def test_spares_replace_ranks_bit_for_bit_until_none_is_left(self):
        """Without a restart. After that, fewer ranks continue."""
        ranks, spares = self.begin_held(3, 2)
        self.assertEqual([variable(pid, "LOCKSTEP_SPARE_OF") for pid in spares], ["3", "3"])
        self.release(ranks)
        self.wait_for_round(0)
        left = self.lose(1, ranks[1])
        self.assertEqual(sorted(left), sorted([ranks[0], ranks[2], *spares]))  # no new process
        left = self.lose(2, ranks[0])
        self.assertEqual(sorted(left), sorted([ranks[2], *spares]))
        self.assertIn("ranks that stay: 2, spares that take part: 1", self.told())
        same = self.last_iteration()
        left = self.lose(3, spares[0])
        self.assertEqual(sorted(left), sorted([ranks[2], spares[1]]))
        self.assertIn("continuing with 2 ranks (before: 3, spare: 0)", self.told())
        self.check_done()
        self.check_like_one_process()
        self.assertEqual(numbers_of(self.output)[:same], self.undisturbed(3)[:same])

    def test_several_at_once_and_a_restart_for_those_that_no_spare_replaces(self):
        pairs = ("ddp.use_distributed_optimizer=true", "model.hidden_dropout=0.1")
        self.begin(4, *pairs, options=("--spares", 2, "--max-restarts", 1), iterations=150)
        self.wait_for_round(0)
        ranks, spares = self.ranks(), self.spares()
        victims = [pid for pid in ranks if pid not in spares][1:4]
        left = self.lose(1, *victims)
        self.assertIn("ranks that stay: 3, ranks restarted: 1 (restart 1 of 1)", self.told())
        self.assertEqual([pid for pid in spares if pid in left], spares)
        self.wait_for(lambda: len(self.spares()) == 4)  # two of the first ones, and two new ones
        self.lose(2, spares[1])
        self.assertIn("ranks that stay: 3, spares that take part: 1", self.told())
        self.check_done()
        self.check_bit_for_bit(4, *pairs, iterations=150)

    def test_new_spares_start_while_restarts_are_left(self):
        self.begin(2, "parallel.distributed_timeout_seconds=60", iterations=100000,
                   options=("--spares", 1, "--max-restarts", 1), without="parallel.distributed")
        self.wait_for_round(0)
        ranks = self.ranks()
        left = self.lose(1, ranks[0])
        self.kill(*left, number=signal.SIGSTOP)  # otherwise they would train all the time
        self.wait_for(lambda: "new spares: 1 (restart 1 of 1)" in self.told())
        self.wait_for(lambda: len(self.ranks()) == 3)
        self.kill(*left, number=signal.SIGCONT)
        new = [pid for pid in self.ranks() if pid not in left]
        self.lose(2, ranks[1])
        self.assertEqual(sorted(self.ranks()), sorted([self.spares()[0], *new]))
        self.process.terminate()
        self.check_done(status=3)

    def test_the_newest_copy_in_memory_is_where_they_begin(self):
        self.begin(3, *COPIES, options=("--spares", 2), without="checkpoint.save_interval")
        self.wait_for_round(0)
        for number in range(2):
            self.wait_for_iteration(self.last_iteration() + 5)
            ranks = [pid for pid in self.ranks() if variable(pid, "RANK") == str(number)]
            at = self.last_iteration()
            self.kill(ranks[0])
            self.wait_for_round(number + 1)
            loaded = int(self.told().rsplit(IN_MEMORY, 1)[1].split("\n")[0])
            self.assertGreaterEqual(loaded, at - 1, self.told())
        self.check_done()
        self.check_bit_for_bit(3, *COPIES)

    def test_copies_that_are_all_lost_are_told(self):
        self.begin(2, *COPIES, options=("--spares", 2))
        self.wait_for_round(0)
        ranks = [pid for pid in self.ranks() if pid not in self.spares()]
        self.wait_for_iteration(9)
        self.kill(*ranks)
        self.wait_for_round(1)
        self.assertIn("no surviving rank has a copy of the state; the run does not resume from "
                      "the ranks' memory", self.told())
        self.assertRegex(self.told(), r"loaded \S+/step_(8|12), iteration")
        self.check_done()
        self.check_bit_for_bit(2, *COPIES)

    def test_none_takes_part_where_none_is_lost(self):
        self.check_failure_without_loss("--spares", 1)

    def test_a_rank_that_stops_is_replaced(self):
        self.begin(3, options=("--spares", 1))
        self.wait_for_round(0)
        ranks = self.ranks()
        self.wait_for_iteration(6)
        self.kill(ranks[1], number=signal.SIGSTOP)
        self.wait_for_round(1)
        self.assertIn("spares that take part: 1", self.told())
        self.check_done()
        self.check_bit_for_bit(3)


class Waiting(Spares):
    def end_of(self, pid):
        deadline = time.monotonic() + 20
        while alive(pid):
            self.assertLess(time.monotonic(), deadline, self.told())
            time.sleep(0.01)

    def test_they_end_with_the_run_and_say_nothing(self):
        for end, status in ((None, 0), (signal.SIGTERM, 3), (signal.SIGINT, 3)):
            with self.subTest(end=end):
                self.output = self.folder / str(status) / str(end)
                self.begin(2, options=("--spares", 2), iterations=20 if end is None else 100000)
                self.wait_for_round(0)
                spares = self.spares()
                self.wait_for_iteration(4)
                if end is not None:
                    self.process.send_signal(end)
                self.check_done(status=status)
                self.assertNotIn("spare", self.told())
                for pid in spares:
                    self.end_of(pid)

    def test_one_that_is_lost_changes_nothing(self):
        ranks, (spare,) = self.begin_held(2, 1)
        self.kill(spare)
        told = f"a spare rank (process {spare}) was killed by signal 9"
        self.wait_for(lambda: told in self.told())
        self.release(ranks)
        self.check_done()
        self.assertNotIn("ranks that stay", self.told())
        self.check_bit_for_bit(2)

    def test_sigterm_to_one_is_ignored(self):
        ranks, (spare,) = self.begin_held(2, 1)
        for pause in (0, 1.2):  # two within a second count as one
            time.sleep(pause)
            self.kill(spare, number=signal.SIGTERM)
        self.release(ranks)
        self.wait_for_round(0)
        self.lose(1, ranks[1])
        self.assertIn("ranks that stay: 1, spares that take part: 1", self.told())
        self.check_done()
        self.check_bit_for_bit(2)

    def test_launch_reads_every_option_of_train(self):
        """Otherwise it would not know that the run is elastic, and would refuse spares."""
        for words in (("--output", self.output), ("--task", "pretrain"), ("--profile", "1:2")):
            folder = () if words[0] == "--output" else ("--output", self.output)
            with self.subTest(words):
                result = run(LOCKSTEP, "launch", "-n", 2, "--spares", 1, "--", "train", *words,
                             self.config, *folder, *settings(*COMMON, "train.train_iters=2"))
                self.assertEqual(result.returncode, 0, result.stderr)

    def end_in_time(self, spare, iterations, seconds=8):
        """The run ends after its last line, before the time at which stuck processes are killed."""
        self.wait_for_iteration(iterations)
        began = time.monotonic()
        self.check_done()
        self.assertLess(time.monotonic() - began, seconds, self.told())
        self.end_of(spare)

    def test_the_end_of_the_run_waits_for_none_that_is_suspended(self):
        for ready in (False, True):
            with self.subTest(ready=ready):
                self.output = self.folder / str(ready)
                if ready:
                    ranks, (spare,) = self.begin_held(2, 1, iterations=20)
                else:
                    self.begin(2, options=("--spares", 1), iterations=20)
                    self.wait_for(lambda: len(self.ranks()) == 3 and self.spares())
                    spare = self.spares()[0]
                self.kill(spare, number=signal.SIGSTOP)
                if ready:
                    self.release(ranks)
                self.end_in_time(spare, 20)

    def slow_spares(self, seconds):
        """Returns a program whose spares take `seconds` to start. They wait at a pipe, because a
        `sleep` process would outlive a shell that is killed."""
        path, pipe = self.folder / "slow", self.folder / "pipe"
        os.mkfifo(pipe)
        path.write_text(f"""#!/bin/bash
if [ -n "$LOCKSTEP_SPARE_OF" ]; then
  exec 3<>"{pipe}"
  read -t {seconds} -u 3
  exec 3>&-
fi
exec "{LOCKSTEP}" "$@"
""")
        path.chmod(0o755)
        return "--program", path

    def test_the_end_of_the_run_waits_for_none_that_starts(self):
        self.begin(2, options=("--spares", 1, *self.slow_spares(60)), iterations=20)
        self.wait_for(self.spares)
        self.end_in_time(self.spares()[0], 20)

    def test_a_restart_does_not_wait_for_one_that_starts(self):
        self.begin(2, options=("--spares", 1, "--max-restarts", 1, *self.slow_spares(60)))
        self.wait_for_round(0)
        ranks = [pid for pid in self.ranks() if pid not in self.spares()]
        self.wait_for_iteration(8)
        began = time.monotonic()
        self.kill(ranks[1])
        self.wait_for_round(1)
        self.assertLess(time.monotonic() - began, 30)  # it would take 60 seconds
        self.assertIn("ranks that stay: 1, ranks restarted: 1 (restart 1 of 1)", self.told())
        self.check_done()
        self.check_bit_for_bit(2)

    def test_without_a_restart_a_loss_waits_for_one_that_starts(self):
        self.begin(2, options=("--spares", 1, *self.slow_spares(5)), iterations=2000)
        self.wait_for_round(0)
        ranks = [pid for pid in self.ranks() if pid not in self.spares()]
        self.kill(ranks[0])
        self.wait_for_round(1)
        self.assertIn("ranks that stay: 1, spares that take part: 1", self.told())
        self.process.terminate()
        self.check_done(status=3)

    def test_a_loss_does_not_wait_forever(self):
        self.begin(2, "parallel.distributed_timeout_seconds=1",
                   options=("--spares", 1, *self.slow_spares(100)),
                   without="parallel.distributed_timeout")
        self.wait_for_round(0)
        ranks = [pid for pid in self.ranks() if pid not in self.spares()]
        self.kill(ranks[0])
        self.wait_for(lambda: "continuing with 1 rank" in self.told())
        self.assertIn("does not start in time; killing it", self.told())
        self.check_done()
        self.check_like_one_process()

    def test_the_run_meets_without_one_that_never_gets_ready(self):
        self.begin(3, options=("--spares", 1), iterations=100)
        self.wait_for(lambda: len(self.ranks()) == 4 and self.spares())
        spare = self.spares()[0]
        self.kill(spare, number=signal.SIGSTOP)
        self.wait_for_round(0)
        ranks = [pid for pid in self.ranks() if pid != spare]
        self.wait_for_iteration(8)
        self.kill(ranks[2])
        self.wait_for_round(1)
        self.assertIn("continuing with 2 ranks", self.told())
        self.check_done()
        self.check_like_one_process()

    def test_what_cannot_have_spares_is_refused(self):
        result = run(LOCKSTEP, "launch", "-n", 2, "--spares", 1, "--", "train", self.config,
                     *settings(*COMMON, "optimizer.lr=-1"))
        self.assert_failed(result, 2, "optimizer.lr: found -1")
        for words, elastic in ((("--spares", 1), "none"),
                               (("--spares", 1, "--starter", "torchrun"), "dp"),
                               (("--spares", -1), "dp"), (("--spares", "x"), "dp")):
            result = run(LOCKSTEP, "launch", "-n", 2, *words, "--", "train", self.config,
                         *settings(*COMMON, f"train.elastic={elastic}"))
            self.assertEqual(result.returncode, 2, (words, result.stderr))
            self.assertRegex(result.stderr.decode(), f"--spares: found '?{words[1]}")


if __name__ == "__main__":
    unittest.main()
