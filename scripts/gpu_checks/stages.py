"""Stages, each under its own time limit: if one fails or is late, the next still runs."""

import concurrent.futures
import copy
import itertools
import time

from . import report as states
from .commands import CommandFailed, Lacking, Result, all_ranks_need, run, run_ranks

SHORTEST = 3  # seconds; with less time left nothing is started


class NoTimeLeft(Exception):
    pass


class Context:
    """The tools and the state of a stage."""

    def __init__(self, bundle, report, folder, device, clock=time.monotonic):
        self.bundle, self.report, self.folder, self.device = bundle, report, folder, device
        self.clock, self.deadline, self.stage = clock, float("inf"), ""

    def begin(self, stage, seconds):
        self.stage, self.deadline = stage, self.clock() + seconds

    def of_stage(self, stage, seconds):
        """Returns a copy with its own stage and deadline: stages may run side by side."""
        own = copy.copy(self)
        own.begin(stage, seconds)
        return own

    def left(self):
        return self.deadline - self.clock()

    def seconds(self, wanted):
        """Returns `wanted`, but at most the time that the stage has left."""
        if self.left() < SHORTEST:
            raise NoTimeLeft
        return min(wanted, self.left())

    def add(self, check, state, detail=""):
        self.report.add(self.stage, check, state, detail)

    def attempt(self, check, action, state=states.OK):
        """Runs `action`, which returns a detail. An exception becomes a row and nothing more; a
        tool that is lacking is no failure. Without `state`, success adds no row. Returns whether
        nothing was raised."""
        try:
            detail = action() or ""
            if state:
                self.add(check, state, detail)
            return True
        except NoTimeLeft:
            self.add(check, states.LEFT_OUT, "the stage has no time left")
        except Lacking as error:
            self.add(check, states.LEFT_OUT, str(error))
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
        """Each rank is its own host, on the CPU as on the one GPU."""
        results = run_ranks(command, ranks, self.bundle.environment(environment),
                            self.seconds(seconds), one_gpu=True)
        self._log(command, results)
        return results

    def train(self, command, ranks, seconds, environment=None):
        """Returns the Result of each rank."""
        results = self.run_ranks(command, ranks, seconds, environment)
        all_ranks_need(results)
        return results

    def _log(self, command, results: list[Result]):
        words = " ".join(str(word) for word in command)
        for rank, result in enumerate(results):
            self.report.note(f"$ {words}  [rank {rank}: {result.status}, {result.seconds:.1f} s]")
            self.report.note((result.output + result.error)[-40_000:])


def at_once(actions, threads):
    """Calls each action, `threads` at a time, and waits for all of them."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for call in [pool.submit(action) for action in actions]:
            call.result()


def run_stage(stage, context, has_device):
    if context.left() < SHORTEST:
        context.add("the stage", states.LEFT_OUT, "no time is left")
    elif not has_device:
        context.attempt("what needs no GPU", lambda: stage.check(context))
        context.add("the stage", states.LEFT_OUT, "no CUDA device")
    else:
        try:
            stage.run(context)
        except NoTimeLeft:
            context.add("the rest of the stage", states.LEFT_OUT, "the stage has no time left")
        except Exception as error:
            context.add("the stage", states.FAILED, f"{type(error).__name__}: {error}")


def run_stages(stages, context, seconds, has_device):
    """Runs each stage; without a device, only its checks that need none. Adjacent stages that time
    nothing run side by side."""
    end = context.clock() + seconds
    for timed, group in itertools.groupby(stages, lambda stage: getattr(stage, "TIMED", True)):
        group = list(group)

        def run_one(stage):
            own = context.of_stage(stage.NAME, min(stage.SECONDS, end - context.clock()))
            run_stage(stage, own, has_device)

        at_once([lambda stage=stage: run_one(stage) for stage in group], 1 if timed else len(group))
