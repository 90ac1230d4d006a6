"""Runs that are killed or terminated and start again with another number of ranks and another
layout: each resumes from the newest checkpoint, and its numbers are those of one process."""

import signal
import time

from case import LEFT, LOST, SILENT, Cell, left_over
from process_cells import check_killed, kills_of, shorten
from support import LOCKSTEP, run
from training import (LAYOUTS, NUMBERS, TIMEOUT, TOTAL, Training, config_of, ended_by_itself,
                      numbers_of, settings)

# At this learning rate, rounding errors do not grow from step to step.
FP64 = settings("train.precision=fp64", "optimizer.lr=0.002", "optimizer.min_lr=0.0002")
LARGER = {
    "dp3 tp2": (6, settings("parallel.tensor_model_parallel_size=2")),
    "dp6 dist-opt": (6, settings("ddp.use_distributed_optimizer=true")),
    "dp2 tp2 pp2": (8, settings("parallel.tensor_model_parallel_size=2",
                                "parallel.pipeline_model_parallel_size=2")),
    "dp2 cp2 tp2 dist-opt": (8, settings("parallel.tensor_model_parallel_size=2",
                                         "parallel.context_parallel_size=2",
                                         "ddp.use_distributed_optimizer=true")),
}
SIZES = LAYOUTS | LARGER
TOLERANCES = {NUMBERS.index("lm_loss"): 1e-12, NUMBERS.index("grad_norm"): 1e-11}


def of_one_process(world):
    """Returns the numbers of an undisturbed run in fp64."""
    def make(folder):
        result = run(LOCKSTEP, "train", config_of(world), "--output", folder / "run", *FP64,
                     timeout=600)
        if result.returncode != 0:
            raise RuntimeError(result.stderr.decode())
        return numbers_of(folder / "run")
    return world.once("run of one process", make)


class Resized(Training):
    """A run in which each start has another layout."""

    def __init__(self, case):
        super().__init__(case, "1 rank", True)
        self.fixed = self.more
        self.layout = None

    def start(self, *extra, **environment):
        self.layout = self.case.choose(name for name in SIZES if name != self.layout)
        self.ranks, of_layout = SIZES[self.layout]
        self.more = (*self.fixed, *of_layout, *FP64)
        return super().start(*extra, **environment)

    def check_numbers(self):
        found = numbers_of(self.output)
        for line, wanted in zip(found, of_one_process(self.case.world)):
            same = all(abs(a - b) <= TOLERANCES.get(index, 0) * abs(b)
                       for index, (a, b) in enumerate(zip(line, wanted)))
            self.case.require(LOST, same, f"on {self.layout}: metrics {line}, one process {wanted}")
        return found

    def check_end(self):
        found = self.check_numbers()
        self.case.require(LOST, len(found) == TOTAL, f"{len(found)} lines of metrics")
        partial = [name for name in left_over(self.output, set())
                   if ".partial" in name or ".unfinished" in name]
        self.case.require(LEFT, not partial, f"files {partial}")


def resize(case):
    training = Resized(case)
    for _ in kills_of(case):
        life = training.start()
        progress = case.random.randint(1, 10)
        if not life.wait_for(lambda: life.iterations() >= progress):
            ended_by_itself(case, life)
            break
        time.sleep(case.random.uniform(0, 0.05))
        victim = case.draw(case.random.randrange(training.ranks))
        kind = case.choose((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        if not life.send(kind, [victim]):
            ended_by_itself(case, life)
            break
        case.count_sent(kind)
        if kind == signal.SIGKILL:
            check_killed(case, training, life, [victim], "step")
        else:
            statuses = life.wait(4 * TIMEOUT)
            case.require(SILENT, statuses in ([3], [0]),
                         lambda: f"status {statuses}: {shorten(life.text())}")
        training.judge(life)
    training.finish()


CELLS = [Cell("SIGKILL, another layout", "step", resize, 50)]
