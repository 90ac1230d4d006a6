"""checkpoint.in_memory_replicas: surviving ranks resume from copies of the state in their memory.

LOCKSTEP_ELASTIC_SEED sets when which ranks are killed (default 1)."""

import re
import time
import unittest

from elastic_test import COMMON, TP2, Elastic, settings
from support import LOCKSTEP, run, torchrun

COPIES = ("checkpoint.in_memory_replicas=1",)
PP2 = ("parallel.pipeline_model_parallel_size=2", "model.num_layers=2")
IN_MEMORY = "loaded the ranks' memory, iteration "


class Copies(Elastic):
    def begin(self, ranks, *pairs, without="checkpoint.save_interval", **more):
        """Starts a run without checkpoints on disk, unless `without` names another setting."""
        super().begin(ranks, *COPIES, *pairs, without=without, **more)

    def loaded(self, number):
        """Returns the iteration from which round `number` (from 1) resumed, from memory."""
        told = re.findall(r"loaded (.*), iteration (\d+)", self.told())
        self.assertEqual(len(told), number, self.told())
        self.assertEqual(told[-1][0], "the ranks' memory", self.told())
        return int(told[-1][1])

    def lose(self, number, *victims):
        """Kills ranks during the run. No step that all ranks have copied is repeated. Rank 0
        reports a step before the ranks copy it."""
        self.wait_for_iteration(self.last_iteration() + self.random.randint(2, 12))
        time.sleep(self.random.uniform(0, 0.05))
        at = self.last_iteration()
        self.kill(*victims)
        self.wait_for_round(number)
        self.assertGreaterEqual(self.loaded(number), at - 1)

    def check_replaced(self, ranks, *pairs, losses, replicas=1):
        """Each of `losses`, lists of ranks, is lost and replaced, one after the other."""
        self.begin(ranks, f"checkpoint.in_memory_replicas={replicas}", *pairs,
                   options=("--max-restarts", 9))
        self.wait_for_round(0)
        for number, victims in enumerate(losses):
            before = self.ranks()
            lost = [self.of_rank(before, victim) for victim in victims]
            self.lose(number + 1, *lost)
            self.check_stay(before, *lost)
        self.check_done()
        self.check_bit_for_bit(ranks, *pairs)


class FewerRanks(Copies):
    def test_ranks_that_are_left_go_on_without_a_lost_step(self):
        self.begin(4)
        self.wait_for_round(0)
        ranks = self.ranks()
        for number in range(3):
            victim = self.random.choice(ranks)
            self.lose(number + 1, victim)
            ranks = self.check_stay(ranks, victim)
        self.assertIn("checkpoint.in_memory_replicas: found 1, other ranks left: 0",
                      self.told())
        self.check_done()
        self.check_like_one_process()

    def test_the_layout_changes_where_two_ranks_are_lost(self):
        self.begin(4, "checkpoint.in_memory_replicas=2", *TP2)
        self.wait_for_round(0)
        ranks = self.ranks()
        victims = self.random.sample(ranks, 2)
        self.lose(1, *victims)
        self.check_stay(ranks, *victims)
        self.check_done()
        self.check_like_one_process()


    def test_the_spare_is_a_rank_that_the_others_can_do_without(self):
        for layout in (TP2, PP2):
            victim = self.random.randrange(4)
            with self.subTest(layout, victim=victim):
                self.output = self.folder / layout[0]
                self.begin(4, *layout)
                self.wait_for_round(0)
                ranks = self.ranks()
                self.lose(1, ranks[victim])
                self.assertIn("continuing with 2 ranks (before: 4, spare: 1)", self.told())
                self.assertEqual(len(self.check_stay(ranks, ranks[victim])), 3)
                self.check_done()
                self.check_like_one_process(*[pair for pair in layout if "parallel" not in pair])


class Replacements(Copies):
    def test_sharded_optimizer_state(self):
        self.check_replaced(3, "ddp.use_distributed_optimizer=true", "model.hidden_dropout=0.1",
                            losses=[[1], [0], [2], [0], [1]])

    def test_tensor_parallel_ranks(self):
        self.check_replaced(4, *TP2, losses=[[0], [3], [1]])

    def test_pipeline_stages(self):
        self.check_replaced(4, *PP2, losses=[[2], [0], [1]])

    def test_two_at_once_with_two_copies(self):
        self.check_replaced(3, "ddp.use_distributed_optimizer=true", replicas=2,
                            losses=[[1, 2], [0, 1]])

    def test_two_at_once_that_keep_each_others_copies_resume_from_disk(self):
        self.begin(3, options=("--max-restarts", 9), without="nothing")
        self.wait_for_iteration(11)
        ranks = self.ranks()
        victims = [self.of_rank(ranks, rank) for rank in (0, 1)]
        self.kill(*victims)
        self.wait_for_round(1)
        self.check_stay(ranks, *victims)
        self.assertRegex(self.told(), r"the copy of iteration \d+ is incomplete: no surviving rank "
                         "has the part of rank 0; the run does not resume from the ranks' "
                         "memory\n"
                         rf"loaded {self.output}/checkpoint/step_\d+, iteration")
        self.lose_after_disk()
        self.check_done()
        self.check_bit_for_bit(3)

    def lose_after_disk(self):
        """The next loss resumes from new copies."""
        self.wait_for_iteration(self.last_iteration() + 5)
        self.kill(self.of_rank(self.ranks(), 2))
        self.wait_for_round(2)
        self.assertIn(IN_MEMORY, self.told())

    def test_a_newer_checkpoint_on_disk_is_taken(self):
        self.begin(2, "checkpoint.in_memory_interval=50", options=("--max-restarts", 1),
                   without="nothing")
        self.wait_for_iteration(63)
        self.kill(self.of_rank(self.ranks(), 1))
        self.wait_for_round(1)
        self.assertNotIn(IN_MEMORY, self.told())
        self.check_done()
        self.check_bit_for_bit(2)


class Refused(Copies):
    def test_ranks_that_do_not_stay_or_are_too_few(self):
        pairs = settings(*COMMON, *COPIES, "train.train_iters=2")
        result = torchrun(2, LOCKSTEP, "train", self.config, *pairs)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("checkpoint.in_memory_replicas: found 1, allowed without `lockstep launch` "
                      "on one host: 0, because no rank survives a loss", result.stderr.decode())
        result = run(LOCKSTEP, "launch", "-n", 2, "--", "train", self.config, *pairs, "--set",
                     "checkpoint.in_memory_replicas=2")
        self.assertEqual(result.returncode, 2)
        self.assertIn("checkpoint.in_memory_replicas: found 2 with 2 ranks, allowed: fewer than "
                      "the ranks", result.stderr.decode())
        result = run(LOCKSTEP, "train", self.config, *pairs, "--set", "train.elastic=none")
        self.assertEqual(result.returncode, 2)
        self.assertIn("train.elastic = none; allowed: 0, or dp", result.stderr.decode())


if __name__ == "__main__":
    unittest.main()
