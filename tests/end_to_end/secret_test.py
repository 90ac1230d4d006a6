"""LOCKSTEP_SECRET: ranks that know it meet and train as without it; strangers get nothing, cost
nothing and are counted; the secret itself appears nowhere."""

import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import threading
import time
import unittest

from small_ranks import SmallRanks
from support import LOCKSTEP, Ranks, clean_environment, end, free_port, metrics, run, torchrun

SECRET = "what all ranks of this test know"
MAGIC = b"lockstep/secret1"
NUMBERS = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples")
REFUSED = re.compile(r"lockstep: rank 0: (\d+) connections? without the secret (?:was|were) refused")


class Recorder:
    """Forwards connections to a port of this host, and records the bytes in both directions."""

    def __init__(self, port):
        self.target, self.bytes = port, b""
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                near = self.server.accept()[0]
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self.pass_on, args=(near, far), daemon=True).start()

    def pass_on(self, near, far):
        with near, far:
            while True:
                for source in select.select([near, far], [], [])[0]:
                    try:
                        text = source.recv(1 << 16)
                        (far if source is near else near).sendall(text)
                    except OSError:
                        return
                    if not text:
                        return
                    self.bytes += text


def connect(port, seconds=30):
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def flood(port, count, seconds=30):
    """Connects many strangers, silent and talking; returns their open connections."""
    words = (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)) * 4, MAGIC, MAGIC + bytes(64))
    strangers = []
    for i in range(count):
        strangers.append(connect(port, seconds))
        try:
            strangers[-1].sendall(words[i % len(words)])
        except OSError:
            pass  # the other side has closed it already
    return strangers


class Secret(Ranks):
    def finish(self, processes, status=0):
        """Returns the standard error of each process."""
        told = [process.communicate(timeout=120)[1].decode() for process in processes]
        for process, error in zip(processes, told):
            self.assertEqual(process.returncode, status, error)
            self.assertNotIn(SECRET, error)
        return told

    def secret_file(self, text=SECRET + "\n", mode=0o600):
        path = self.folder / "secret"
        path.write_text(text)
        path.chmod(mode)
        return path

    def numbers_of(self, name):
        return [[line[number] for number in NUMBERS] for line in metrics(self.folder / name)[0]]

    def refused(self, told):
        found = REFUSED.search(told)
        return int(found[1]) if found else 0

    def test_ranks_with_the_secret_train_as_without_it(self):
        for ranks in (2, 4):
            for name, secret in (("open", {}), ("closed", {"LOCKSTEP_SECRET": SECRET}),
                                 ("file", {"LOCKSTEP_SECRET_FILE": self.secret_file()})):
                told = self.finish(self.start(ranks, "--output", self.folder / f"{name}{ranks}",
                                              **secret))
                self.assertEqual([self.refused(each) for each in told], [0] * ranks, told)
            self.assertEqual(len(self.numbers_of(f"open{ranks}")), 12)
            for name in ("closed", "file"):
                self.assertEqual(self.numbers_of(f"{name}{ranks}"), self.numbers_of(f"open{ranks}"))

    def test_a_variable_and_a_file_with_the_same_secret_are_one_secret(self):
        port = free_port()
        self.finish(self.start(2, port=port, leave_out={1}, LOCKSTEP_SECRET=SECRET) +
                    self.start(2, port=port, leave_out={0}, LOCKSTEP_SECRET_FILE=self.secret_file()))

    def test_a_rank_with_another_secret_or_none_is_told_so_within_the_timeout(self):
        timeout = ("--set", "parallel.distributed_timeout_seconds=5")
        for mine, other, told in ((SECRET, SECRET + "!", "has a different one than this rank"),
                                  (SECRET, None, "has one, and this rank has none"),
                                  (None, SECRET, "has none, and this rank has one")):
            with self.subTest(told):
                port = free_port()
                ranks = (self.start(2, *timeout, port=port, leave_out={1}, LOCKSTEP_SECRET=mine) +
                         self.start(2, *timeout, port=port, leave_out={0}, LOCKSTEP_SECRET=other))
                errors = self.finish(ranks, 1)
                self.assertRegex(errors[1], rf"lockstep: rank 1 cannot use the store at 127\.0\.0\.1:"
                                 rf"{port}: secret: rank 0, which serves it, {told}; allowed: ")
                self.assertIn("rank 1 did not arrive "
                              "within 5.0 s: 1 of 2 ranks have arrived", errors[0])
                self.assertEqual("; 1 connection without the secret was refused" in errors[0],
                                 mine is not None, errors[0])

    def test_what_cannot_be_a_secret_is_refused_on_all_ranks(self):
        for environment, told in (
                ({"LOCKSTEP_SECRET": "short"}, "LOCKSTEP_SECRET: found 5 bytes, allowed: 16 or"),
                ({"LOCKSTEP_SECRET": ""}, "LOCKSTEP_SECRET: found 0 bytes"),
                ({"LOCKSTEP_SECRET": SECRET, "LOCKSTEP_SECRET_FILE": self.secret_file()},
                 "LOCKSTEP_SECRET and LOCKSTEP_SECRET_FILE: both are set; allowed: one of them"),
                ({"LOCKSTEP_SECRET_FILE": self.secret_file(mode=0o604)}, "' has mode 604, which "
                 "gives other users "
                 "access; allowed: a file with 16 to 65536 bytes that its owner alone can use"),
                ({"LOCKSTEP_SECRET_FILE": self.folder / "none"}, "none' cannot be read: No such")):
            with self.subTest(told):
                for error in self.finish(self.start(2, **environment), 2):
                    self.assertIn("environment variable", error)
                    self.assertIn(told, error)
                for command in (("train", self.config),
                                ("generate", self.folder, "--prompt", "x")):
                    alone = run(LOCKSTEP, *command, **environment)
                    self.assert_failed(alone, 2, "lockstep: environment variable", told)
        self.secret_file(mode=0o600)
        for environment, status, told in (
                ({"LOCKSTEP_SECRET": "short"}, 1, "LOCKSTEP_SECRET: found 5 bytes"),
                ({"LOCKSTEP_SECRET": SECRET}, 0, '"secret": "of LOCKSTEP_SECRET"'),
                ({}, 0, '"secret": "none"')):
            result = run(LOCKSTEP, "doctor", "--json", **environment)
            self.assertEqual(result.returncode, status)
            self.assertIn(told, result.stdout.decode())
            self.assertNotIn(SECRET, result.stdout.decode())

    def test_strangers_at_the_start_keep_no_rank_out_and_are_counted(self):
        port = free_port()
        rank_0 = self.start(2, port=port, leave_out={1}, LOCKSTEP_SECRET=SECRET)
        strangers = flood(port, 300)
        rank_1 = self.start(2, port=port, leave_out={0}, LOCKSTEP_SECRET=SECRET)
        told = self.finish(rank_0 + rank_1)
        self.assertGreaterEqual(self.refused(told[0]), len(strangers), told[0])
        for stranger in strangers:
            stranger.close()

    def test_strangers_during_training_change_nothing_and_are_counted(self):
        port = free_port()
        words = ("--set", "train.train_iters=200", "--set", "train.eval_iters=0")
        undisturbed = self.start(2, *words, "--output", self.folder / "quiet")
        self.finish(undisturbed)
        ranks = self.start(2, *words, "--output", self.folder / "flooded", port=port,
                           LOCKSTEP_SECRET=SECRET)
        count = 0
        while all(rank.poll() is None for rank in ranks):
            if (self.folder / "flooded/metrics.jsonl").exists():
                try:
                    for stranger in flood(port, 50, seconds=1):
                        stranger.close()
                        count += 1
                except OSError:
                    break  # the run has ended
            time.sleep(0.05)
        told = self.finish(ranks)
        self.assertGreater(count, 0)
        self.assertGreater(self.refused(told[0]), 0, told[0])
        self.assertEqual(self.numbers_of("flooded"), self.numbers_of("quiet"))

    def test_the_secret_is_neither_on_the_wire_nor_in_an_argument(self):
        port = free_port()
        recorder = Recorder(port)
        self.addCleanup(recorder.server.close)
        output = self.folder / "recorded"
        words = ("--output", output, "--set", "train.train_iters=100000")
        ranks = (self.start(2, *words, port=port, leave_out={1}, LOCKSTEP_SECRET=SECRET) +
                 self.start(2, *words, port=recorder.port, leave_out={0}, LOCKSTEP_SECRET=SECRET))
        self.wait_for_iterations(output)
        for rank in ranks:
            self.assertNotIn(SECRET.encode(),
                             pathlib.Path(f"/proc/{rank.pid}/cmdline").read_bytes())
            rank.send_signal(signal.SIGTERM)
        self.finish(ranks, 3)
        self.assertIn(MAGIC, recorder.bytes)
        self.assertIn(b"lockstep", recorder.bytes)
        self.assertNotIn(SECRET.encode(), recorder.bytes)
        printed = run(LOCKSTEP, "train", self.config, "--print-config", LOCKSTEP_SECRET=SECRET)
        self.assertEqual(printed.returncode, 0, printed.stderr)
        self.assertNotIn(SECRET.encode(), printed.stdout + printed.stderr)
        for file in output.rglob("*"):
            if file.is_file():
                self.assertNotIn(SECRET.encode(), file.read_bytes(), file)

    def test_what_was_recorded_lets_nobody_in(self):
        port = free_port()
        recorder = Recorder(port)
        self.addCleanup(recorder.server.close)
        words = ("--set", "train.train_iters=100000", "--output", self.folder / "run")
        ranks = (self.start(2, *words, port=port, leave_out={1}, LOCKSTEP_SECRET=SECRET) +
                 self.start(2, *words, port=recorder.port, leave_out={0}, LOCKSTEP_SECRET=SECRET))
        self.wait_for_iterations(self.folder / "run")
        answer = recorder.bytes[recorder.bytes.index(MAGIC, 1):][:80]
        with connect(port) as stranger:
            self.assertEqual(stranger.recv(48, socket.MSG_WAITALL)[:16], MAGIC)
            stranger.sendall(answer)
            self.assertEqual(stranger.recv(100, socket.MSG_WAITALL), b"n")
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        self.assertEqual(self.refused(self.finish(ranks, 3)[0]), 1)

    def torchrun(self, secret):
        """Starts two ranks; the shell expands `secret` separately for each of them."""
        script = self.folder / "rank"
        script.write_text(f"#!/bin/sh\nexport LOCKSTEP_SECRET=\"{secret}\"\n"
                          f"exec {LOCKSTEP} train {self.config}\n")
        script.chmod(0o755)
        return torchrun(2, script)

    def test_under_torchrun_the_ranks_compare_what_they_sign(self):
        result = self.torchrun(SECRET)
        self.assertEqual(result.returncode, 0, result.stderr)
        result = self.torchrun(SECRET + "$RANK")
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(result.stderr.decode(), "LOCKSTEP_SECRET: rank 0 has signed as [0-9a-f]{64}, "
                         "rank 1 has signed as [0-9a-f]{64}; allowed: the same on all ranks")


class Launch(SmallRanks):
    def secret_of(self, **environment):
        self.assertEqual(self.launch(2, **environment).returncode, 0)
        secrets = {self.started(rank)["environment"].get("LOCKSTEP_SECRET") for rank in range(2)}
        self.assertEqual(len(secrets), 1)
        return secrets.pop()

    def test_the_own_starter_gives_its_ranks_a_secret_unless_there_is_one(self):
        first, second = self.secret_of(), self.secret_of()
        self.assertRegex(first, "^[0-9a-f]{64}$")
        self.assertNotEqual(first, second)
        self.assertEqual(self.secret_of(LOCKSTEP_SECRET=SECRET), SECRET)
        self.assertIsNone(self.secret_of(LOCKSTEP_SECRET_FILE="somewhere"))

    def test_a_launched_run_that_loses_a_rank_goes_on_behind_its_secret(self):
        for elastic in ("none", "dp"):
            output = self.folder / elastic
            process = subprocess.Popen(
                [*map(str, (LOCKSTEP, "launch", "-n", 2, "--starter", "own", "--max-restarts", 1,
                            "--", "train", self.config, "--output", output)),
                 *(word for pair in ("train.train_iters=60", "checkpoint.save_interval=5",
                                     "train.eval_iters=0", f"train.elastic={elastic}")
                   for word in ("--set", pair))],
                env=clean_environment(LOCKSTEP_SECRET=SECRET), stderr=subprocess.PIPE)
            self.addCleanup(end, process)
            self.wait_for_iterations(output)
            children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
            os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
            told = process.communicate(timeout=120)[1].decode()
            self.assertEqual(process.returncode, 0, told)
            self.assertNotIn(SECRET, told)
            self.assertEqual(metrics(output)[0][-1]["iteration"], 60)


if __name__ == "__main__":
    unittest.main()
