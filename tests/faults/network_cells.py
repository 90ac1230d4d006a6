"""Two ranks on two hosts (network namespaces), and the link between them: lost for good, lost for a
while, or slow."""

import contextlib
import subprocess
import time
import uuid

from case import NAMED, SILENT, SLACK_SECONDS, Cell, Skipped, shorten
from fault_test import quiet_port
from process_cells import MOMENTS, begin
from support import LOCKSTEP, SOURCE, clean_environment
from training import LAYOUTS, TIMEOUT, Life, config_of, ended_by_itself
from two_hosts import TwoHosts, Unavailable

OF_TWO = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 2]


@contextlib.contextmanager
def available():
    """Skips a case that this machine cannot run."""
    try:
        yield
    except Unavailable as error:
        raise Skipped(str(error)) from None


class ApartLife(Life):
    """A start of two ranks in two namespaces."""

    def __init__(self, training, number, hosts):
        case = self.case = training.case
        self.ranks, self.launched, self.start_key = 2, False, None
        self.marker = f"LOCKSTEP_TEST_RUN={uuid.uuid4()}"
        self.began, self.processes, self.errors = time.monotonic(), [], []
        name, value = self.marker.split("=")
        port = quiet_port()
        for rank in range(2):
            error = case.folder / f"stderr.{number}.{rank}"
            environment = clean_environment(**hosts.environment(rank, port), **{name: value})
            words = hosts.words(rank, LOCKSTEP, "train", config_of(case.world), "--output",
                                training.output, *training.more)
            with error.open("wb") as file:
                self.processes.append(subprocess.Popen(
                    words, stdout=subprocess.DEVNULL, stderr=file, cwd=SOURCE, env=environment))
            self.errors.append(error)
        case.processes += self.processes


def on_two_hosts(phase, change):
    """Calls `change(case, hosts)` in the phase. If it returns True, both ranks must see a lost link
    within the timeout."""
    def body(case):
        with available(), TwoHosts() as hosts:
            training = begin(case, phase, OF_TWO)
            training.launched = False
            training.newest, training.lives = 0, training.lives + 1
            life = ApartLife(training, training.lives, hosts)
            MOMENTS[phase](training, life)
            if life.any_ended():
                ended_by_itself(case, life)
            else:
                case.faults += 1
                lost = change(case, hosts)
                check_ended(case, life, TIMEOUT + 2 * SLACK_SECONDS if lost else 300)
            if life.text().count("does not answer") == 0 and \
                    all(process.poll() == 0 for process in life.processes):
                training.judge(life)
                training.check_end()
                return
            training.judge(life)
            training.finish()
    return body


def check_ended(case, life, seconds):
    """Both ranks end in time: with status 0, or with status 1 and the other rank's name."""
    statuses = life.wait(seconds)
    case.require(SILENT, all(status in (0, 1) for status in statuses),
                 lambda: f"status {statuses}: {shorten(life.text())}")
    for rank, status in enumerate(statuses):
        if status == 1:
            case.require(NAMED, f"rank {1 - rank}" in life.text(rank),
                         lambda: shorten(life.text(rank)))


def lose(case, hosts):
    hosts.set_link("down")
    return True


def lose_for_a_while(case, hosts):
    hosts.set_link("down")
    time.sleep(case.draw(case.random.uniform(0.2, TIMEOUT / 3)))
    hosts.set_link("up")
    return False


def slow_down(case, hosts):
    hosts.slow(case.choose(("500kbit", "2mbit", "10mbit")))
    return False


CELLS = [
    *(Cell("link lost", phase, on_two_hosts(phase, lose), 5, sample) for phase, sample in
      (("start", 0), ("step", 0), ("save", 0), ("asynchronous save", 0))),
    *(Cell("link lost for less than the timeout", phase, on_two_hosts(phase, lose_for_a_while), 4,
           sample) for phase, sample in (("step", 1), ("save", 0), ("asynchronous save", 0))),
    *(Cell("link slow", phase, on_two_hosts(phase, slow_down), 3) for phase in ("step", "save")),
]
