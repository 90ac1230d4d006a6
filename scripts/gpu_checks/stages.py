"""Stages, each under its own limit of time: one that fails or is late does not stop the next."""

import time

from . import report as states
from .commands import CommandFailed, Result, all_ranks_need, run, run_ranks

SHORTEST = 3  # seconds; with less left nothing is started


class NoTimeLeft(Exception):
    pass


class Context:
    """What a stage works with."""

    def __init__(self, bundle, report, folder, device, clock=time.monotonic):
        self.bundle, self.report, self.folder, self.device = bundle, report, folder, device
        self.clock, self.deadline, self.stage = clock, float("inf"), ""

    def begin(self, stage, seconds):
        self.stage, self.deadline = stage, self.clock() + seconds

    def left(self):
        return self.deadline - self.clock()

    def seconds(self, wanted):
        """At most what the stage has left."""
        if self.left() < SHORTEST:
            raise NoTimeLeft
        return min(wanted, self.left())

    def add(self, check, state, detail=""):
        self.report.add(self.stage, check, state, detail)

    def attempt(self, check, action, state=states.OK):
        """Runs `action`, which returns a detail; whatever it raises is a row and no more. Without
        `state` only that is told. Whether it raised nothing."""
        try:
            detail = action() or ""
            if state:
                self.add(check, state, detail)
            return True
        except NoTimeLeft:
            self.add(check, states.LEFT_OUT, "the stage has no time left")
        except CommandFailed as error:
            self.add(check, states.FAILED, str(error))
        except Exception as error:
            self.add(check, states.FAILED, f"{type(error).__name__}: {error}")
        return False

    def run(self, command, seconds, environment=None, cwd=None):
        result = run(command, self.bundle.environment(environment), self.seconds(seconds), cwd)
        self._log(command, [result])
        return result

    def run_ranks(self, command, ranks, seconds, environment=None):
        """The ranks are hosts of their own, on the CPU as on the one GPU."""
        results = run_ranks(command, ranks, self.bundle.environment(environment),
                            self.seconds(seconds), one_gpu=True)
        self._log(command, results)
        return results

    def train(self, command, ranks, seconds, environment=None):
        all_ranks_need(self.run_ranks(command, ranks, seconds, environment))

    def _log(self, command, results: list[Result]):
        words = " ".join(str(word) for word in command)
        for rank, result in enumerate(results):
            self.report.note(f"$ {words}  [rank {rank}: {result.status}, {result.seconds:.1f} s]")
            self.report.note((result.output + result.error)[-40_000:])


def run_stages(stages, context, seconds, has_device):
    """Each stage runs; where there is no device it checks what needs none."""
    end = context.clock() + seconds
    for stage in stages:
        left = end - context.clock()
        context.begin(stage.NAME, min(stage.SECONDS, left))
        if left < SHORTEST:
            context.add("the stage", states.LEFT_OUT, "no time is left")
            continue
        if not has_device:
            context.attempt("what needs no GPU", lambda: stage.check(context))
            context.add("the stage", states.LEFT_OUT, "no CUDA device")
            continue
        try:
            stage.run(context)
        except NoTimeLeft:
            context.add("the rest of the stage", states.LEFT_OUT, "the stage has no time left")
        except Exception as error:
            context.add("the stage", states.FAILED, f"{type(error).__name__}: {error}")
