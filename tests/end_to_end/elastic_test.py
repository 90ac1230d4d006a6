"""train.elastic = dp: ranks that lose others keep their processes, meet again and resume from the
newest checkpoint, with new processes in the lost ranks' places or on fewer ranks.

LOCKSTEP_ELASTIC_SEED sets when which ranks are killed (default 1)."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import time
import unittest

from faults import faults
from flipped_bit_test import NAME, flip_in_memory, tensor_bytes
from small_ranks import alive
from support import LOCKSTEP, EndToEnd, clean_environment, end, metrics, run, torchrun

SEED = int(os.environ.get("LOCKSTEP_ELASTIC_SEED", "1"))
TIMEOUT = 6  # seconds for which ranks wait for each other
# A batch for 4, 3, 2 and 1 data-parallel ranks; a learning rate that does not amplify rounding.
COMMON = ("train.elastic=dp", "train.precision=fp64", "optimizer.lr=0.002", "train.eval_iters=0",
          "train.micro_batch_size=1", "train.global_batch_size=12", "train.log_interval=1",
          "checkpoint.save_interval=4", f"parallel.distributed_timeout_seconds={TIMEOUT}")
TP2 = ("parallel.tensor_model_parallel_size=2",)
LARGE = ("train.micro_batch_size=3",)
NUMBERS = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples")


def settings(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


def numbers_of(output):
    return [[line[name] for name in NUMBERS] for line in metrics(output)[0]]


class Elastic(EndToEnd):
    made = {}  # numbers of undisturbed runs, shared by all tests

    def setUp(self):
        super().setUp()
        self.output = self.folder / "run"
        self.random = random.Random(f"{SEED} {self.id()}")

    def begin(self, ranks, *pairs, options=(), iterations=100, without="nothing",
              **environment):
        """Starts a run, without the setting `without`."""
        common = [pair for pair in COMMON if not pair.startswith(without)]
        self.error = self.folder / "stderr"
        with self.error.open("wb") as file:
            self.process = subprocess.Popen(
                [*map(str, (LOCKSTEP, "launch", "-n", ranks, *options, "--", "train", self.config,
                            "--output", self.output)),
                 *settings(*common, f"train.train_iters={iterations}", *pairs)],
                env=clean_environment(**environment), stderr=file, stdout=subprocess.DEVNULL)
        self.addCleanup(end, self.process)

    def told(self):
        return self.error.read_text()

    def wait_for(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertIsNone(self.process.poll(), self.told())
            self.assertLess(time.monotonic(), deadline, self.told())
            time.sleep(0.002)

    def ranks(self):
        """Returns the processes of the running ranks, in the order of their start."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [pid for pid in map(int, children.read_text().split()) if alive(pid)]

    def of_rank(self, ranks, rank):
        """Returns the newest of the processes that were started as that rank."""
        return [pid for pid in ranks
                if f"\0RANK={rank}\0" in pathlib.Path(f"/proc/{pid}/environ").read_text()][-1]

    def last_iteration(self):
        if not (self.output / "metrics.jsonl").exists():
            return 0
        lines = metrics(self.output)[0]
        return lines[-1]["iteration"] if lines else 0

    def wait_for_iteration(self, least):
        self.wait_for(lambda: self.last_iteration() >= least)

    def wait_for_round(self, number):
        """Waits until the run trains in round `number`, from 0."""
        self.wait_for(lambda: self.told().count("training ") > number
                      and "iteration" in self.told().rsplit("training ", 1)[1])

    def kill(self, *victims, number=signal.SIGKILL):
        for victim in victims:
            os.kill(victim, number)

    def check_done(self, status=0):
        self.assertEqual(self.process.wait(timeout=120), status, self.told())
        self.assertEqual([path for path in self.folder.rglob("*")
                          if ".partial" in path.name or path.name == "lock"], [])

    def undisturbed(self, ranks, *pairs, iterations=100):
        """Returns the numbers of an undisturbed run."""
        key = (ranks, pairs, iterations)
        if key not in self.made:
            self.made[key] = self.make_undisturbed(ranks, *pairs, iterations=iterations)
        return self.made[key]

    def make_undisturbed(self, ranks, *pairs, iterations):
        output = self.folder / "undisturbed"
        result = run(LOCKSTEP, "launch", "-n", ranks, "--starter", "own", "--", "train",
                     self.config, "--output", output,
                     *settings(*COMMON, f"train.train_iters={iterations}", *pairs))
        self.assertEqual(result.returncode, 0, result.stderr)
        return numbers_of(output)

    def check_like_one_process(self, *pairs, iterations=100):
        """Losses equal those of one undisturbed process to 1e-12, gradient norms to 1e-11."""
        found, wanted = numbers_of(self.output), self.undisturbed(1, *pairs, iterations=iterations)
        self.assertEqual(len(found), len(wanted))
        for line, other in zip(found, wanted):
            self.assertEqual((line[0], line[3:]), (other[0], other[3:]))
            self.assertLessEqual(abs(line[1] - other[1]), 1e-12 * abs(other[1]), line[0])
            self.assertLessEqual(abs(line[2] - other[2]), 1e-11 * abs(other[2]), line[0])

    def check_bit_for_bit(self, ranks, *pairs, iterations=100):
        self.assertEqual(numbers_of(self.output),
                         self.undisturbed(ranks, *pairs, iterations=iterations))

    def check_stay(self, before, *lost):
        """All of `before` but the lost ones are still running."""
        after = self.ranks()
        self.assertEqual([pid for pid in before if pid not in lost],
                         [pid for pid in after if pid in before], self.told())
        return after

    def check_failure_without_loss(self, *options):
        """Flips a bit of a weight on one rank, twice; one restart is allowed."""
        self.begin(3, "optimizer.lr=0", "optimizer.min_lr=0", "train.replica_check_interval=1",
                   options=("--max-restarts", 1, *options), iterations=100000)
        self.wait_for_iteration(8)
        ranks = self.ranks()
        weight = tensor_bytes(self.output / "checkpoint" / "step_4", NAME)
        for number in range(2):
            self.wait_for_iteration(self.last_iteration() + 5)
            with contextlib.suppress(ProcessLookupError):  # it ends while its memory is searched
                self.assertGreater(flip_in_memory(ranks[1], weight[64:320]), 0)
            if number == 0:
                self.wait_for_round(1)
                self.assertIn("stay: 3, ranks restarted: 0 (restart 1 of 1)", self.told())
                self.assertEqual(self.ranks(), ranks)
        self.check_done(status=1)
        self.assertIn("the run cannot continue: no rank was lost; --max-restarts 1 is exhausted",
                      self.told())


class FewerRanks(Elastic):
    def test_ranks_that_are_left_go_on_until_one_is_left(self):
        self.begin(4)
        ranks, at = None, 0
        for number in range(3):
            self.wait_for_round(number)
            self.wait_for_iteration(at + self.random.randint(1, 20))
            ranks = ranks or self.ranks()
            time.sleep(self.random.uniform(0, 0.05))
            victim = self.random.choice(ranks)
            at = self.last_iteration()
            self.kill(victim)
            self.wait_for_round(number + 1)
            ranks = self.check_stay(ranks, victim)
            self.assertEqual(len(ranks), 3 - number)
            self.assertIn(f"continuing with {3 - number} rank{'s' * (number < 2)} "
                          f"(before: {4 - number}, spare: 0)", self.told())
            loaded = self.told().rsplit("loaded ", 1)[1] if "loaded " in self.told() else ""
            if at >= 8:
                self.assertGreaterEqual(int(loaded.split("iteration ")[1].split("\n")[0]), at - 8)
        self.check_done()
        self.check_like_one_process()

    def test_rank_0_and_two_at_once_with_the_batch_of_the_first_ranks(self):
        text = self.config.read_text()
        self.config.write_text(text.replace("global_batch_size: 8", ""))
        self.begin(4, "train.micro_batch_size=3", without="train.global_batch_size")
        self.wait_for_iteration(6)
        ranks = self.ranks()
        self.kill(ranks[0], ranks[2])
        self.wait_for_round(1)
        self.assertEqual(self.check_stay(ranks, ranks[0], ranks[2]), [ranks[1], ranks[3]])
        self.check_done()
        self.check_like_one_process()

    def test_a_surplus_rank_is_a_spare_and_too_few_ranks_are_an_error(self):
        self.begin(4, *TP2)
        self.wait_for_iteration(6)
        ranks = self.ranks()
        self.kill(ranks[1])
        self.wait_for_round(1)
        self.assertIn("continuing with 2 ranks (before: 4, spare: 1)", self.told())
        self.check_stay(ranks, ranks[1])
        self.kill(ranks[2])
        self.wait_for_round(2)
        self.assertIn("continuing with 2 ranks (before: 2, spare: 0)", self.told())
        self.assertEqual(self.ranks(), [ranks[0], ranks[3]])
        self.wait_for_iteration(self.last_iteration() + 5)
        self.kill(ranks[3])
        self.check_done(status=1)
        self.assertIn("rank 0: the run cannot continue: found 1 rank left, allowed by "
                      "parallel.tensor_model_parallel_size = 2, train.micro_batch_size = 1, "
                      "train.global_batch_size = 12: 2, 4 ranks; the newest complete checkpoint is "
                      f"'{self.output}/checkpoint/step_", self.told())
        self.assertEqual(run(LOCKSTEP, "checkpoint", "verify",
                             self.output / "checkpoint").returncode, 0)

    def test_a_spare_ends_with_the_run(self):
        for number, status in ((None, 0), (signal.SIGTERM, 3)):
            with self.subTest(number):
                self.output = self.folder / f"run {status}"
                self.begin(4, *TP2, *LARGE, iterations=24 if number is None else 4000)
                self.wait_for_iteration(3)
                ranks = self.ranks()
                self.kill(self.random.choice(ranks))
                self.wait_for_round(1)
                if number:
                    self.process.send_signal(number)
                self.check_done(status)
                self.assertFalse(any(map(alive, ranks)))
        self.output = self.folder / "run 0"
        self.check_like_one_process(*LARGE, iterations=24)

    def test_a_rank_that_fails_by_itself_is_lost(self):
        self.begin(3, **faults(f"open:EIO:1:{self.folder / 'text'}", rank=1))
        self.wait_for_iteration(1)
        self.assertRegex(self.told(), f"rank 1: .*{self.folder / 'text'}.*Input/output error")
        self.assertRegex(self.told(), r"rank 1 \(process \d+\) exited with status 1; the others "
                                      r"keep running")
        self.assertEqual(len(self.ranks()), 2)
        self.check_done()
        self.check_like_one_process()

    def test_a_stopped_rank_is_lost(self):
        self.begin(3)
        self.wait_for_iteration(6)
        ranks = self.ranks()
        self.kill(ranks[1], number=signal.SIGSTOP)
        began = time.monotonic()
        self.wait_for_round(1)
        self.assertLess(time.monotonic() - began, TIMEOUT + 8)
        self.assertIn("is stopped; killing it", self.told())
        self.assertEqual(self.check_stay(ranks, ranks[1]), [ranks[0], ranks[2]])
        self.check_done()
        self.check_like_one_process()


class SlowDisk(Elastic):
    def test_a_loss_during_a_long_save_costs_only_the_lost_rank(self):
        self.begin(4, "checkpoint.async_save=true", **faults("write:slow4:1+:.safetensors"))
        shards = "checkpoint/step_4.partial/rank_*.safetensors"
        self.wait_for(lambda: len(list(self.output.glob(shards))) == 4)
        ranks = self.ranks()
        self.kill(ranks[1])
        self.wait_for_round(1)
        self.check_stay(ranks, ranks[1])
        self.assertIn("continuing with 3 ranks (before: 4, spare: 0)", self.told())
        self.assertNotIn("killing it", self.told())
        self.kill(*self.ranks())
        self.assertEqual(self.process.wait(timeout=60), 1, self.told())

    def test_a_rank_that_fails_tells_the_others_before_its_save_has_ended(self):
        self.begin(3, "checkpoint.async_save=true",
                   **faults("write:slow9:1+:rank_00000.safetensors", "write:EIO:6:metrics.jsonl",
                            rank=0))
        self.wait_for(lambda: "this rank keeps running" in self.told())
        self.assertRegex(self.told(), f"rank [12]: rank 0: '{self.output}/metrics.jsonl' .*"
                                      "Input/output error.*; this rank keeps running")
        self.check_done()
        self.check_like_one_process()


class Replacements(Elastic):
    def state_of(self, pid):
        process = pathlib.Path(f"/proc/{pid}")
        return [len(list((process / kind).iterdir())) for kind in ("fd", "task")]

    def test_new_processes_take_the_places_of_the_lost_bit_for_bit(self):
        pairs = ("ddp.use_distributed_optimizer=true", "checkpoint.async_save=true",
                 "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
        self.begin(3, *pairs, options=("--max-restarts", 9), iterations=120)
        survivor, states = None, []
        for number, victims in enumerate(((1,), (2,), (1, 2), (1,), (2,), (1,))):
            self.wait_for_round(number)
            self.wait_for_iteration(self.last_iteration() + self.random.randint(6, 12))
            ranks = self.ranks()
            survivor = survivor or ranks[0]
            states.append(self.state_of(survivor))
            lost = [self.of_rank(ranks, victim) for victim in victims]
            self.kill(*lost)
            self.wait_for(lambda number=number: f"(restart {number + 1} of 9)" in self.told())
            self.wait_for_round(number + 1)
            self.check_stay(ranks, *lost)
        # A save in progress, and workers that were not needed before, account for a few; a round
        # that left its groups behind would add 17 descriptors and 7 threads.
        for descriptors, threads in states[2:]:
            self.assertLessEqual(descriptors, states[1][0] + 5, states)
            self.assertLessEqual(threads, states[1][1] + 5, states)
        self.check_done()
        self.check_bit_for_bit(3, *pairs, iterations=120)

    def test_rank_0_is_replaced_and_killed_inside_a_save(self):
        self.begin(2, "checkpoint.save_interval=2", options=("--max-restarts", 9))
        for number in range(3):
            self.wait_for_round(number)
            self.wait_for_iteration(self.last_iteration() + 3)
            ranks = self.ranks()
            self.wait_for(lambda: list(self.output.glob("checkpoint/step_*.partial")))
            victim = self.of_rank(ranks, 0 if number % 2 == 0 else 1)
            self.kill(victim)
            self.wait_for_round(number + 1)
            self.check_stay(ranks, victim)
        self.check_done()
        self.check_bit_for_bit(2)

    def test_ranks_that_fail_although_none_is_lost_need_a_restart(self):
        self.check_failure_without_loss()

    def test_a_rank_that_dies_before_the_ranks_have_met(self):
        self.begin(3, "parallel.distributed_timeout_seconds=60", options=("--max-restarts", 2))
        self.wait_for(lambda: len(self.ranks()) == 3)
        ranks = self.ranks()
        self.kill(ranks[0])
        began = time.monotonic()
        self.wait_for_iteration(1)
        self.assertLess(time.monotonic() - began, 30)  # it does not wait for the timeout
        self.check_stay(ranks, ranks[0])
        self.wait_for_iteration(5)
        ranks, new = self.ranks(), []
        self.kill(self.of_rank(ranks, 1))
        self.wait_for(lambda: new.extend(set(self.ranks()).difference(ranks)) or new)
        time.sleep(self.random.uniform(0, 0.5))
        self.kill(new[0])  # while the ranks meet, read the checkpoint, or later
        self.check_done()
        self.assertIn("continuing with 2 ranks (before: 3, spare: 0)", self.told())
        self.check_like_one_process()


class OtherRuns(Elastic):
    def test_without_it_a_lost_rank_ends_the_run(self):
        self.begin(2, "train.elastic=none", options=("--starter", "own"))
        self.wait_for_iteration(3)
        self.kill(self.ranks()[1])
        self.assertEqual(self.process.wait(timeout=60), 1)
        self.assertIn("was killed by signal 9 (Killed); ending the other ranks", self.told())
        self.assertNotIn("stay", self.told())
        self.assertNotRegex(self.told(), r"keeps? running")

    def test_a_configuration_that_is_refused_ends_all_ranks(self):
        self.begin(3, "train.global_batch_size=8")
        self.assertEqual(self.process.wait(timeout=60), 2)
        self.assertIn("train.global_batch_size: found 8", self.told())

    def test_torchrun_starts_on_another_number_of_ranks_with_the_same_batch(self):
        self.config.write_text(self.config.read_text().replace("global_batch_size: 8", ""))
        load = (f"checkpoint.load={self.output}/checkpoint", "checkpoint.load_if_present=true")
        pairs = [pair for pair in COMMON if "global_batch_size" not in pair]
        for ranks, iterations in ((4, 5), (2, 10)):
            result = torchrun(ranks, LOCKSTEP, "train", self.config, "--output", self.output,
                              *settings(*pairs, *load, f"train.train_iters={iterations}",
                                        "optimizer.lr_decay_iters=10"))
            self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual([line["consumed_samples"] for line in metrics(self.output)[0]],
                         [4 * (i + 1) for i in range(10)])


if __name__ == "__main__":
    unittest.main()
