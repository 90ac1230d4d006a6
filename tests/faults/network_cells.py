"""Two ranks on two hosts (network namespaces), and the link between them: lost for good, lost for a
while, or slow."""

import subprocess
import time
import uuid

from case import NAMED, SILENT, SLACK_SECONDS, Cell, Skipped, shorten
from fault_test import quiet_port
from process_cells import MOMENTS, begin
from support import LOCKSTEP, SOURCE, clean_environment
from training import LAYOUTS, TIMEOUT, Life, config_of, ended_by_itself

OF_TWO = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 2]


def command(*words):
    return subprocess.run([str(word) for word in words], capture_output=True, check=False)


class Hosts:
    """Two namespaces and a link, as a context manager that removes them."""

    def __init__(self):
        tag = uuid.uuid4().hex[:6]
        self.spaces = [f"lockstep-{tag}-{i}" for i in range(2)]
        self.links = [f"ls{tag}{i}" for i in range(2)]

    def __enter__(self):
        try:
            made = [command("ip", "netns", "add", space) for space in self.spaces]
        except FileNotFoundError:
            raise Skipped("no program `ip`") from None
        made.append(command("ip", "link", "add", self.links[0], "netns", self.spaces[0], "type",
                            "veth", "peer", "name", self.links[1], "netns", self.spaces[1]))
        for i, (space, link) in enumerate(zip(self.spaces, self.links)):
            made += [command("ip", "-n", space, "addr", "add", f"192.0.2.{i + 1}/24", "dev", link),
                     command("ip", "-n", space, "link", "set", link, "up"),
                     command("ip", "-n", space, "link", "set", "lo", "up")]
        failed = [each.stderr.decode().strip() for each in made if each.returncode != 0]
        if failed:
            self.__exit__()
            raise Skipped(f"no network namespaces: {failed[0]}")
        return self

    def __exit__(self, *_):
        for space in self.spaces:
            command("ip", "netns", "delete", space)

    def set_link(self, state):
        command("ip", "-n", self.spaces[1], "link", "set", self.links[1], state)

    def slow(self, rate):
        """Slows down both directions; raises Skipped if the kernel has no such queue."""
        for space, link in zip(self.spaces, self.links):
            made = command("tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", "rate",
                           rate, "burst", "16kb", "latency", "400ms")
            if made.returncode != 0:
                raise Skipped(f"no slow link: {made.stderr.decode().strip()}")


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
            environment = clean_environment(
                RANK=rank, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_ADDR="192.0.2.1",
                MASTER_PORT=port, LOCKSTEP_DIRECT_MEMORY=0, GLOO_SOCKET_IFNAME=hosts.links[rank],
                **{name: value})
            words = ("ip", "netns", "exec", hosts.spaces[rank], LOCKSTEP, "train",
                     config_of(case.world), "--output", training.output, *training.more)
            with error.open("wb") as file:
                self.processes.append(subprocess.Popen(
                    [str(word) for word in words], stdout=subprocess.DEVNULL, stderr=file,
                    cwd=SOURCE, env=environment))
            self.errors.append(error)
        case.processes += self.processes


def on_two_hosts(phase, change):
    """Calls `change(case, hosts)` in the phase. If it returns True, both ranks must see a lost link
    within the timeout."""
    def body(case):
        with Hosts() as hosts:
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
