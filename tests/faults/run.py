#!/usr/bin/env python3
"""The matrix of faults: what happens to trainings and commands when something breaks, cell by cell.

    run.py [--seed N] [--only CELL...] [--case N] [--scale F] [--sample] [--jobs N] [--minutes M]
           [--results FILE] [--resume] [--table FILE] [--list]

Prints a line for each case, and for each failed one the command that repeats it. The README.md in
this folder says what a case checks. Status 1: a promise did not hold."""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import time
import traceback

sys.dont_write_bytecode = True
from case import Broken, Case, Skipped, World  # noqa: E402
import call_cells  # noqa: E402
import command_cells  # noqa: E402
import damage_cells  # noqa: E402
import disk_cells  # noqa: E402
import network_cells  # noqa: E402
import parser_cells  # noqa: E402
import process_cells  # noqa: E402
import resize_cells  # noqa: E402
import stay_cells  # noqa: E402
import stranger_cells  # noqa: E402
from table import kills_of, write_table  # noqa: E402

MODULES = (process_cells, resize_cells, stay_cells, command_cells, call_cells, damage_cells,
           disk_cells, network_cells, stranger_cells, parser_cells)
CELLS = [cell for module in MODULES for cell in module.CELLS]
HERE = pathlib.Path(__file__).resolve()


def read_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--only", nargs="+", default=[], metavar="CELL",
                        help="cells, or parts of their names: 'SIGKILL', '/save'")
    parser.add_argument("--case", type=int, help="this case of the cell alone")
    parser.add_argument("--scale", type=float, default=1, help="multiplies the number of cases")
    parser.add_argument("--sample", action="store_true", help="the few cases of `make test`")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="cases at a time")
    parser.add_argument("--minutes", type=float, help="starts no case after so many")
    parser.add_argument("--patience", type=float, default=1,
                        help="multiplies every limit of time, for a machine with other work")
    parser.add_argument("--results", type=pathlib.Path, help="a line of JSON for each case")
    parser.add_argument("--resume", action="store_true",
                        help="leave out the cases that --results has already")
    parser.add_argument("--table", type=pathlib.Path, help="writes --results as Markdown")
    parser.add_argument("--list", action="store_true", help="print the cells and their counts")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.only if not any(name in cell.name for cell in CELLS)]
    if unknown:
        parser.error(f"--only: no cell has '{unknown[0]}' in its name; --list prints them")
    if arguments.case is not None and (arguments.case < 0 or not arguments.only):
        parser.error("--case: allowed: a number from 0 with --only, which says of which cell")
    return arguments


def number_of_cases(cell, arguments):
    if arguments.sample:
        return cell.sample
    return max(1, round(cell.count * arguments.scale)) if cell.count else 0


def means(name, cell):
    """Returns whether `name` is the cell's name or, if no cell has that name, a part of it."""
    exact = any(each.name == name for each in CELLS)
    return name == cell.name if exact else name in cell.name


def cases_of(world, arguments):
    """Returns the cells to run and the numbers of their cases."""
    found = []
    for cell in CELLS:
        if arguments.only and not any(means(name, cell) for name in arguments.only):
            continue
        if arguments.case is not None:
            numbers = [arguments.case]
        else:
            numbers = range(number_of_cases(cell, arguments))
        if numbers:
            found += [(cell, number) for number in numbers]
    # In mixed order, so that a run that ends early has cases of each cell.
    return sorted(found, key=lambda each: each[1] / max(1, each[0].count))


def plan_of(world, cell):
    """Returns what a cell has to try, in an order that depends on the seed."""
    def make(_):
        import random
        plan = list(cell.plan(world))
        random.Random(f"{world.seed} {cell.name}").shuffle(plan)
        return plan
    return world.once(f"plan {cell.name}", make)


def carry_out(world, cell, number):
    """Runs one case; returns its outcome."""
    begin = time.monotonic()
    case = Case(world, cell, number, world.folder / re.sub(r"\W+", "-", f"{cell.name} {number}"))
    outcome = {"cell": cell.name, "fault": cell.fault, "phase": cell.phase, "case": number,
               "seed": world.seed, "result": "held"}
    try:
        if cell.plan:
            plan = plan_of(world, cell)
            if number < len(plan):
                cell.body(case, case.draw(plan[number]))
            else:
                outcome["result"] = "none"  # the plan has fewer cases
        else:
            cell.body(case)
    except Skipped as skipped:
        outcome |= {"result": "skipped", "why": str(skipped)}
    except Broken as broken:
        outcome |= {"result": "broken", "promise": broken.promise, "why": str(broken)}
    except Exception:  # a bug of the harness, or unreadable output of the program
        outcome |= {"result": "broken", "promise": "harness", "why": traceback.format_exc()}
    finally:
        case.end()
    keep = outcome["result"] == "broken" and os.environ.get("LOCKSTEP_KEEP_FAULTS")
    if not keep:
        shutil.rmtree(case.folder, ignore_errors=True)
    return outcome | {"faults": case.faults, "kills": case.kills, "accepted": case.accepted,
                      "named": case.seconds, "drawn": case.drawn,
                      "seconds": round(time.monotonic() - begin, 2)}


def repeat_command(outcome, arguments):
    """Returns the command, for the root of the tree, that runs the case again."""
    words = [str(HERE.relative_to(HERE.parents[2])), "--seed", str(outcome["seed"]),
             "--only", outcome["cell"], "--case", str(outcome["case"])]
    if arguments.sample:
        words.append("--sample")
    if arguments.patience != 1:
        words += ["--patience", str(arguments.patience)]
    build = os.environ.get("LOCKSTEP_BUILD")
    return (f"LOCKSTEP_BUILD={shlex.quote(os.path.abspath(build))} " if build else "") \
        + shlex.join(words)


def tell(outcome, arguments):
    line = f"{outcome['result']:8}{outcome['cell']} {outcome['case']} ({outcome['seconds']} s)"
    if outcome["result"] == "broken":
        line += f"\n  {outcome['why']}\n  drawn: {', '.join(outcome['drawn'])}\n" \
                f"  again: {repeat_command(outcome, arguments)}"
    elif outcome["result"] == "skipped":
        line += f": {outcome['why']}"
    print(line, flush=True)


def read_results(path):
    if not path or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(outcomes):
    def count(*results):
        return sum(outcome["result"] in results for outcome in outcomes)
    kills = sum(kills_of(o) for o in outcomes)
    errors = sum(o["faults"] for o in outcomes if o["fault"].startswith(("errno", "full disk")))
    skipped = sorted({o["cell"] for o in outcomes if o["result"] == "skipped"})
    return (f"{count('held', 'broken')} cases, {sum(o['faults'] for o in outcomes)} faults "
            f"({kills} kills, {errors} of input and output): {count('held')} held, "
            f"{count('broken')} broken, {count('skipped')} skipped"
            + (f" ({'; '.join(skipped)})" if skipped else ""))


def main(words):
    arguments = read_arguments(words)
    if arguments.list:
        for cell in CELLS:
            print(f"{cell.count:5} {cell.sample:3}  {cell.name}")
        return 0
    print(f"seed {arguments.seed}", flush=True)
    earlier = read_results(arguments.results) if arguments.resume else []
    done = {(o["cell"], o["case"], o["seed"]) for o in earlier}
    if arguments.results and not arguments.resume:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text("")
    begin = time.monotonic()
    outcomes = list(earlier)
    # In memory, where syncing is free, unless TMPDIR names another place.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") and "TMPDIR" not in os.environ else None
    with tempfile.TemporaryDirectory(prefix="lockstep-faults-", dir=memory) as folder:
        world = World(arguments.seed, folder, arguments.patience, arguments.sample)
        todo = [(cell, number) for cell, number in cases_of(world, arguments)
                if (cell.name, number, arguments.seed) not in done]

        def one(cell, number):
            if arguments.minutes and time.monotonic() > begin + 60 * arguments.minutes:
                return None
            outcome = carry_out(world, cell, number)
            if outcome["result"] == "none" and number > 0:
                return None
            with world.lock:
                tell(outcome, arguments)
                if arguments.results:
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(outcome) + "\n")
            return outcome
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            try:
                for future in [pool.submit(one, *each) for each in todo]:
                    outcome = future.result()
                    if outcome:
                        outcomes.append(outcome)
            except KeyboardInterrupt:  # running cases end, and no other starts
                pool.shutdown(cancel_futures=True)
                raise
    print(summary(outcomes), flush=True)
    if arguments.table:
        write_table(arguments.table, CELLS, outcomes, datetime.date.today())
    return 1 if any(outcome["result"] == "broken" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
