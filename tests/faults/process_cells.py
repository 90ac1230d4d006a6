"""Ranks and launchers that are killed, stopped or terminated, in each phase of a training."""

import re
import signal
import time

from case import HUNG, LOST, SILENT, SLACK_SECONDS, Cell, shorten
from faults import faults
from training import (KILLED, LAYOUTS, NAMING_SECONDS, OF_SAMPLE, SEVERAL, TIMEOUT, TOTAL, Training,
                      complete_steps, ended_by_itself, settings)

KILLS = 5   # in a chain: each start after the first follows a kill
OF_SAMPLE_KILLS = 2
ASYNC = settings("checkpoint.async_save=true")
# Calls that change a checkpoint folder, with about as many as a save makes.
CALLS = {"open": 12, "write": 12, "fsync": 8, "rename": 4, "unlink": 8, "mkdir": 2, "close": 12}


def start_seconds(training):
    """Returns how long a start takes until its first iteration, as last measured for the layout."""
    return training.case.world.made.setdefault(f"start {training.layout}", 1.5)


def moment_of_start(training, life):
    """Waits for any moment from the first instruction to the first iteration, or soon after."""
    seconds = start_seconds(training)
    time.sleep(training.case.random.uniform(0, 1.1 * seconds))


def moment_of_load(training, life):
    """Waits for a moment from just before the checkpoint is read until the first iteration."""
    seconds = start_seconds(training)
    time.sleep(training.case.random.uniform(0.4 * seconds, 1.1 * seconds))


def moment_of_step(training, life):
    progress = training.case.random.randint(1, 6)
    pause = training.case.random.uniform(0, 0.04)
    if life.wait_for(lambda: life.iterations() >= progress):
        time.sleep(pause)


def moment_of_save(training, life):
    progress = training.case.random.randint(1, 4)
    pause = training.case.random.uniform(0, 0.012)
    if life.wait_for(lambda: life.iterations() >= progress):
        life.wait_for(lambda: any(training.checkpoints.glob("step_*.partial")), 5)
        time.sleep(pause)


MOMENTS = {"start": moment_of_start, "load": moment_of_load, "step": moment_of_step,
           "save": moment_of_save, "asynchronous save": moment_of_save}


def choose_layout(case, layouts):
    return case.choose([name for name in layouts if not case.world.sample or name in OF_SAMPLE])


def kills_of(case):
    return range(OF_SAMPLE_KILLS if case.world.sample else KILLS)


def begin(case, phase, layouts=tuple(LAYOUTS)):
    layout = choose_layout(case, layouts)
    launched = case.choose((True, False)) if LAYOUTS[layout][0] > 1 else False
    more = ASYNC if phase == "asynchronous save" else ()
    training = Training(case, layout, launched, *more)
    if phase == "load":  # makes a checkpoint to start from
        life = training.start(*settings("train.train_iters=6"))
        life.wait_for(lambda: life.iterations() >= 1)
        statuses = life.wait(120)
        case.require(SILENT, statuses == [0] * len(statuses), lambda: shorten(life.text()))
    return training


def choose_victims(case, training):
    ranks = training.ranks
    kinds = ["one"] * 3 + (["all"] if ranks > 1 else []) + (["launcher"] if training.launched else [])
    kind = case.random.choice(kinds)
    victims = ["launcher"] if kind == "launcher" else list(range(ranks)) if kind == "all" else \
        [case.random.randrange(ranks)]
    return case.draw(victims)


def check_killed(case, training, life, victims, phase):
    """The other ranks end with an error, and name a rank that was killed."""
    # If a rank dies before it has met any other, only its launcher knows.
    unknown = phase in ("start", "load") and not training.launched
    limit = TIMEOUT + SLACK_SECONDS if unknown else NAMING_SECONDS
    if victims == ["launcher"]:
        life.wait(SLACK_SECONDS)
        return
    alone = len(victims) == training.ranks and not training.launched
    statuses = life.wait(limit + SLACK_SECONDS, () if alone else victims, limit)
    if unknown:
        case.seconds.clear()
    done = life.last_iteration() == TOTAL
    for index, status in enumerate(statuses):
        was_killed = not training.launched and index in victims
        allowed = (KILLED,) if was_killed else (0, 1) if done else (1,)
        case.require(SILENT, status in allowed, lambda: f"status {statuses} after SIGKILL of "
                     f"{victims}: {shorten(life.text())}")


def kill(phase):
    def body(case):
        training = begin(case, phase)
        for _ in kills_of(case):
            life = training.start()
            victims = choose_victims(case, training)
            MOMENTS[phase](training, life)
            if life.any_ended() and life.iterations():
                ended_by_itself(case, life)
                break
            if not life.send(signal.SIGKILL, victims):
                life.wait(TIMEOUT + 2 * SLACK_SECONDS)  # a rank had not started yet
            else:
                case.count_sent(signal.SIGKILL, len(victims))
                check_killed(case, training, life, victims, phase)
            training.judge(life)
        training.finish()
    return body


def kill_at_call(phase):
    """Kills before, after or inside the n-th call that changes something in the checkpoints."""
    def body(case):
        training = begin(case, phase)
        for _ in kills_of(case):
            victim = case.random.randrange(training.ranks)
            operation = case.random.choice(list(CALLS))
            actions = ("kill", "kill-after") + (("kill-inside",) if operation == "write" else ())
            rule = case.draw(f"{operation}:{case.random.choice(actions)}:"
                             f"{case.random.randint(1, CALLS[operation])}:{training.checkpoints}")
            rank = victim if training.ranks > 1 else None
            life = training.start(**faults(rule, rank=rank))
            if training.ranks == 1 or training.launched:
                statuses = life.wait(240)
            else:
                statuses = life.wait(240, [])
            if statuses == [0] * len(statuses):
                break  # this rank makes no such call
            told = life.text()
            if training.launched:
                died = statuses == [1] and re.search(
                    rf"rank {victim} \(process \d+\) was killed by signal 9", told)
            else:
                died = statuses[victim] == KILLED and all(
                    status in (0, 1) for other, status in enumerate(statuses) if other != victim)
            case.require(SILENT, died, lambda: f"status {statuses}, where SIGKILL was to end "
                         f"rank {victim} alone: {shorten(told)}")
            case.count_sent(signal.SIGKILL)
            case.require(SILENT, training.ranks == 1 or f"rank {victim}" in told,
                         lambda: f"rank {victim} was killed: {shorten(told)}")
            training.judge(life)
        training.finish()
    return body


def kill_and_restart(case):
    """`lockstep launch --max-restarts` restarts the ranks by itself."""
    training = Training(case, choose_layout(case, SEVERAL), True, options=("--max-restarts", "9"))
    life = training.start()
    for _ in kills_of(case):
        victim = case.draw(case.random.randrange(training.ranks))
        before = life.iterations()
        progress = case.random.randint(1, 8)
        if not life.wait_for(lambda: life.iterations() >= before + progress
                             and len(life.pids()) == training.ranks):
            break
        time.sleep(case.random.uniform(0, 0.05))
        if not life.send(signal.SIGKILL, [victim]):
            break
        case.count_sent(signal.SIGKILL)
    statuses = life.wait(240)
    case.require(SILENT, statuses == [0], lambda: f"status {statuses}: {shorten(life.text())}")
    restarts = life.text().count("restarting all ranks")
    case.require(SILENT, restarts >= case.faults - 1, f"{restarts} restarts")
    training.newest = 0
    life.check_nothing_runs()
    training.check_end()


def pause(phase):
    """SIGSTOP for less than the timeout: the run continues."""
    def body(case):
        training = begin(case, phase)
        life = training.start()
        victim = case.draw(case.random.randrange(training.ranks))
        MOMENTS[phase](training, life)
        if life.send(signal.SIGSTOP, [victim]):
            case.faults += 1
            time.sleep(case.draw(case.random.uniform(0.1, TIMEOUT / 2)))
            life.send(signal.SIGCONT, [victim])
        statuses = life.wait(240)
        case.require(SILENT, statuses == [0] * len(statuses),
                     lambda: f"a pause ends the run: {statuses}: {shorten(life.text())}")
        training.judge(life)
        training.check_end()
    return body


def stop(phase):
    """SIGSTOP forever: the others name the rank within the timeout and end."""
    def body(case):
        training = begin(case, phase, SEVERAL)
        life = training.start()
        victim = case.draw(case.random.randrange(training.ranks))
        MOMENTS[phase](training, life)
        if life.any_ended() or not life.send(signal.SIGSTOP, [victim]):
            ended_by_itself(case, life)
        else:
            case.faults += 1
            try:
                # A launcher gives the stopped rank ten seconds to end.
                statuses = life.wait(2 * TIMEOUT + 2 * SLACK_SECONDS, [victim],
                                     TIMEOUT + SLACK_SECONDS)
            finally:
                life.send(signal.SIGKILL, [victim])
                case.end()
            case.seconds.clear()
            rest = [status for index, status in enumerate(statuses)
                    if training.launched or index != victim]
            case.require(SILENT, all(status == 1 for status in rest),
                         lambda: f"status {statuses}: {shorten(life.text())}")
        training.judge(life)
        training.finish()
    return body


def terminate(phase):
    """SIGTERM to one rank, to all, or to the launcher: the state is saved, the status is 3."""
    def body(case):
        training = begin(case, phase)
        for _ in range(1 if case.world.sample else 3):
            life = training.start()
            victims = choose_victims(case, training)
            MOMENTS[phase](training, life)
            if life.any_ended():
                ended_by_itself(case, life)
                break
            began = life.iterations() > 0
            if life.send(signal.SIGTERM, victims):
                case.faults += len(victims)
            statuses = life.wait(2 * TIMEOUT + 2 * SLACK_SECONDS)
            done = life.last_iteration() == TOTAL
            allowed = (3,) + ((0,) if done else ()) + \
                (() if began else (1, -signal.SIGTERM, -signal.SIGKILL))
            case.require(SILENT, all(status in allowed for status in statuses),
                         lambda: f"status {statuses}: {shorten(life.text())}")
            if began:
                steps = complete_steps(training.checkpoints)
                case.require(LOST, max(steps, default=0) == life.last_iteration(),
                             f"{steps} are there after iteration {life.last_iteration()}")
            training.judge(life)
        training.finish()
    return body


def stray_children(case):
    """The launcher stops for a while: the ranks do not need it."""
    training = Training(case, choose_layout(case, SEVERAL), True)
    life = training.start()
    moment_of_step(training, life)
    if life.send(signal.SIGSTOP, ["launcher"]):
        case.faults += 1
        time.sleep(case.draw(case.random.uniform(0.1, 2)))
        life.send(signal.SIGCONT, ["launcher"])
    statuses = life.wait(240)
    case.require(HUNG, statuses == [0], lambda: f"status {statuses}: {shorten(life.text())}")
    training.judge(life)
    training.check_end()


CELLS = [
    *(Cell("SIGKILL, random moment", phase, kill(phase), count, sample) for phase, count, sample in
      (("start", 20, 1), ("load", 20, 1), ("step", 24, 1), ("save", 24, 1),
       ("asynchronous save", 20, 1))),
    *(Cell("SIGKILL at a call", phase, kill_at_call(phase), count, sample) for phase, count, sample
      in (("save", 16, 1), ("asynchronous save", 16, 0))),
    Cell("SIGKILL, launch --max-restarts", "step, save", kill_and_restart, 12, 1),
    *(Cell("SIGSTOP, shorter than the timeout", phase, pause(phase), 6, sample) for phase, sample in
      (("start", 0), ("load", 0), ("step", 1), ("save", 0), ("asynchronous save", 0))),
    *(Cell("SIGSTOP without end", phase, stop(phase), 6, sample) for phase, sample in
      (("start", 0), ("load", 0), ("step", 1), ("save", 0), ("asynchronous save", 0))),
    Cell("SIGSTOP of the launcher, then SIGCONT", "step", stray_children, 4, 0),
    *(Cell("SIGTERM", phase, terminate(phase), 8, sample) for phase, sample in
      (("start", 0), ("load", 0), ("step", 1), ("save", 0), ("asynchronous save", 0))),
]
