"""What the Python benchmarks compute and run, without a program of the build."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import pathlib
import socket
import statistics
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "benchmarks"))
# The real one needs torch.
sys.modules["peer_wrappers"] = types.SimpleNamespace(KINDS=["ddp", "zero"])

import peers  # noqa: E402
import rounds  # noqa: E402
import step_times  # noqa: E402
from gpu_checks import commands  # noqa: E402


def script(name):
    loader = importlib.machinery.SourceFileLoader(name, str(SOURCE / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


class Peers(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.text = self.folder / "a book"
        patch = mock.patch.object(peers, "TEXT", self.text)
        patch.start()
        self.addCleanup(patch.stop)

    def programs(self, size, steps=20):
        """Returns the programs of "small" on 4 ranks, with a text of `size` bytes."""
        self.text.write_bytes(size * b"x")
        with mock.patch.object(peers.Programs, "lockstep"):
            return peers.Programs(self.folder, self.folder, "small", 4, steps + peers.WARMUPS,
                                  ["train.seed=7"])

    def test_a_text_that_is_too_short_is_refused(self):
        bytes_of_step = 4 * 2 * 4 * 256
        programs = self.programs(25 * bytes_of_step + 1)
        self.assertEqual(programs.text.stat().st_size, 25 * bytes_of_step + 1)
        for size in (25 * bytes_of_step, 24 * bytes_of_step + 1):
            with self.assertRaises(SystemExit) as end:
                self.programs(size)
            self.assertEqual(end.exception.code, (
                f"--steps: found 20, allowed for small on 4 ranks: at most 19, because {self.text} "
                f"has {size} bytes"))

    def test_ours_saves_no_checkpoint_as_no_peer_does(self):
        programs = self.programs(300_000)
        line = json.dumps({"iteration_ms": 2, "lm_loss": 3, "peak_memory_bytes": 4})
        commands = []

        def run_ranks(command, *_):
            commands.append(command)
            (self.folder / "run").mkdir(exist_ok=True)
            (self.folder / "run/metrics.jsonl").write_text(line + "\n")
        with mock.patch.object(peers, "run_ranks", run_ranks):
            self.assertEqual(programs.run("ours", 1), {"step": [2], "loss": [3], "memory": 4})
        self.assertEqual([word for word in commands[0] if "=" in str(word)],
                         ["checkpoint.save=", "train.seed=7", "train.train_iters=1"])

    def report(self, losses, ms):
        """Returns what report() prints and returns for one round."""
        steps = peers.WARMUPS + 1
        results = {name: {"loss": steps * [loss], "step": steps * [ms[name]], "memory": 2**20,
                          "start": 1} for name, loss in losses.items()}
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            found = peers.report(list(losses), [results])
        return told.getvalue(), found

    def test_a_program_with_other_losses_does_not_count(self):
        ms = {"ours": 1, "ours-sharded": 2, "ddp": 4, "zero": 3}
        told, found = self.report({"ours": 5, "ours-sharded": 5, "ddp": 5, "zero": 5}, ms)
        self.assertEqual(found, (True, ms))
        for row, value in (("ours / ddp", 0.25), ("ours-sharded / zero", 0.667),
                           ("ours-sharded / the fastest of them", 0.667)):
            self.assertRegex(told, rf"{row} +{value:.3f} ")
        self.assertNotIn("ours-distributed", told)
        told, found = self.report({"ours": 5, "ours-sharded": 5.1, "ddp": 5, "zero": math.nan}, ms)
        self.assertEqual(found, (False, {"ours": 1, "ddp": 4}))
        self.assertIn("ours-sharded: does not count, its losses differ by 1.0e-01", told)
        self.assertIn("zero: does not count, its losses differ by nan", told)
        self.assertNotIn("ours-sharded /", told)
        self.assertRegex(told, r"ours / the fastest of them +0\.250 ")


class Ranks(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def program(self, *lines):
        path = self.folder / "program"
        path.write_text("\n".join(["#!/bin/sh", f"cd '{self.folder}'", *lines, ""]))
        path.chmod(0o755)
        return path

    def run_ranks(self, program, seconds):
        with mock.patch.object(rounds, "SECONDS", seconds):
            return rounds.run_ranks([program], 2)

    def process_of(self, rank):
        return pathlib.Path("/proc", (self.folder / f"process{rank}").read_text().strip())

    def test_a_rank_with_much_to_say_keeps_no_other_waiting(self):
        program = self.program('[ "$RANK" = 0 ] || { head -c 300000 /dev/zero >&2; : > told; }',
                               "until [ -e told ]; do sleep 0.02; done", "echo rank $RANK")
        self.assertEqual(self.run_ranks(program, 60), "rank 0\n")

    def test_ranks_that_are_late_end_and_are_told(self):
        program = self.program("echo $$ > process$RANK", "echo rank $RANK waits >&2",
                               "exec sleep 60")
        with self.assertRaises(SystemExit) as end:
            self.run_ranks(program, 4)
        for rank in range(2):
            self.assertRegex(end.exception.code,
                             rf"rank {rank}: not done within \d+ s; rank {rank} waits")
            self.assertFalse(self.process_of(rank).exists())

    def test_no_rank_is_left_if_another_cannot_start(self):
        program = self.program("echo $$ > process0", "exec sleep 60")
        told, real = self.folder / "process0", commands.start

        def start(command, environment):
            process = real(command, environment)
            while not told.exists() or not told.read_text().endswith("\n"):
                time.sleep(0.01)
            return process
        with mock.patch.object(commands, "start", start), self.assertRaises(FileNotFoundError):
            rounds.run_all([([program], dict(os.environ)), (["/no/such"], {})], 60)
        self.assertFalse(self.process_of(0).exists())

    def test_the_system_gives_a_free_port_to_nobody_else(self):
        range_of_system = self.folder / "range"
        with mock.patch.object(commands, "PORTS_OF_SYSTEM", range_of_system):
            for text, allowed in ((None, [*range(10000, 32768), *range(61000, 65536)]),
                                  ("20000\t65535\n", range(10000, 20000)),
                                  ("1024 64000", range(64001, 65536)),
                                  ("1024 65535", range(10000, 65536))):
                if text:
                    range_of_system.write_text(text)
                for _ in range(9):
                    self.assertIn(rounds.free_port(), allowed, text)
            range_of_system.write_text("10001 65535")
            with socket.socket() as taken:
                with contextlib.suppress(OSError):  # another program has it already
                    taken.bind(("127.0.0.1", 10000))
                with self.assertRaisesRegex(commands.CommandFailed, "none of 1 ports is free"):
                    rounds.free_port()


class Steps(unittest.TestCase):
    def test_a_percentile_is_the_nearest_rank(self):
        for count in (1, 2, 19, 20, 21, 40, 100):
            numbers = list(range(count, 0, -1))
            found = step_times.percentile(numbers, 0.95)
            not_above = [number for number in numbers
                         if sum(each <= number for each in numbers) >= 0.95 * count]
            self.assertEqual(found, min(not_above))
            self.assertEqual(step_times.percentile(numbers, 0), 1)
        self.assertEqual(statistics.median(range(1, 20)), step_times.percentile(range(1, 20), 0.5))

    def test_the_bucket_is_that_of_the_command_line(self):
        bench = script("bench_steps")
        numbers = {"step": 1, "faults": 0, "memory": 1, "compute": 1, "communication": 1,
                   "processor": 1}

        def buckets(*words):
            with mock.patch.object(sys, "argv", ["bench_steps", *words, "--rounds", "1"]), \
                    mock.patch.object(bench, "run", return_value=numbers) as run, \
                    mock.patch.multiple(bench, make_link=mock.DEFAULT, remove_link=mock.DEFAULT), \
                    mock.patch.object(bench.os, "geteuid", return_value=0), \
                    mock.patch.object(bench.shutil, "which", return_value="tc"), \
                    contextlib.redirect_stdout(io.StringIO()):
                bench.main()
            commands = [each.args[0] for each in run.call_args_list]
            return [command[5] for command in commands if command[0] == bench.OURS]
        self.assertEqual(buckets("sharded"), 2 * [1 << 22])
        self.assertEqual(buckets("sharded", "--bucket", "77"), 2 * [77])
        self.assertEqual(buckets("link"), 2 * [1 << 20])
        self.assertEqual(buckets("link", "--bucket", "77"), 2 * [77])


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
