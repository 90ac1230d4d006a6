"""Commands that are killed, stopped or terminated at a random moment, or killed at each of their
calls in turn."""

import signal
import subprocess
import time

from case import HUNG, SILENT, Cell, shorten
from commands import COMMANDS, QUICK, fresh
from faults import faults
from support import SOURCE, clean_environment

CONVERTING = ("export", "export over an export", "import", "data build",
              "data build over a data set", "data merge", "index cache")
CHANGES = ("open", "write", "fsync", "rename", "unlink", "mkdir", "close", "truncate", "link")


def seconds_of(case, command):
    """Returns the seconds that the command takes without a fault."""
    def make(folder):
        command.prepare(case.world, folder)
        begin = time.monotonic()
        command.run(case, folder)
        return time.monotonic() - begin
    command.undisturbed(case.world)
    return case.world.once(f"seconds {command.name}", make)


def at_a_moment(command, number):
    def body(case):
        folder = fresh(case, command)
        whole = seconds_of(case, command)
        # Most writing happens near the end.
        share = case.draw(case.random.choice((case.random.uniform(0, 1.05),
                                              case.random.uniform(0.7, 1.05))))
        process = subprocess.Popen([str(word) for word in command.line(case.world, folder)],
                                   env=clean_environment(), cwd=SOURCE, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)
        case.processes.append(process)
        time.sleep(share * whole)
        if process.poll() is None:
            case.count_sent(number)
            process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(0.3)
                process.send_signal(signal.SIGCONT)
        try:
            told = process.communicate(timeout=case.limit(60))[1].decode()
        except subprocess.TimeoutExpired:
            case.require(HUNG, False, "it does not end")
        result = subprocess.CompletedProcess([], process.returncode, b"", told.encode())
        allowed = {signal.SIGKILL: (0, -signal.SIGKILL), signal.SIGSTOP: (0,),
                   signal.SIGTERM: (0, 3, -signal.SIGTERM)}[number]
        case.require(SILENT, result.returncode in allowed,
                     lambda: f"status {result.returncode}: {shorten(told)}")
        if result.returncode == 0:
            command.check_done(case, folder, result)
        command.check_between(case, folder)
        command.check_again(case, folder)
    return body


def kills_of(command):
    """Kills before and after each call that changes something, and inside each write."""
    def plan(world):
        numbers = command.undisturbed(world)[2][None]  # these commands have one process
        return [f"{operation}:{action}:{nth}" for operation in CHANGES
                for nth in range(1, numbers[operation] + 1)
                for action in ("kill", "kill-after", "kill-inside")
                if action != "kill-inside" or operation == "write"]
    return plan


def kill_at_call(command):
    def body(case, rule):
        folder = fresh(case, command)
        result = command.run(case, folder, **faults(f"{rule}:{folder}/"))
        case.require(SILENT, result.returncode == -signal.SIGKILL, f"status {result.returncode}")
        case.count_sent(signal.SIGKILL)
        command.check_between(case, folder)
        command.check_again(case, folder)
    return body


CELLS = [
    *(Cell("SIGKILL at a call", name, kill_at_call(COMMANDS[name]),
           400 if name in QUICK else 24, int(name == "export"), kills_of(COMMANDS[name])) for name in CONVERTING),
    *(Cell("SIGKILL, random moment", name, at_a_moment(COMMANDS[name], signal.SIGKILL),
           60 if name in QUICK else 8) for name in CONVERTING),
    *(Cell("SIGTERM", name, at_a_moment(COMMANDS[name], signal.SIGTERM), 3)
      for name in CONVERTING),
    *(Cell("SIGSTOP, then SIGCONT", name, at_a_moment(COMMANDS[name], signal.SIGSTOP), 2)
      for name in CONVERTING),
]
