"""Programs under a time limit: a single one, several ranks on one GPU, a server."""

import dataclasses
import json
import os
import pathlib
import queue
import random
import signal
import socket
import subprocess
import threading
import time

from .report import one_line

# The first and the last port that the system gives to connections of programs that name none.
PORTS_OF_SYSTEM = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")


class CommandFailed(Exception):
    """The failure of a program, in one line."""


class Lacking(CommandFailed):
    """A tool that this machine does not have."""


@dataclasses.dataclass
class Result:
    status: int | None  # None: it was killed at its time limit
    output: str
    error: str
    seconds: float

    def reason(self):
        if self.status is None:
            return f"not done within {self.seconds:.0f} s; {one_line(self.error or self.output)}"
        what = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return f"{what}: {one_line(self.error or self.output)}"

    def needs(self, *statuses):
        if self.status not in (statuses or (0,)):
            raise CommandFailed(self.reason())
        return self


def end(process):
    """Kills a process and those that it started; it leads its own session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def start(command, environment, cwd=None, stdin=subprocess.DEVNULL):
    return subprocess.Popen([str(word) for word in command], env=environment, cwd=cwd, stdin=stdin,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            errors="replace", start_new_session=True)


def finish(process, deadline, started):
    try:
        output, error = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        return Result(process.returncode, output, error, time.monotonic() - started)
    except subprocess.TimeoutExpired:
        end(process)
        output, error = process.communicate()
        return Result(None, output, error, time.monotonic() - started)


def run(command, environment, seconds, cwd=None):
    started = time.monotonic()
    try:
        process = start(command, environment, cwd)
    except OSError as error:
        raise CommandFailed(f"{command[0]} cannot be run: {error.strerror}") from error
    return finish(process, started + seconds, started)


def free_port():
    """Returns a free port. Nothing holds it until the ranks use it, so the system must not give it
    to another program's connection: it is outside that range, if anything is. The search begins at
    random, because others may search at the same time."""
    try:
        first, last = map(int, PORTS_OF_SYSTEM.read_text().split())
    except OSError:
        first, last = 32768, 60999  # Linux's default
    ports = [*range(10000, first), *range(last + 1, 65536)] or list(range(10000, 65536))
    begin = random.randrange(len(ports))
    for port in ports[begin:] + ports[:begin]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise CommandFailed(f"none of {len(ports)} ports is free")


def rank_environment(rank, ranks, port, one_gpu):
    """torchrun's variables. With `one_gpu` all ranks take device 0: NCCL refuses two ranks of one
    host on one device, and identifies hosts by NCCL_HOSTID."""
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    if one_gpu:
        variables |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NCCL_HOSTID": f"h{rank}",
                      "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(value) for name, value in variables.items()}


def run_all(programs, seconds):
    """Runs programs, each a command with its environment, at once; returns the Result of each. None
    of them waits for another one's output to be read, and none outlives the call."""
    started, processes, threads = time.monotonic(), [], []
    results = [None] * len(programs)

    def wait(index):
        results[index] = finish(processes[index], started + seconds, started)

    try:
        for index, (command, environment) in enumerate(programs):
            processes.append(start(command, environment))
            threads.append(threading.Thread(target=wait, args=(index,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    finally:
        for process in processes:
            if process.poll() is None:
                end(process)
        for thread in threads:
            thread.join()
    return results


def run_ranks(command, ranks, environment, seconds, one_gpu=False):
    """Returns the Result of each rank."""
    port = free_port()
    return run_all([(command, environment | rank_environment(rank, ranks, port, one_gpu))
                    for rank in range(ranks)], seconds)


def all_ranks_need(results):
    """Raises CommandFailed for the first rank that failed. A rank that was killed at its time limit
    is named only if no other failed."""
    bad = [(result.status is None, rank) for rank, result in enumerate(results)
           if result.status != 0]
    if bad:
        rank = min(bad)[1]
        raise CommandFailed(f"rank {rank}: {results[rank].reason()}")


class Server:
    """A program that answers each line with a line of JSON."""

    def __init__(self, command, environment):
        self._process = start(command, environment, stdin=subprocess.PIPE)
        self._lines, self._errors = queue.Queue(), []
        self._threads = [threading.Thread(target=read) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self):
        self._errors.extend(self._process.stderr)

    def answer(self, seconds):
        try:
            line = self._lines.get(timeout=max(0.1, seconds))
        except queue.Empty:
            raise CommandFailed(f"no answer within {seconds:.0f} s") from None
        if line is None:
            self._threads[1].join(5)
            raise CommandFailed(one_line("".join(self._errors)))
        return json.loads(line)

    def ask(self, question, seconds):
        try:
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended; answer() reports that
        return self.answer(seconds)

    def close(self):
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            pass
        end(self._process)
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdout, self._process.stderr):
            pipe.close()
