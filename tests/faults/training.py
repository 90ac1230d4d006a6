"""Trainings of one to four ranks that suffer faults, and what must hold afterwards."""

import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import time
import uuid

from case import (HUNG, LEFT, LOST, NAMED, NAMING_SECONDS, SILENT, SLACK_SECONDS, Broken,
                  left_over, shorten, tree_of, wait_until)
from fault_test import quiet_port
from shutdown_test import processes_of
from support import LOCKSTEP, SOURCE, clean_environment, run

TOTAL = 48     # iterations of a run
INTERVAL = 3   # between its saves
TIMEOUT = 8    # parallel.distributed_timeout_seconds
NUMBERS = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "num_tokens",
           "skipped")
CONFIG = """
model {{ num_layers: 2 hidden_size: 32 num_attention_heads: 2 seq_length: 32 }}
optimizer {{ lr: 0.01 lr_decay_style: "constant" }}
data {{ path: "{text}" }}
train {{ micro_batch_size: 2 global_batch_size: 12 train_iters: {total} eval_iters: 0 log_interval: 1 }}
checkpoint {{ save_interval: {interval} keep: 2 }}
"""


def settings(*pairs):
    return tuple(word for pair in pairs for word in ("--set", pair))


LAYOUTS = {
    "1 rank": (1, ()),
    "dp2": (2, ()),
    "dp3 dist-opt": (3, settings("ddp.use_distributed_optimizer=true")),
    "sharded dp2": (2, settings("ddp.use_distributed_optimizer=true",
                                "ddp.data_parallel_sharding_strategy=optim_grads_params")),
    "tp2": (2, settings("parallel.tensor_model_parallel_size=2")),
    "pp2": (2, settings("parallel.pipeline_model_parallel_size=2")),
    "cp2": (2, settings("parallel.context_parallel_size=2")),
    "tp2 pp2": (4, settings("parallel.tensor_model_parallel_size=2",
                            "parallel.pipeline_model_parallel_size=2")),
    "dp2 tp2 dist-opt": (4, settings("parallel.tensor_model_parallel_size=2",
                                     "ddp.use_distributed_optimizer=true")),
}
SEVERAL = [name for name, (ranks, _) in LAYOUTS.items() if ranks > 1]
OF_SAMPLE = ("dp2", "pp2")  # each layout costs one undisturbed run


def write_config(folder):
    text = folder / "text"
    text.write_text("".join(f"{i} squared is {i * i}. " for i in range(900)))
    config = folder / "small.textproto"
    config.write_text(CONFIG.format(text=text, total=TOTAL, interval=INTERVAL))
    return config


def config_of(world):
    return world.once("config", write_config)


def numbers_of(output):
    """Returns the reproducible values of each complete line of metrics.jsonl."""
    path = output / "metrics.jsonl"
    if not path.exists():
        return []
    text = path.read_text()
    lines = (json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines())
    return [[line.get(name) for name in NUMBERS] for line in lines]


def complete_steps(folder):
    """Returns the iterations of the complete checkpoints."""
    found = (re.fullmatch(r"step_(\d+)", path.parent.name)
             for path in folder.glob("step_*/manifest.textproto"))
    return sorted(int(match[1]) for match in found if match)


def newest_step(folder):
    """Returns the iteration of the newest checkpoint, or 0. It is the first complete one in
    `latest`, because replacing that file makes a checkpoint count; without one, the highest."""
    complete = complete_steps(folder)
    latest = folder / "latest"
    listed = re.findall(r"^step_(\d+)$", latest.read_text(), re.M) if latest.exists() else []
    return next((step for step in map(int, listed) if step in complete), max(complete, default=0))


def shards_of(step):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(step.glob("rank_*.safetensors"))}


def undisturbed(world, layout):
    """Returns the numbers, the last shards and the files of an undisturbed run of the layout."""
    def make(folder):
        ranks, more = LAYOUTS[layout]
        result = run(LOCKSTEP, "launch", "-n", ranks, "--starter", "own", "--", "train",
                     config_of(world), "--output", folder / "run", *more, timeout=600)
        if result.returncode != 0:
            raise RuntimeError(result.stderr.decode())
        found = numbers_of(folder / "run")
        if [line[0] for line in found] != list(range(1, TOTAL + 1)):
            raise RuntimeError(f"{layout}: the undisturbed run is not whole")
        return found, shards_of(folder / "run" / "checkpoint" / f"step_{TOTAL}"), \
            tree_of(folder / "run")
    return world.once(f"run {layout}", make)


class Life:
    """One start of a run's ranks: by `lockstep launch`, or each by hand."""

    def __init__(self, training, number, extra, environment):
        case, ranks = training.case, training.ranks
        self.case, self.ranks, self.launched = case, ranks, training.launched
        self.marker = f"LOCKSTEP_TEST_RUN={uuid.uuid4()}"
        self.began = time.monotonic()
        self.start_key = f"start {training.layout}"
        arguments = ["train", config_of(case.world), "--output", training.output, *training.more,
                     *extra]
        name, value = self.marker.split("=")
        environment = {name: value, **environment}
        if self.launched:
            starts = [(["launch", "-n", ranks, "--starter", "own", *training.options, "--",
                        *arguments], {})]
        else:
            port = quiet_port()
            starts = [(arguments, {} if ranks == 1 else {
                "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for rank in range(ranks)]
        self.processes, self.errors = [], []
        for index, (words, variables) in enumerate(starts):
            error = case.folder / f"stderr.{number}.{index}"
            with error.open("wb") as file:
                self.processes.append(subprocess.Popen(
                    [str(word) for word in (LOCKSTEP, *words)], stdout=subprocess.DEVNULL,
                    stderr=file, cwd=SOURCE, env=clean_environment(**variables, **environment)))
            self.errors.append(error)
        case.processes += self.processes

    def text(self, index=None):
        chosen = self.errors if index is None else [self.errors[index]]
        return "\n".join(path.read_text(errors="replace") for path in chosen)

    def iterations(self):
        """Returns the number of iterations that this life has reported."""
        found = len(re.findall(r"^iteration +\d+/", self.text(0), re.M))
        if found and self.start_key:  # remembers how long such a start takes
            self.case.world.made[self.start_key] = time.monotonic() - self.began
            self.start_key = None
        return found

    def last_iteration(self):
        return max(map(int, re.findall(r"^iteration +(\d+)/", self.text(0), re.M)), default=0)

    def ended(self):
        return all(process.poll() is not None for process in self.processes)

    def any_ended(self):
        return any(process.poll() is not None for process in self.processes)

    def wait_for(self, reached, seconds=120):
        """Waits until reached() or until a process ends; returns whether none has ended."""
        wait_until(lambda: reached() or self.any_ended(), self.case.limit(seconds), 0.001)
        return not self.any_ended()

    def pids(self):
        """Returns the process of each running rank, by rank; a spare is listed by its process."""
        if not self.launched:
            return {rank: process.pid for rank, process in enumerate(self.processes)
                    if process.poll() is None}
        found = {}
        launcher = self.processes[0].pid
        try:
            children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
        except OSError:
            return found
        for child in map(int, children.split()):
            try:
                variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            is_spare = any(variable.startswith(b"LOCKSTEP_SPARE_OF=") for variable in variables)
            for variable in variables:
                if variable.startswith(b"RANK="):
                    found[child if is_spare else int(variable[5:])] = child
        return found

    def send(self, number, victims):
        """Sends a signal to ranks, or to the launcher; returns whether all of them were there."""
        if victims == ["launcher"]:
            self.processes[0].send_signal(number)
            return True
        # No second look-up: a rank that ends because its peer dies was not killed.
        pids = self.pids()
        for victim in victims:
            if victim in pids:
                try:
                    os.kill(pids[victim], number)
                except ProcessLookupError:
                    pids.pop(victim)
        return all(victim in pids for victim in victims)

    def wait(self, seconds, victims=(), naming=None):
        """Waits until every process has ended; returns their statuses. The output must name a
        victim within `naming` seconds from now (None: within `seconds`)."""
        case, begin = self.case, time.monotonic()
        survivors = [index for index in range(len(self.processes))
                     if self.launched or index not in victims]
        named = {}

        def look():
            if survivors:
                for victim in victims:
                    if victim not in named and re.search(
                            rf"rank {victim}\b.*(exited|killed|answer|claim|serve|arrive|signal|abort)",
                            self.text()):
                        named[victim] = time.monotonic() - begin
            return all(self.processes[index].poll() is not None for index in survivors)

        wait_until(look, case.limit(seconds))
        look()
        waiting = [index for index in survivors if self.processes[index].poll() is None]
        case.require(HUNG, not waiting, lambda: f"still there after {seconds} s: "
                     f"{waiting}: {shorten(self.text())}")
        done = self.last_iteration() == TOTAL  # nobody waits for a rank any more
        if survivors and victims and victims != ["launcher"] and not done:
            after = min(named.values(), default=None)
            case.require(NAMED, after is not None and after <= case.limit(naming or seconds),
                         lambda: f"ranks {victims}: {named}; {shorten(self.text())}")
            case.seconds.append(after)
        return [process.poll() for process in self.processes]

    def check_nothing_runs(self):
        gone = wait_until(lambda: not processes_of(self.marker), self.case.limit(SLACK_SECONDS), 0.05)
        self.case.require(LEFT, gone, lambda: f"processes {processes_of(self.marker)}")


class Training:
    """A run of a layout that is started again and again in the same folder."""

    def __init__(self, case, layout, launched, *more, options=()):
        self.case, self.layout, self.launched, self.options = case, layout, launched, options
        self.ranks, of_layout = LAYOUTS[layout]
        self.output = case.folder / "run"
        self.checkpoints = self.output / "checkpoint"
        self.more = (*of_layout, *settings(
            f"checkpoint.load={self.checkpoints}", "checkpoint.load_if_present=true",
            f"parallel.distributed_timeout_seconds={case.limit(TIMEOUT)}"), *more)
        self.lives = 0
        self.known = 0  # the newest checkpoint that a life has reported as complete

    def start(self, *extra, **environment):
        self.newest = newest_step(self.checkpoints)
        self.lives += 1
        return Life(self, self.lives, extra, environment)

    def judge(self, life):
        """Checks the state after a life has ended, in whatever way."""
        case = self.case
        life.check_nothing_runs()
        told = life.text()
        loaded = re.search(r"loaded \S+/step_(\d+)", told)
        if loaded or life.iterations():
            case.require(LOST, int(loaded[1] if loaded else 0) == self.newest,
                         f"{self.newest} was the newest checkpoint, {loaded and loaded[0]}")
        saved = [int(step) for step in re.findall(r"saved \S+/step_(\d+)", told)]
        saving = [int(step) for step in re.findall(r"saving \S+/step_(\d+)", told)]
        self.known = max([self.known, *saved, *saving[:-1]])
        steps = complete_steps(self.checkpoints)
        case.require(LOST, newest_step(self.checkpoints) >= self.known,
                     f"checkpoint {self.known} was complete, {steps} are there")
        if steps:
            verified = run(LOCKSTEP, "checkpoint", "verify", self.checkpoints)
            case.require(LOST, verified.returncode == 0, verified.stderr.decode())
        self.check_numbers()

    def check_numbers(self):
        expected, _, _ = undisturbed(self.case.world, self.layout)
        found = numbers_of(self.output)
        for line, wanted in zip(found, expected):
            self.case.require(LOST, line == wanted, f"metrics {line}, undisturbed {wanted}")
        return found

    def finish(self):
        """Starts once more, undisturbed: the run ends like an undisturbed one."""
        life = self.start()
        statuses = life.wait(240)
        self.case.require(SILENT, statuses == [0] * len(statuses),
                          lambda: f"the last start: {statuses}: {shorten(life.text())}")
        self.judge(life)
        self.check_end()

    def check_end(self):
        expected, shards, tree = undisturbed(self.case.world, self.layout)
        found = self.check_numbers()
        self.case.require(LOST, len(found) == len(expected), f"{len(found)} lines of metrics")
        step = self.checkpoints / f"step_{TOTAL}"
        self.case.require(LOST, shards_of(step) == shards, "weights or state of the last step "
                          "differ from those of the undisturbed run")
        extra = left_over(self.output, tree)
        self.case.require(LEFT, not extra, f"files {extra}")
        self.case.require(LEFT, len(complete_steps(self.checkpoints)) <= 2,
                          f"checkpoints {complete_steps(self.checkpoints)}")


def ended_by_itself(case, life):
    """A life that ended before its fault must have finished all its work."""
    statuses = life.wait(60)
    if statuses != [0] * len(statuses):
        raise Broken(SILENT, f"ended without a fault: {statuses}: {shorten(life.text())}")


KILLED = -signal.SIGKILL
