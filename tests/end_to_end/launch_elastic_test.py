"""What `lockstep launch` does for an elastic run, with small programs as ranks: they speak with the
launcher as the ranks of `train` do, and are lost, late, suspended or at their end on demand."""

import pathlib
import resource
import signal
import sys
import time
import unittest

from elastic_spares_test import variable
from elastic_test import COMMON, Elastic, settings
from support import LOCKSTEP, free_port, run

# A rank that leaves its round when it is told to, and takes part in the next one. The test's own
# code may define leave(), which returns once the rank has left, and runs before the first round.
RANK = """
import os, pathlib, signal, socket, sys, time
folder, rank = pathlib.Path(sys.argv[0]).parent, int(os.environ["RANK"])
with (folder / "starts").open("a") as file: file.write(f"{rank} ")
channel = socket.socket(fileno=int(os.environ["LOCKSTEP_LAUNCH_CHANNEL"]))
channel.set_inheritable(False)
timeout = 60000
def note(event): (folder / f"{event} {os.getpid()}").touch()
def wait_for_file(name):
    while not (folder / name).exists(): time.sleep(0.01)
def tell(*lines): channel.send("\\n".join(lines).encode())
def hear():
    lines = channel.recv(1 << 16).decode().split("\\n")
    return lines if lines[0] else sys.exit(1)
def leave(): pass
def take_order():
    tell("waits", "3 2 1", "limits", "")
    note("waits")
    while (order := hear())[0] == "over": pass
    if order[0] == "end": sys.exit(int(order[1]))
    note("round")
def train():
    if "LOCKSTEP_SPARE_OF" in os.environ: take_order()
    note("trains")
    while True:
        hear()
        note("over")
        leave()
        take_order()
"""


class SmallElastic(Elastic):
    def begin_with(self, ranks, code="", options=()):
        """Starts ranks that run `code` and train; returns their processes, then those of spares."""
        self.program = self.folder / "rank.py"
        self.program.write_text(f"#!{sys.executable}\n{RANK}{code}\n"
                                "tell('timeout', str(timeout), '')\ntrain()\n")
        self.program.chmod(0o755)
        self.begin(ranks, options=("--program", self.program, *options))

    def begin_together(self, ranks, code="", spares=0, options=()):
        """Returns the processes once all train or, as spares, wait."""
        if spares:
            options = (*options, "--spares", spares)
        self.begin_with(ranks, code, options)
        self.wait_for(lambda: len(self.ranks()) == ranks + spares)
        processes = self.ranks()
        self.await_note("trains", *processes[:ranks])
        self.await_note("waits", *processes[ranks:])
        return processes

    def await_note(self, event, *processes):
        self.wait_for(lambda: all((self.folder / f"{event} {pid}").exists() for pid in processes))

    def await_told(self, text):
        self.wait_for(lambda: text in self.told())

    def starts(self):
        """Returns the ranks that were started, in the order of their starts."""
        return (self.folder / "starts").read_text().split()

    def check_stopped(self):
        """SIGTERM to the launcher ends the run."""
        self.process.terminate()
        self.assertEqual(self.process.wait(timeout=60), 3, self.told())


class Slots(SmallElastic):
    def check_slots(self, processes):
        """Each of the running processes has a slot, and thus a device, of its own."""
        self.wait_for(lambda: len(self.ranks()) == processes and
                      all(variable(pid, "LOCKSTEP_LAUNCH_SLOT") for pid in self.ranks()))
        self.assertEqual(sorted(variable(pid, "LOCKSTEP_LAUNCH_SLOT") for pid in self.ranks()),
                         [str(slot) for slot in range(processes)])

    def test_new_processes_have_slots_that_no_other_has(self):
        ranks = self.begin_together(2, spares=1, options=("--max-restarts", 1))
        self.check_slots(3)
        self.assertEqual([variable(pid, "LOCKSTEP_LAUNCH_SLOT") for pid in ranks], ["0", "1", "2"])
        self.kill(ranks[0])
        self.await_told("ranks that stay: 1, spares that take part: 1")
        self.await_note("round", ranks[1], ranks[2])
        self.kill(ranks[1])
        self.await_told("ranks that stay: 1, ranks restarted: 1 (restart 1 of 1)")
        self.check_slots(3)  # a rank and a spare, beside the former spare
        self.check_stopped()

    def test_a_new_spare_has_the_slot_of_the_lost_rank(self):
        ranks = self.begin_together(2, spares=1, options=("--max-restarts", 1))
        self.kill(ranks[0])
        self.await_told("new spares: 1 (restart 1 of 1)")
        self.check_slots(3)
        self.check_stopped()

    def test_the_slot_of_an_outer_launcher_is_not_taken_over(self):
        self.begin_with(1, "(folder / 'slot').write_text(str(os.environ.get("
                           "'LOCKSTEP_LAUNCH_SLOT'))); sys.exit(0)")
        self.assertEqual(self.process.wait(timeout=60), 0, self.told())
        self.assertEqual((self.folder / "slot").read_text(), "0")


class Ends(SmallElastic):
    def test_a_loss_at_the_end_of_a_run_starts_nothing_again(self):
        """Rank 0 has stopped or diverged; rank 1 is lost after that, and rank 2, if any, leaves."""
        for status in (3, 4):
            for ranks in (2, 3):
                with self.subTest(status=status, ranks=ranks):
                    (self.folder / "starts").unlink(missing_ok=True)
                    (self.folder / "go").unlink(missing_ok=True)
                    self.begin_with(ranks, options=("--max-restarts", 1), code=f"""
if rank == 0:
    wait_for_file("go")
    sys.exit({status})
""")
                    self.wait_for(lambda ranks=ranks: len(self.ranks()) == ranks)
                    processes = self.ranks()
                    self.await_note("trains", *processes[1:])
                    (self.folder / "go").touch()
                    self.wait_for(lambda first=processes[0]: first not in self.ranks())
                    self.kill(processes[1])
                    self.assertEqual(self.process.wait(timeout=60), status, self.told())
                    self.assertEqual(sorted(self.starts()), [str(rank) for rank in range(ranks)])
                    self.assertNotIn("restart", self.told())

    def test_sigterm_keeps_new_spares_from_starting(self):
        ranks = self.begin_together(2, """
def stop(*_):
    time.sleep(11)  # new spares would start after 10 seconds
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
""", spares=1, options=("--max-restarts", 1))
        self.kill(ranks[0])
        self.await_note("round", *ranks[1:])
        self.check_stopped()
        self.assertNotIn("new spares", self.told())
        self.assertEqual(sorted(self.starts()), ["0", "1", "2"])


class Late(SmallElastic):
    def test_a_long_timeout_is_not_cut_short(self):
        """That many milliseconds, and the 15 seconds that the launcher adds, are 500 beyond what a
        number of 32 bits holds."""
        ranks = self.begin_together(2, """
timeout = (1 << 32) + 500 - 15000
def leave(): time.sleep(2)
""")
        self.kill(ranks[0])
        self.await_told("continuing with 1 rank")
        self.assertNotIn("killing it", self.told())
        self.assertEqual(self.ranks(), ranks[1:])
        self.check_stopped()

    def test_a_rank_that_continues_has_the_time_of_its_round(self):
        ranks = self.begin_together(3, """
def leave(): time.sleep(3 if rank == 1 else 0)  # 2 seconds are for those that stay suspended
""")
        self.kill(ranks[2])
        self.await_note("over", ranks[1])
        self.await_note("waits", ranks[0])
        self.kill(ranks[1], number=signal.SIGSTOP)
        time.sleep(0.5)
        self.kill(ranks[1], number=signal.SIGCONT)
        self.await_told("continuing with 2 ranks")
        self.assertNotIn("killing it", self.told())
        self.check_stopped()

    def test_one_that_is_suspended_again_is_killed(self):
        ranks = self.begin_together(2, "def leave(): time.sleep(1)")
        self.kill(ranks[0])
        self.await_note("over", ranks[1])
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
            self.kill(ranks[1], number=number)
            time.sleep(0.1)
        self.assertEqual(self.process.wait(timeout=60), 1)
        self.assertIn("is stopped; killing it", self.told())


class Unstarted(SmallElastic):
    def forbid_descriptors(self):
        """The launcher gets no more of them, so that it can start no rank."""
        used = {int(path.name) for path in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir()}
        free = next(number for number in range(100) if number not in used)
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (free, free))

    def test_a_process_that_cannot_be_started_is_a_loss(self):
        ranks = self.begin_together(2, spares=1, options=(
            "--max-restarts", 3, "--rendezvous", f"127.0.0.1:{free_port()}"))
        self.kill(ranks[0])
        self.await_note("round", *ranks[1:])
        self.forbid_descriptors()
        self.kill(ranks[1])
        self.await_told("continuing with 1 rank")
        told = self.told()
        for what in ("rank 1 cannot be started: ", "a spare rank cannot be started: "):
            self.assertIn(f"{what}a rank of an elastic run needs a socket pair: Too many open "
                          "files; the others keep running", told)
        self.assertIn("(restart 3 of 3)", told)
        self.assertEqual(self.ranks(), ranks[2:])
        self.check_stopped()

    def test_first_ranks_that_cannot_be_started_are_an_error(self):
        result = run("sh", "-c", 'ulimit -n 4; exec "$@"', "sh", LOCKSTEP, "launch", "-n", 2,
                     "--rendezvous", "127.0.0.1:29999", "--program", "/bin/true", "--", "train",
                     self.config, *settings(*COMMON))
        self.assert_failed(result, 1, "launch: rank 0 of 2 ranks cannot be started: a rank of an "
                                      "elastic run needs a socket pair: Too many open files")


if __name__ == "__main__":
    unittest.main()
