"""Ranks that get out of step, as real processes: all others say which rank did what instead."""

import json
import signal
import subprocess
import time
import unittest

from support import BUILD, Ranks, clean_environment, end, free_port, needs_host_transport

STRAYING_RANK = BUILD / "tests" / "straying_rank"
RANKS = 3


class Desync(Ranks):
    def outcome(self, mistake):
        """Returns (exit status, standard error) of each rank."""
        port = free_port()
        processes = []
        for rank in range(RANKS):
            launcher = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank,
                        "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                        "TORCH_FR_DUMP_TEMP_FILE": self.folder / "recording_of_rank_"}
            processes.append(subprocess.Popen([STRAYING_RANK, mistake], stderr=subprocess.PIPE,
                                              env=clean_environment(**launcher)))
            self.addCleanup(end, processes[-1])
        started = time.monotonic()
        outcomes = [(p.communicate(timeout=60)[1].decode(), p.returncode) for p in processes]
        self.assertLess(time.monotonic() - started, 20)
        return [(status, error) for error, status in outcomes]

    def assert_survivors_say(self, outcomes, *parts, killed=()):
        for rank, (status, error) in enumerate(outcomes):
            if rank in killed:
                continue
            self.assertEqual(status, 1, error)
            for part in (f"failed on rank {rank} after", "over group dp [0, 1, 2]", *parts):
                self.assertIn(part, error)

    def test_ranks_in_step_end_well(self):
        self.assertEqual([status for status, _ in self.outcome("none")], [0] * RANKS)

    def test_a_skipped_collective(self):
        self.assert_survivors_say(
            self.outcome("skip"), "rank 0: all_reduce (sum) of bucket 2, 1000 x Float (step 3)",
            "rank 2: all_reduce (sum) of bucket 3, 1000 x Float (step 3)",
            "c10d's flight recorder is in")
        for rank in range(RANKS):
            recording = json.loads((self.folder / f"recording_of_rank_{rank}").read_text())
            self.assertTrue(recording["entries"])

    @needs_host_transport
    def test_another_size(self):
        self.assert_survivors_say(
            self.outcome("size"), "rank 1: all_reduce (sum) of bucket 2, 1000 x Float (step 3)",
            "rank 2: all_reduce (sum) of bucket 2, 900 x Float (step 3)")

    def test_a_dead_rank(self):
        outcomes = self.outcome("die")
        self.assertEqual(outcomes[2][0], -signal.SIGKILL)
        self.assert_survivors_say(outcomes, "rank 2 has exited: all_reduce (sum) of bucket 2",
                                  killed=(2,))


if __name__ == "__main__":
    unittest.main()
