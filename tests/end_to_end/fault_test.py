"""Ranks that stop, die or lose their network, and launchers that disappear: every other rank ends
in time and names the rank first. Real processes, started by hand: no launcher ends the others.

LOCKSTEP_FAULTS=all tries every rank of 2, 3 and 4 in every phase, with either kind of store."""

import concurrent.futures
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import unittest
import uuid

from support import LOCKSTEP, TORCHRUN, Ranks, clean_environment, end, metrics

ALL = os.environ.get("LOCKSTEP_FAULTS") == "all"
TIMEOUT = 5  # seconds, in runs with a rank that stops
LONG = 60    # in runs with a rank that dies; nobody needs to wait for it
SLACK = 15   # for a machine with other work
ENDLESS = ("--set", "train.train_iters=1000000", "--set", "train.eval_iters=0",
           "--set", "train.global_batch_size=24")
LAYOUTS = {
    "dp": (), "dist-opt": ("--set", "ddp.use_distributed_optimizer=true"),
    "tp": ("--set", "parallel.tensor_model_parallel_size=2"),
    "pp": ("--set", "parallel.pipeline_model_parallel_size=2", "--set", "model.num_layers=2"),
    "cp": ("--set", "parallel.context_parallel_size=2")}
SAVING = ("--set", "checkpoint.save_interval=1", "--set", "checkpoint.keep=1")
# Serves the store like torchrun's agent.
AGENT = """import time, torch.distributed as d
store = d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1e6)"""


def at_once(test, cases, body, width):
    """Runs body(*case) for each case, `width` at a time; joins the lists that they return."""
    results = []
    with concurrent.futures.ThreadPoolExecutor(width) as pool:
        for case, future in [(case, pool.submit(body, *case)) for case in cases]:
            with test.subTest(case=case):
                results += future.result() or []
    return results


def command(*arguments):
    return subprocess.run([str(a) for a in arguments], capture_output=True, check=False)


def quiet_port():
    """Returns a free port outside the range from which the system picks ports for connections of
    other runs."""
    while True:
        port = random.randrange(10000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def sockets_of(process):
    try:
        folder = pathlib.Path(f"/proc/{process.pid}/fd")
        return sum(os.readlink(entry).startswith("socket:") for entry in folder.iterdir())
    except OSError:
        return 0  # a socket was closed meanwhile


class Run:
    """Some ranks of one run, and how they end."""

    def __init__(self, test, ranks, arguments, timeout, agent=None, **start):
        self.output = test.folder / str(uuid.uuid4())[:8]
        self.test = test
        environment = start.pop("environment", {})
        if agent:
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True",
                            "LOCKSTEP_RUN_ID": self.output.name}
        self.processes = test.start(
            ranks, "--output", self.output, *ENDLESS, *arguments, "--set",
            f"parallel.distributed_timeout_seconds={timeout}", port=agent or quiet_port(), **start,
            **environment)

    def wait_for(self, reached, what):
        deadline = time.monotonic() + 60
        while not reached():
            for process in self.processes:
                if process.poll() is not None:
                    self.test.fail(f"{what}: {process.communicate()[1].decode()}")
            self.test.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.002)

    def wait_for_claims(self, rank_0_serves):
        """Waits until each process has the two store connections of a rank that has claimed its
        place. If rank 0 serves it, it also listens and holds both ends of its own connections."""
        others = len(self.processes) - 1
        needed = [5 + 2 * others if rank_0_serves else 2] + [2] * others
        self.wait_for(lambda: all(sockets_of(process) >= number for process, number in
                                  zip(self.processes, needed)), "claims")

    def wait_for_iterations(self):
        file = self.output / "metrics.jsonl"
        self.wait_for(lambda: file.exists() and file.read_bytes().count(b"\n") >= 3, "iterations")

    def wait_for_save(self):
        folder = self.output / "checkpoint"
        self.wait_for_iterations()
        self.wait_for(lambda: list(folder.glob("step_*.partial")), "a save")

    def outcome(self, limit):
        """Returns {rank: (seconds until its end, status, error)}; None if it still runs."""
        begin, ends = time.monotonic(), {}
        while len(ends) < len(self.processes) and time.monotonic() < begin + limit:
            for rank, process in enumerate(self.processes):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic() - begin
            time.sleep(0.005)
        return {rank: (ends[rank], process.returncode, process.communicate()[1].decode())
                if rank in ends else None for rank, process in enumerate(self.processes)}


class Faults(Ranks):
    @classmethod
    def setUpClass(cls):
        cls.agent, cls.agent_port = cls.start_agent()

    @classmethod
    def tearDownClass(cls):
        end(cls.agent)

    @staticmethod
    def start_agent():
        """Starts a process that serves a store; returns it and its port."""
        agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE,
                                 env=clean_environment())
        return agent, int(agent.stdout.readline())

    def check_survivors(self, run, victim, limit, message, after_rank=": "):
        """All ranks but the victim end with status 1. Their messages begin with the reporting rank,
        `after_rank` and `message`."""
        outcome = run.outcome(limit)
        seconds = []
        for rank, found in outcome.items():
            if rank == victim:
                continue
            self.assertIsNotNone(found, f"rank {rank} has not ended {limit} s after rank {victim}")
            self.assertEqual(found[1], 1, found[2])
            self.assertRegex(found[2], rf"(?m)^lockstep: rank {rank}{after_rank}{message}")
            seconds.append(found[0])
        return seconds

    def stop(self, ranks, victim, layout, phase, agent):
        run = Run(self, ranks, (*LAYOUTS[layout], *(SAVING if phase == "save" else ())), TIMEOUT,
                  self.agent_port if agent else None)
        (run.wait_for_save if phase == "save" else run.wait_for_iterations)()
        run.processes[victim].send_signal(signal.SIGSTOP)
        return self.check_survivors(
            run, victim, TIMEOUT + SLACK,
            rf"rank {victim}( does not answer|, which serves the store at \S+, has not answered)")

    def test_a_stopped_rank_is_named_within_the_timeout(self):
        cases = [(2, 0, "dp", "step", False), (2, 1, "dp", "step", False),
                 (2, 0, "pp", "step", False), (2, 0, "cp", "save", False),
                 (4, 2, "tp", "step", True), (3, 0, "dist-opt", "save", True)]
        if ALL:
            cases = [(ranks, victim, layout, phase, agent) for ranks in (2, 3, 4)
                     for victim in range(ranks) for layout in LAYOUTS for phase in ("step", "save")
                     for agent in (False, True) if ranks != 3 or layout in ("dp", "dist-opt")]
        seconds = at_once(self, cases, self.stop, 6)
        print(f"stopped: {len(cases)} runs, the others ended after {summary(seconds)}, timeout "
              f"{TIMEOUT} s")

    def kill(self, ranks, victim, layout, phase, agent):
        run = Run(self, ranks, (*LAYOUTS[layout], *(SAVING if phase == "save" else ())), LONG,
                  self.agent_port if agent else None)
        (run.wait_for_save if phase == "save" else run.wait_for_iterations)()
        time.sleep(random.uniform(0, 0.05))
        run.processes[victim].kill()
        return self.check_survivors(
            run, victim, 2 + SLACK,
            rf"rank {victim}(, which serves the store at \S+,)? has exited: \S+ \(?.*over group")

    def test_a_dead_rank_is_named_at_once(self):
        cases = [(2, 0, "dp", "step", False), (2, 1, "dist-opt", "step", False),
                 (3, 0, "dp", "step", False), (3, 2, "dp", "save", False),
                 (4, 3, "tp", "step", False), (4, 0, "pp", "save", False),
                 (2, 1, "pp", "step", True), (2, 0, "cp", "save", True),
                 (4, 1, "pp", "step", True)]
        if ALL:
            cases = [(ranks, victim, layout, phase, agent) for ranks in (2, 3, 4)
                     for victim in range(ranks) for layout in LAYOUTS for phase in ("step", "save")
                     for agent in (False, True) if ranks != 3 or layout in ("dp", "dist-opt")]
        seconds = at_once(self, cases, self.kill, 3)
        print(f"killed: {len(cases)} runs, the others ended after {summary(seconds)}")

    def test_a_rank_that_dies_before_all_have_met_is_named_at_once(self):
        """Rank 2 has not started yet."""
        def kill(victim, agent):
            run = Run(self, 3, (), LONG, self.agent_port if agent else None, leave_out={2})
            run.wait_for_claims(not agent)
            time.sleep(0.2)
            run.processes[victim].kill()
            message = rf"rank {victim}(, which serves the store at \S+,)? has exited"
            return self.check_survivors(run, victim, 2 + SLACK, message)
        seconds = at_once(self, ((0, False), (1, False), (0, True), (1, True)), kill, 4)
        print(f"killed before all had met: 4 runs, the others ended after {summary(seconds)}")

    def test_a_store_that_stops_before_all_have_met_is_named_within_the_timeout(self):
        run = Run(self, 3, (), 2 * TIMEOUT, leave_out={2})
        run.wait_for_claims(True)
        run.processes[0].send_signal(signal.SIGSTOP)
        self.check_survivors(run, 0, 2 * TIMEOUT + SLACK,
                             r"rank 0, which serves the store at \S+, has not answered for")

    def test_deaths_in_the_start_end_the_others(self):
        """The death comes at any moment from the first instruction to the first iteration."""
        moments = random.Random(1)

        def kill(victim, agent, moment):
            run = Run(self, 3, (), TIMEOUT, self.agent_port if agent else None)
            time.sleep(moment)
            run.processes[victim].kill()
            # If a rank dies before it has met any other, nobody can know before the timeout.
            return self.check_survivors(run, victim, TIMEOUT + SLACK,
                                        rf"(rank \d cannot .*?)?rank {victim}\b",
                                        "(: | cannot .*?)")
        cases = [(victim, agent, moments.uniform(0.2, 2)) for victim in range(3)
                 for agent in (False, True) for _ in range(10 if ALL else 1)]
        seconds = at_once(self, cases, kill, 3)
        print(f"killed in the start: {len(cases)} runs, the others ended after {summary(seconds)}")

    def test_a_run_goes_on_after_a_pause(self):
        run = Run(self, 2, (), TIMEOUT)
        run.wait_for_iterations()
        run.processes[0].send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT / 2)
        run.processes[0].send_signal(signal.SIGCONT)
        before = len(metrics(run.output)[0])
        run.wait_for(lambda: len(metrics(run.output)[0]) > before + 3, "iterations after the pause")

    def test_without_its_launcher_a_run_saves_and_ends(self):
        def kill(layout):
            agent, port = self.start_agent()
            self.addCleanup(end, agent)
            run = Run(self, 2, LAYOUTS[layout], TIMEOUT, port)
            run.wait_for_iterations()
            agent.kill()
            self.assert_saved_without_launcher(run, port)
        at_once(self, [("dp",), ("pp",), ("dist-opt",)], kill, 3)

    def assert_saved_without_launcher(self, run, port):
        for rank, found in run.outcome(TIMEOUT + SLACK).items():
            self.assertIsNotNone(found, f"rank {rank} goes on without its launcher")
            self.assertEqual(found[1], 1, found[2])
            self.assertRegex(found[2], rf"(?m)^lockstep: rank {rank}: the launcher's store at "
                             rf"127.0.0.1:{port} has exited; stopped after iteration \d+$")
        last = metrics(run.output)[0][-1]["iteration"]
        inspected = command(LOCKSTEP, "checkpoint", "verify", run.output / "checkpoint")
        self.assertEqual(inspected.returncode, 0, inspected.stderr)
        self.assertTrue((run.output / "checkpoint" / f"step_{last}").exists())

    def test_a_launcher_that_stops_changes_nothing(self):
        agent, port = self.start_agent()
        self.addCleanup(end, agent)
        run = Run(self, 2, (), TIMEOUT, port)
        run.wait_for_iterations()
        agent.send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT + 1)
        before = len(metrics(run.output)[0])
        run.wait_for(lambda: len(metrics(run.output)[0]) > before + 3, "iterations without answers")

    def test_a_stopped_host_of_the_store_is_named_first(self):
        """The launcher's agent and the ranks on its host stop."""
        def stop(ranks, victims, layout):
            agent, port = self.start_agent()
            self.addCleanup(end, agent)
            run = Run(self, ranks, LAYOUTS[layout], TIMEOUT, port)
            run.wait_for_iterations()
            agent.send_signal(signal.SIGSTOP)
            for victim in victims:
                run.processes[victim].send_signal(signal.SIGSTOP)
            names = ", ".join(map(str, victims))
            message = rf"rank {names} does not answer" if len(victims) == 1 else \
                rf"ranks {names} do not answer"
            seconds = []
            for rank, found in run.outcome(TIMEOUT + SLACK).items():
                if rank in victims:
                    continue
                self.assertIsNotNone(found, f"rank {rank} goes on")
                self.assertEqual(found[1], 1, found[2])
                self.assertRegex(found[2], rf"(?m)^lockstep: rank {rank}: {message}: \S+ .*failed "
                                 rf"on rank {rank} ")
                self.assertRegex(found[2], rf"the launcher's store at \S+:{port} has not answered")
                self.assertNotIn("of the group", found[2])
                seconds.append(found[0])
            return seconds
        cases = ((2, (0,), "dp"), (4, (0, 1), "tp"), (3, (0, 2), "dp"))
        seconds = at_once(self, cases, stop, 3)
        print(f"host of the store stopped: {len(cases)} runs, the others ended after "
              f"{summary(seconds)}, timeout {TIMEOUT} s")

    def test_ranks_end_after_a_sigkill_of_torchrun(self):
        output = self.folder / "launched"
        script = '"$@"; echo "rank $RANK: status $?" >&2'
        rank = ("bash", "-c", script, "bash", LOCKSTEP, "train", self.config, "--output", output,
                *ENDLESS, "--set", f"parallel.distributed_timeout_seconds={TIMEOUT}")
        launcher = subprocess.Popen(
            [str(a) for a in (TORCHRUN, "--standalone", "--no-python", "--nproc-per-node", 2,
                              *rank)],
            env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(end, launcher)
        self.wait_for_iterations(output)
        launcher.kill()
        error = launcher.communicate(timeout=TIMEOUT + SLACK)[1].decode()  # the ranks hold the pipe
        for number in range(2):
            self.assertRegex(error, rf"lockstep: rank {number}: the launcher's store at \S+ has "
                             r"exited; stopped after iteration \d+")
            self.assertIn(f"rank {number}: status 1", error)
        last = metrics(output)[0][-1]["iteration"]
        self.assertTrue((output / "checkpoint" / f"step_{last}").exists())


def summary(seconds):
    if not seconds:
        return "nothing"
    return (f"{min(seconds):.1f} to {max(seconds):.1f} s (median "
            f"{statistics.median(seconds):.1f} s of {len(seconds)})")


class Links(Ranks):
    """Two ranks on two hosts (network namespaces), and the link between them."""

    def setUp(self):
        super().setUp()
        if not shutil.which("ip"):
            self.skipTest("no program `ip`: no link between two ranks was cut")
        tag = uuid.uuid4().hex[:6]
        self.spaces = [f"lockstep-{tag}-{i}" for i in range(2)]
        self.links = [f"ls{tag}{i}" for i in range(2)]
        self.addCleanup(lambda: [command("ip", "netns", "delete", s) for s in self.spaces])
        made = [command("ip", "netns", "add", s) for s in self.spaces]
        made.append(command("ip", "link", "add", self.links[0], "netns", self.spaces[0], "type",
                            "veth", "peer", "name", self.links[1], "netns", self.spaces[1]))
        for i, (space, link) in enumerate(zip(self.spaces, self.links)):
            made += [command("ip", "-n", space, "addr", "add", f"192.0.2.{i + 1}/24", "dev", link),
                     command("ip", "-n", space, "link", "set", link, "up"),
                     command("ip", "-n", space, "link", "set", "lo", "up")]
        failed = [m.stderr.decode().strip() for m in made if m.returncode != 0]
        if failed:
            self.skipTest(f"no network namespaces, so that no link was cut: {failed[0]}")

    def start(self, ranks, *arguments, port=None, **ignored):
        processes = []
        for rank in range(ranks):
            environment = clean_environment(
                RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1,
                MASTER_ADDR="192.0.2.1", MASTER_PORT=port, LOCKSTEP_DIRECT_MEMORY=0,
                GLOO_SOCKET_IFNAME=self.links[rank])
            processes.append(subprocess.Popen(
                [str(a) for a in ("ip", "netns", "exec", self.spaces[rank], LOCKSTEP, "train",
                                  self.config, *arguments)], env=environment,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
            self.addCleanup(end, processes[-1])
        return processes

    def begin(self, layout, phase):
        return Run(self, 2, (*LAYOUTS[layout], *(SAVING if phase == "save" else ())), TIMEOUT)

    def test_a_cut_link_ends_both_ranks_within_the_timeout(self):
        cases = (("dist-opt", "step"), ("pp", "step"), ("dp", "save"))
        runs = [self.begin(*case) for case in cases]
        for (_, phase), run in zip(cases, runs):
            (run.wait_for_save if phase == "save" else run.wait_for_iterations)()
        command("ip", "-n", self.spaces[1], "link", "set", self.links[1], "down")
        for case, run in zip(cases, runs):
            with self.subTest(case=case):
                self.check_both_ranks(run)

    def check_both_ranks(self, run):
        outcome = run.outcome(TIMEOUT + SLACK)
        for rank, message in ((0, "rank 1 does not answer"),
                              (1, r"rank 0, which serves the store at \S+, has not answered")):
            self.assertIsNotNone(outcome[rank], f"rank {rank} hangs without a link")
            self.assertEqual(outcome[rank][1], 1, outcome[rank][2])
            self.assertRegex(outcome[rank][2], rf"(?m)^lockstep: rank {rank}: {message}")


if __name__ == "__main__":
    unittest.main()
