"""A few cases of the matrix of faults, always the same ones, and what cases count. `make faults`
runs all of them."""

import collections
import datetime
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import run
import call_cells
import commands
import network_cells
import resize_cells
from case import NAMED, SILENT, Broken, Case, World
from faults import calls, faults
from support import run as run_program
from table import write_table


class Sample(unittest.TestCase):
    def test_a_few_cases_of_each_kind(self):
        # Everything takes longer next to other tests.
        self.assertEqual(run.main(["--sample", "--seed", "1", "--jobs", "2", "--patience", "4"]), 0)

    def test_what_cannot_be_meant_is_refused(self):
        for words in (["--only", "no such cell"], ["--only", "SIGKILL", "--case", "-1"],
                      ["--case", "3"]):
            with self.assertRaises(SystemExit):
                run.main(words)

    def test_the_command_that_repeats_a_case_means_that_case(self):
        cell = next(cell for cell in run.CELLS if cell.name == "SIGKILL at a call/save")
        outcome = {"cell": cell.name, "case": 3, "seed": 7}
        for given, build in (([], None), (["--sample"], "a build"),
                             (["--patience", "4"], "/a/build"),
                             (["--sample", "--patience", "0.5"], "build")):
            environment = {} if build is None else {"LOCKSTEP_BUILD": build}
            first = run.read_arguments(["--seed", "7", *given])
            with self.subTest(given), mock.patch.dict(os.environ, environment):
                if build is None:
                    os.environ.pop("LOCKSTEP_BUILD", None)
                words = shlex.split(run.repeat_command(outcome, first))
                if build is not None:
                    self.assertEqual(words.pop(0), f"LOCKSTEP_BUILD={pathlib.Path.cwd() / build}")
                self.assertEqual(words[0], "tests/faults/run.py")
                again = run.read_arguments(words[1:])
                self.assertEqual(run.cases_of(None, again), [(cell, 3)])
                self.assertEqual((again.seed, again.sample, again.patience),
                                 (7, first.sample, first.patience))


class Counts(unittest.TestCase):
    """What cases count and accept, without a program of the build."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def case(self, name="a case"):
        return Case(World(1, self.folder), resize_cells.CELLS[0], 1, self.folder / name)

    def on_two_hosts(self, name, statuses, texts, ended=False):
        """Runs a case whose link is changed, and after which the ranks end in this way."""
        case, training = self.case(name), mock.Mock(lives=0)
        life = mock.Mock(processes=[mock.Mock(**{"poll.return_value": each}) for each in statuses])
        life.any_ended.return_value = ended
        life.wait.return_value = statuses
        life.text.side_effect = lambda rank=None: " ".join(texts) if rank is None else texts[rank]
        with mock.patch.multiple(network_cells, Hosts=mock.MagicMock(), MOMENTS=mock.MagicMock(),
                                 begin=lambda *_: training, ApartLife=lambda *_: life):
            network_cells.on_two_hosts("step", lambda *_: False)(case)
        return case.faults, training.finish.called

    def test_a_rank_that_crashes_on_a_changed_link_has_not_held(self):
        named = ("rank 1 does not answer", "rank 0 does not answer")
        self.assertEqual(self.on_two_hosts("done", [0, 0], ("", "")), (1, False))
        self.assertEqual(self.on_two_hosts("lost", [1, 1], named), (1, True))
        self.assertEqual(self.on_two_hosts("early", [0, 0], ("", ""), ended=True), (0, False))
        for name, promise, statuses, texts, ended in (
                ("crash", SILENT, [1, -signal.SIGSEGV], named, False),
                ("unnamed", NAMED, [1, 0], ("Connection reset by peer", ""), False),
                ("crash before", SILENT, [1, 1], named, True)):
            with self.subTest(name), self.assertRaises(Broken) as broken:
                self.on_two_hosts(name, statuses, texts, ended)
            self.assertEqual(broken.exception.promise, promise)

    def test_calls_are_counted_by_rank(self):
        log = self.folder / "log"
        log.write_text("open /a b/x\nread@0 /a b/x\nread@0 /c\nread@1 /a b/x\nread@10 /a b/x\n")
        self.assertEqual(calls(log), {"open": 1, "read": 4})
        self.assertEqual(calls(log, "/a b/"), {"open": 1, "read": 3})
        self.assertEqual(calls(log, "/a b/", 1), {"read": 1})
        self.assertEqual(commands.Command("alone", (), {}, None).calls_of(log, "/a b"),
                         {None: {"open": 1, "read": 3}})
        self.assertEqual(commands.Command("two", (), {}, None, 2).calls_of(log, "/a b"),
                         {0: {"read": 1}, 1: {"read": 1}})

    def test_the_library_tells_the_rank_of_a_call(self):
        read = self.folder / "a text"
        read.write_text("text")
        for rank in (None, "3"):
            log = self.folder / f"calls of {rank}"
            environment = {} if rank is None else {"RANK": rank}
            self.assertEqual(run_program("cat", read, **environment, **faults(count=log)).stdout,
                             b"text")
            found = calls(log, str(read))
            self.assertGreater(found["read"], 0)
            self.assertEqual(calls(log, str(read), 3), found if rank else {})

    def test_a_rank_fails_a_call_that_it_makes_and_a_rule_that_does_not_fire_is_no_fault(self):
        command = mock.Mock(ranks=2)
        command.undisturbed.return_value = (None, None, {
            0: collections.Counter(read=2), 1: collections.Counter(read=1, link=1)})
        plan = call_cells.rules_of(command, ("read", "link"))(None)
        self.assertEqual(plan, [
            (rank, f"{operation}:{action}:{nth}") for rank, operation, nth in (
                (0, "read", 1), (0, "read", 2), (1, "read", 1), (1, "link", 1))
            for action in call_cells.ERRORS[operation]])
        command.calls_of = commands.Command("two", (), {}, None, 2).calls_of

        def read_twice_on_rank_0(case, folder, **environment):
            self.assertEqual(environment["LOCKSTEP_FAULTS_RANK"], case.rank)
            self.assertEqual(environment["LOCKSTEP_FAULTS"], f"{case.rule}:{folder}/")
            environment["LOCKSTEP_FAULTS_COUNT"].write_text(2 * f"read@0 {folder}/text\n")
            return subprocess.CompletedProcess([], 0, b"", b"")
        command.run = read_twice_on_rank_0
        for rank, rule, fired in ((0, "read:EINTR:2", 1), (0, "read:EINTR:3", 0),
                                  (1, "read:EINTR:1", 0), (0, "open:EINTR:1", 0)):
            case = self.case(f"{rank} {rule}")
            case.rank, case.rule = rank, rule
            call_cells.fail_call(command)(case, (rank, rule))
            self.assertEqual(case.faults, fired, (rank, rule))

    def test_a_sigterm_is_no_kill(self):
        case, life = self.case(), mock.Mock(**{"wait.return_value": [3]})
        with mock.patch.multiple(resize_cells, check_killed=mock.DEFAULT, Resized=mock.Mock(
                return_value=mock.Mock(ranks=2, **{"start.return_value": life}))):
            resize_cells.resize(case)
        sent = [each.args[0] for each in life.send.call_args_list]
        kills = sent.count(signal.SIGKILL)
        self.assertEqual((case.faults, case.kills), (5, kills))
        self.assertEqual(sorted({*sent}), [signal.SIGKILL, signal.SIGTERM])
        outcomes = [{"cell": cell.name, "fault": cell.fault, "phase": cell.phase, "seed": 1,
                     "result": "held", "faults": 5, "kills": kills, "named": [], "accepted": 0}
                    for cell in resize_cells.CELLS]
        self.assertIn(f"5 faults ({kills} kills, 0 of input", run.summary(outcomes))
        write_table(self.folder / "table", resize_cells.CELLS, outcomes, datetime.date(2026, 1, 1))
        self.assertIn(f"1 held. {kills} kills, 0 errors", (self.folder / "table").read_text())


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
