"""lockstep watch: in terminals of several sizes, without one, during a run and at its end."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import unittest

from support import LOCKSTEP, EndToEnd, clean_environment, end, run

LEAVE_SECOND_SCREEN = b"\x1b[?1049l"


def line(iteration, loss=2.5, **fields):
    return json.dumps({"iteration": iteration, "lm_loss": loss, "num_tokens": 1000,
                       "iteration_ms": 500.0, "tokens_per_second": 2000.0, "grad_norm": 1.25,
                       "learning_rate": 0.001, "skipped": False, **fields}) + "\n"


class Terminal:
    """A program on its own terminal."""

    def __init__(self, test, *arguments, columns=80, rows=24, **environment):
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            [str(a) for a in arguments], stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True,
            env=clean_environment(**{"TERM": "xterm", "LANG": "C.UTF-8", "LC_ALL": "",
                                     **environment}))
        os.close(slave)
        test.addCleanup(os.close, self.master)
        test.addCleanup(end, self.process)
        self.output = b""

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds):
        """Returns what arrives within that time; None at the end."""
        if not select.select([self.master], [], [], seconds)[0]:
            return b""
        try:
            return os.read(self.master, 1 << 16) or None
        except OSError:  # nobody has the terminal open any more
            return None

    def read_until(self, pattern, timeout=30):
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.output):
            piece = self.read(0.2)
            assert piece is not None and time.monotonic() < deadline, self.output
            self.output += piece

    def read_to_end(self, timeout=30):
        deadline = time.monotonic() + timeout
        while (piece := self.read(0.2)) is not None:
            assert time.monotonic() < deadline, self.output
            self.output += piece
        return self.process.wait(timeout=timeout)

    def last_screen(self):
        """Returns the lines of the last complete picture."""
        screens = self.output.split(LEAVE_SECOND_SCREEN)[0].split(b"\x1b[H")
        whole = [screen for screen in screens if b"\x1b[J" in screen]
        text = re.sub(rb"\x1b\[[?0-9;]*[A-Za-z]", b"", whole[-1])
        return text.decode().split("\r\n")


class Watch(EndToEnd):
    def setUp(self):
        super().setUp()
        self.run_folder = self.folder / "a run"
        self.run_folder.mkdir()
        self.metrics = self.run_folder / "metrics.jsonl"
        self.metrics.write_text("".join(line(i, 2 + 1 / i) for i in range(1, 101)))
        (self.run_folder / "config.textproto").write_text(
            "train { train_iters: 400 } parallel { tensor_model_parallel_size: 2 }")

    def append(self, *lines):
        with self.metrics.open("a") as file:
            file.write("".join(lines))

    def watch(self, **options):
        return Terminal(self, LOCKSTEP, "watch", self.run_folder, "--interval", "0.1", **options)

    def test_without_a_terminal_it_prints_once(self):
        for arguments in ([], ["--once"]):
            result = run(LOCKSTEP, "watch", self.run_folder, *arguments, LANG="C", LC_ALL=None)
            self.assertEqual((result.returncode, result.stderr), (0, b""))
            text = result.stdout.decode("ascii")
            self.assertIn("tensor 2 | iteration 100 of 400, 25 %", text)
            self.assertIn("loss 2.0100 | grad norm 1.250 | lr 1.000e-03", text)
            self.assertIn("2.0k tokens/s | 500.0 ms an iteration | 2:30 left", text)
            self.assertIn("*", text)
            self.assertTrue(all(len(row) <= 80 for row in text.splitlines()))

    def test_the_curve_is_made_of_braille_where_the_locale_has_it(self):
        for variables, braille in (({"LANG": "de_DE.UTF-8"}, True), ({"LANG": "C"}, False),
                                   ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, False),
                                   ({"LC_CTYPE": "en_US.utf8", "LANG": "C"}, True)):
            variables = {"LC_ALL": None, "LC_CTYPE": None, **variables}
            text = run(LOCKSTEP, "watch", self.run_folder, **variables).stdout.decode()
            self.assertEqual(bool(re.search("[\u2801-\u28ff]", text)), braille, variables)

    def test_it_fits_terminals_of_every_width(self):
        for columns in (20, 37, 80, 300):
            for rows in (5, 24, 60):
                terminal = self.watch(columns=columns, rows=rows)
                terminal.read_until(rb"\x1b\[J")
                terminal.process.send_signal(signal.SIGINT)
                self.assertEqual(terminal.read_to_end(), 0)
                screen = terminal.last_screen()
                self.assertLessEqual(len(screen), rows)
                self.assertLessEqual(max(map(len, screen)), columns)
                self.assertGreater(len(screen), 3)

    def test_it_draws_what_is_added_and_follows_the_size(self):
        terminal = self.watch()
        terminal.read_until(rb"iteration 100 of 400")
        half = line(101, 9.875)
        self.append(half[:20])
        self.append(half[20:])
        terminal.read_until(rb"(?s)iteration 101 of 400.*loss 9\.8750.*\x1b\[J")
        self.assertGreater(max(map(len, terminal.last_screen())), 70)
        terminal.resize(30, 10)
        deadline = time.monotonic() + 30
        while max(map(len, terminal.last_screen())) > 30 or len(terminal.last_screen()) < 10:
            self.assertLess(time.monotonic(), deadline)
            terminal.output += terminal.read(0.2)
        self.assertEqual(len(terminal.last_screen()), 10)

    def test_without_an_interval_it_waits_between_pictures(self):
        terminal = Terminal(self, LOCKSTEP, "watch", self.run_folder, "--interval", "0")
        terminal.read_until(rb"iteration 100 of 400")
        begin, drawn = time.monotonic(), terminal.output.count(b"\x1b[J")
        while time.monotonic() < begin + 1:
            terminal.output += terminal.read(0.1)
        pictures = terminal.output.count(b"\x1b[J") - drawn
        # The pictures that were waiting to be read come on top.
        self.assertLessEqual(pictures, 100 * (time.monotonic() - begin) + 20)
        self.assertGreater(pictures, 1)

    def test_ctrl_c_and_sigterm_leave_the_terminal_as_it_was(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            terminal = self.watch()
            terminal.read_until(rb"\x1b\[J")
            terminal.process.send_signal(number)
            self.assertEqual(terminal.read_to_end(), 0)
            after = terminal.output.split(LEAVE_SECOND_SCREEN)
            self.assertEqual(len(after), 2)
            self.assertIn(b"\x1b[?25h", terminal.output)  # the cursor is shown again
            self.assertIn(b"iteration 100 of 400", after[1])  # and the last view stays

    def test_it_ends_with_the_run(self):
        terminal = self.watch()
        terminal.read_until(rb"iteration 100 of 400")
        self.append(line(101))
        (self.run_folder / "loss.svg").write_text("<svg/>")
        self.assertEqual(terminal.read_to_end(), 0)
        self.assertIn(b"iteration 101 of 400, 25 % \xc2\xb7 ended",
                      terminal.output.split(LEAVE_SECOND_SCREEN)[1])

    def test_a_dumb_terminal_gets_it_once(self):
        terminal = self.watch(TERM="dumb")
        self.assertEqual(terminal.read_to_end(), 0)
        self.assertNotIn(b"\x1b", terminal.output)
        self.assertIn(b"iteration 100 of 400", terminal.output)

    def test_a_run_without_configuration_and_damaged_ones(self):
        config = self.run_folder / "config.textproto"
        for damage in (lambda: config.write_text("no { such: 1"), config.unlink):
            damage()
            result = run(LOCKSTEP, "watch", self.run_folder)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(b"iteration 100\n", result.stdout)
            self.assertNotIn(b"left", result.stdout)
        self.assertEqual(run(LOCKSTEP, "watch", self.metrics).returncode, 0)

    def test_before_the_first_iteration_and_without_a_run(self):
        self.metrics.write_text("")
        result = run(LOCKSTEP, "watch", self.run_folder)
        self.assertEqual(result.returncode, 0)
        self.assertIn(b"no iteration yet", result.stdout)
        self.metrics.unlink()
        self.assert_failed(run(LOCKSTEP, "watch", self.run_folder), 1, str(self.metrics))
        self.assert_failed(run(LOCKSTEP, "watch", self.run_folder, "--interval", "-1"), 2,
                           "--interval")


class WatchARun(EndToEnd):
    def test_a_real_run_is_watched_to_its_end(self):
        output = self.folder / "out"
        training = subprocess.Popen(
            [LOCKSTEP, "train", self.config, "--output", output, "--set", "train.train_iters=150"],
            env=clean_environment(), stderr=subprocess.DEVNULL)
        self.addCleanup(end, training)
        self.wait_for_iterations(output)
        terminal = Terminal(self, LOCKSTEP, "watch", output, "--interval", "0.1")
        self.assertEqual(terminal.read_to_end(timeout=120), 0)
        self.assertIn(b"iteration 150 of 150, 100 %", terminal.output)
        self.assertEqual(training.wait(timeout=60), 0)


if __name__ == "__main__":
    unittest.main()
