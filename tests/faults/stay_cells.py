"""Ranks that are killed while the others keep their processes (train.elastic = dp): new processes
or spares replace them, or the run continues with fewer."""

import re
import signal
import time

from case import LOST, SILENT, Cell
from process_cells import choose_layout, kills_of, moment_of_save, shorten
from resize_cells import FP64, SIZES, Resized
from support import LOCKSTEP, run
from training import SEVERAL, TOTAL, Training, complete_steps, settings

ELASTIC = settings("train.elastic=dp")
COPIES = settings("checkpoint.in_memory_replicas=1")
# What the launcher says of a process that ended by itself or by a signal, and before it ends a run
# that cannot continue.
ENDED = re.compile(r"\(process (\d+)\) (?:was killed|exited)")
TOO_FEW = "left, allowed by"


def wait_for_moment(case, training, life):
    """Waits for a step, a save, or soon after the last kill, when ranks meet and resume."""
    kind = case.random.choice(("step", "save", "meeting"))
    if kind == "meeting" and case.faults:
        time.sleep(case.random.uniform(0, 1.5))
    elif kind == "save":
        moment_of_save(training, life)
    else:
        before, progress = life.iterations(), case.random.randint(1, 8)
        life.wait_for(lambda: life.iterations() >= before + progress)
        time.sleep(case.random.uniform(0, 0.05))


def trains_again(told, killed):
    """Returns whether the launcher has told of all the processes `killed`, and ranks have trained
    in a new round since."""
    ends = list(ENDED.finditer(told))
    return killed <= {int(end[1]) for end in ends} and \
        re.search(r"^training .*\n(.*\n)*?iteration +\d+/", told[ends[-1].end():], re.M) is not None


def running(case, life, stay):
    """Returns the process of each rank, none if the run ends. The processes `stay` must be among
    them."""
    pids = life.pids()
    told = life.text()  # later: a process that is missing because the run ends ends after the words
    if life.any_ended() or life.last_iteration() == TOTAL or TOO_FEW in told:
        return {}
    case.require(SILENT, stay <= set(pids.values()),
                 lambda: f"of the processes {stay} stay {pids}: {shorten(told)}")
    return pids


def kill_some(case, training, life, kills, several):
    """Kills one rank, or two at once. The remaining ranks must keep their processes. Returns the
    processes that were killed, and those that were there and were not."""
    killed, stay = set(), set()
    for _ in range(kills):
        wait_for_moment(case, training, life)
        pids = running(case, life, stay)
        count = 2 if several and len(pids) > 2 and case.random.random() < 0.3 else 1
        victims = case.draw(sorted(case.random.sample(sorted(pids), min(count, len(pids)))))
        if not victims:
            break
        killed |= {pids[victim] for victim in victims}
        stay = (stay | set(pids.values())) - killed
        if not life.send(signal.SIGKILL, victims):
            break
        case.count_sent(signal.SIGKILL, len(victims))
    if killed and life.wait_for(lambda: trains_again(life.text(), killed)):
        running(case, life, stay)
    return killed, stay


def check_told(case, told, killed, stay):
    """No rank ended because of another one's end."""
    lost = {int(end[1]) for end in ENDED.finditer(told)} & stay
    case.require(SILENT, not lost and "ending the other ranks" not in told,
                 lambda: f"killed: {killed}, but {lost} ended, too: {shorten(told)}")


def replace(case, *more, spares=0):
    training = Training(case, choose_layout(case, SEVERAL), True, *ELASTIC, *more,
                        options=("--max-restarts", "20", "--spares", str(spares)))
    life = training.start()
    killed, stay = kill_some(case, training, life, len(kills_of(case)), several=True)
    statuses = life.wait(240)
    case.require(SILENT, statuses == [0], lambda: f"status {statuses}: {shorten(life.text())}")
    check_told(case, life.text(), killed, stay)
    training.newest = 0
    life.check_nothing_runs()
    training.check_end()


def resume_from_memory(case):
    replace(case, *COPIES)


def replace_by_spares(case):
    """Spares are killed, too. A restart replaces the ranks that they cannot."""
    replace(case, *(COPIES if case.random.random() < 0.5 else ()),
            spares=case.draw(case.random.randint(1, 3)))


class Shrinking(Resized):
    """Starts with a layout of several data-parallel ranks."""

    copies = ()

    def start(self, *extra, **environment):
        self.layout = self.case.choose(name for name in SIZES if "dp" in name)
        self.ranks, of_layout = SIZES[self.layout]
        self.more = (*self.fixed, *of_layout, *FP64, *ELASTIC, *self.copies)
        return Training.start(self, *extra, **environment)


class ShrinkingWithCopies(Shrinking):
    copies = COPIES


def go_on_with_fewer(case, kind=Shrinking):
    training = kind(case)
    life = training.start()
    killed, stay = kill_some(case, training, life, case.random.randint(1, training.ranks - 1),
                             several=False)
    statuses = life.wait(240)
    life.check_nothing_runs()
    told = life.text()
    check_told(case, told, killed, stay)
    if statuses == [0]:
        return training.check_end()
    # A rank may be killed when the others have done all their work.
    nobody_left = killed and "no rank is left" in told and \
        (not stay or life.last_iteration() == TOTAL)
    case.require(SILENT, statuses == [1] and (nobody_left or TOO_FEW in told),
                 lambda: f"status {statuses}, killed: {killed}: {shorten(told)}")
    training.check_numbers()
    if complete_steps(training.checkpoints):
        verified = run(LOCKSTEP, "checkpoint", "verify", training.checkpoints)
        case.require(LOST, verified.returncode == 0, verified.stderr.decode())


CELLS = [Cell("SIGKILL, ranks that stay", "step, save, meeting", replace, 24, 1),
         Cell("SIGKILL, ranks that stay, copies in memory", "step, save, meeting",
              resume_from_memory, 24, 1),
         Cell("SIGKILL, spares", "step, save, meeting", replace_by_spares, 24, 1),
         Cell("SIGKILL, fewer ranks that stay", "step, save, meeting", go_on_with_fewer, 24, 1),
         Cell("SIGKILL, fewer ranks that stay, copies in memory", "step, save, meeting",
              lambda case: go_on_with_fewer(case, ShrinkingWithCopies), 24, 1)]
