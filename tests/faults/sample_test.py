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
import disk_cells
import network_cells
import process_cells
import resize_cells
import soak
import stay_cells
import stranger_cells
from case import NAMED, SILENT, Broken, Case, World
from faults import calls, faults
from support import run as run_program
from table import write_table
from training import TOTAL


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
        with mock.patch.multiple(network_cells, TwoHosts=mock.MagicMock(), MOMENTS=mock.MagicMock(),
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

    def is_silent(self, name, body, *arguments):
        """body(case, ...) finds that a fault was not told, or not as it was."""
        with self.subTest(name):
            with self.assertRaises(Broken) as broken:
                body(self.case(name), *arguments)
            self.assertEqual(broken.exception.promise, SILENT)

    def go_on_with_fewer(self, case, status, told, stay=(4,)):
        """Judges a run whose process 5 was killed."""
        life = mock.Mock(**{"wait.return_value": [status], "text.return_value": told,
                            "last_iteration.return_value": 9})
        training = mock.Mock(ranks=2, **{"start.return_value": life})
        with mock.patch.multiple(stay_cells, complete_steps=lambda _: [],
                                 kill_some=lambda *_, **__: ({5}, set(stay))):
            stay_cells.go_on_with_fewer(case, lambda _: training)

    def test_ranks_that_end_because_another_was_killed_have_not_stayed(self):
        killed = "rank 1 (process 5) was killed by signal 9 (Killed); "
        goes_on, ended = killed + "the others keep running\n", "rank 0 (process 4) exited with "
        self.go_on_with_fewer(self.case("done"), 0, goes_on)
        self.go_on_with_fewer(self.case("too few"), 1, goes_on + "found 1 rank left, allowed by tp")
        self.go_on_with_fewer(self.case("nobody"), 1, killed + "\nno rank is left; ", ())
        for name, status, told in (
                ("ended by the launcher", 1, killed + "ending the other ranks"),
                ("restarted", 0, killed + "ending the other ranks\nrestarting all ranks"),
                ("ended", 1, goes_on + ended + "status 1\nno rank is left; "),
                ("ended, done", 0, goes_on + ended + "status 1; the others keep running"),
                ("told nothing", 1, goes_on), ("crash", -signal.SIGSEGV, goes_on)):
            self.is_silent(name, self.go_on_with_fewer, status, told)

    def kill_one(self, case, left):
        """Kills a rank; `left` are the processes of the next round."""
        life = mock.Mock(**{"pids.side_effect": [{0: 4, 1: 5}, left], "text.return_value": "",
                            "any_ended.return_value": False, "last_iteration.return_value": 9})
        with mock.patch.multiple(stay_cells, wait_for_moment=mock.DEFAULT):
            killed, stay = stay_cells.kill_some(case, None, life, 1, several=False)
        self.assertEqual(killed | stay, {4, 5})
        self.assertEqual((len(killed), case.kills), (1, 1))

    def test_the_last_kill_is_judged_too(self):
        self.kill_one(self.case("same"), {0: 4, 1: 5})
        self.is_silent("others", self.kill_one, {0: 6, 1: 7})

    def test_a_new_round_begins_after_the_launcher_has_told_of_all_that_were_killed(self):
        trains = "training 0.03M parameters\nloaded nothing\niteration  9/48 | loss 1\n"
        killed = "lockstep launch: rank 0 (process 5) was killed by signal 9 (Killed)\n"
        for told, again in ((trains, False), (trains + killed + "iteration 10/48 | loss 1", False),
                            (killed + trains, True)):
            self.assertEqual(stay_cells.trains_again(told, {5}), again, told)
        self.assertFalse(stay_cells.trains_again(killed + trains, {5, 6}))

    def kill_at_call(self, case, launched, statuses, told="", ranks=2):
        life = mock.Mock(**{"wait.return_value": statuses, "text.return_value": told})
        training = mock.Mock(ranks=ranks, launched=launched, **{"start.return_value": life})
        with mock.patch.multiple(process_cells, begin=lambda *_: training):
            process_cells.kill_at_call("save")(case)
        return case.kills

    def test_a_rank_that_ends_otherwise_was_not_killed_at_a_call(self):
        def told(how):
            return "\n".join(f"rank {rank} (process {4 + rank}) {how}" for rank in range(2))
        killed = told("was killed by signal 9 (Killed)")
        self.assertEqual(self.kill_at_call(self.case("killed"), True, [1], killed), 5)
        self.assertEqual(self.kill_at_call(self.case("alone"), False, [-9], ranks=1), 5)
        self.assertEqual(self.kill_at_call(self.case("no call"), False, [0, 0]), 0)
        self.is_silent("exited", self.kill_at_call, True, [1], told("exited with status 1"))
        self.is_silent("launcher", self.kill_at_call, True, [-signal.SIGSEGV], killed)
        self.is_silent("failed", self.kill_at_call, False, [1], "", 1)
        self.is_silent("peer", self.kill_at_call, False, [-9, -9], killed)
        self.is_silent("both failed", self.kill_at_call, False, [1, 1], killed)

    def check_killed(self, case, status, iteration):
        """Judges rank 0, whose peer was killed."""
        life = mock.Mock(**{"wait.return_value": [status, -9], "text.return_value": "",
                            "last_iteration.return_value": iteration})
        process_cells.check_killed(case, mock.Mock(ranks=2, launched=False), life, [1], "step")

    def test_a_rank_that_crashes_after_its_peer_was_killed_has_not_held(self):
        for status, iteration in ((1, 9), (1, TOTAL), (0, TOTAL)):
            self.check_killed(self.case(f"{status} {iteration}"), status, iteration)
        for status, iteration in ((0, 9), (-signal.SIGSEGV, 9), (-signal.SIGABRT, TOTAL), (2, 9)):
            self.is_silent(f"{status} {iteration}", self.check_killed, status, iteration)

    def fill(self, case, content):
        """Runs a command that ends with status 0, on a full disk that then holds `content`."""
        command = commands.Conversion("convert", (), {}, "out")
        command.run = lambda *_: subprocess.CompletedProcess([], 0, b"", b"")
        case.world.made["command convert"] = ({"out/file": b"text"}, {"out/file"}, None)
        folder, seen = case.folder / "case", case.folder / "seen"
        for each in (folder, seen):
            each.mkdir()
        for name, text in content.items():
            (seen / name).write_bytes(text)
        with mock.patch.multiple(disk_cells, fresh=lambda *_: folder, needed_bytes=lambda *_: 8192,
                                 SmallDisk=lambda *_: mock.Mock(enter=[], seen=seen)):
            disk_cells.fill(command, "out")(case)

    def test_status_0_on_a_full_disk_stands_for_the_whole_result(self):
        self.fill(self.case("whole"), {"file": b"text"})
        self.is_silent("empty", self.fill, {})
        self.is_silent("cut", self.fill, {"file": b"te"})

    def visit(self, name, phase, count, missed):
        case = self.case(name)
        training = mock.Mock(layout="dp2", **{"start.return_value.wait.return_value": [0, 0]})
        with mock.patch.multiple(stranger_cells, Training=lambda *_: training,
                                 MOMENTS=mock.MagicMock(),
                                 Strangers=lambda *_: mock.Mock(count=count, missed=missed)):
            stranger_cells.visited(phase, 8, None)(case)
        return case.faults

    def test_strangers_that_reach_no_port_are_no_case(self):
        self.assertEqual(self.visit("some", "start", 7, 2), 7)
        self.assertEqual(self.visit("done before", "step", 0, 0), 0)
        for name, phase, missed in (("none", "step", 1), ("none at the start", "start", 0)):
            with self.subTest(name), self.assertRaisesRegex(RuntimeError, "no stranger reached"):
                self.visit(name, phase, 0, missed)

    def test_a_soak_needs_the_samples_of_every_rank(self):
        samples = [{"memory": 1, "descriptors": 2, "threads": 3, "files": 4, "iteration": iteration}
                   for iteration in range(1, 101)]
        self.assertTrue(soak.judge("dp2", 100, 2 * [samples], samples, 1)[0])
        for number in (0, 1, 3):
            with self.subTest(number):
                with self.assertRaises(SystemExit) as end:
                    soak.judge("dp2", 100, number * [samples], samples, 1)
                self.assertEqual(end.exception.code, f"dp2: found samples of {number} processes, "
                                 "allowed: of 2 ranks")

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
