"""Formats the results of the matrix as Markdown: a row for each fault, with its phases."""

import collections
import statistics

RUN = ("held", "broken")


def phase_of(cell, outcomes):
    """Returns "save 24 / 24": cases that held and that were run; None if there are none."""
    mine = [o for o in outcomes if o["cell"] == cell.name]
    if mine and all(o["result"] == "none" for o in mine):
        return None
    tried = [o for o in mine if o["result"] in RUN]
    if tried:
        return f"{cell.phase} {sum(o['result'] == 'held' for o in tried)} / {len(tried)}"
    skipped = sorted({o["why"] for o in mine if o["result"] == "skipped"})
    return f"{cell.phase} " + (f"skipped: {'; '.join(skipped)}" if skipped else "not run")


def row_of(fault, cells, outcomes):
    phases = filter(None, (phase_of(cell, outcomes) for cell in cells))
    tried = [o for o in outcomes if o["fault"] == fault and o["result"] in RUN]
    seconds = [second for o in tried for second in o["named"]]
    named = f"{statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s" if seconds else ""
    accepted = collections.Counter()
    for o in tried:
        accepted[o["phase"]] += o["accepted"]
    remarks = [f"{phase}: {count} read as other values" for phase, count in accepted.items()
               if count]
    broken = collections.Counter(o["promise"] for o in tried if o["result"] == "broken")
    remarks += [f"{count} broken: {promise}" for promise, count in broken.items()]
    return [fault, "; ".join(phases), str(sum(o["faults"] for o in tried)), named,
            "; ".join(remarks)]


def kills_of(outcome):
    """Returns how many faults were a SIGKILL. Results of earlier versions do not tell."""
    by_name = outcome["faults"] if outcome["fault"].startswith("SIGKILL") else 0
    return outcome.get("kills", by_name)


def write_table(path, cells, outcomes, day):
    of_fault = collections.defaultdict(list)
    for cell in cells:
        of_fault[cell.fault].append(cell)
    tried = [o for o in outcomes if o["result"] in RUN]
    seeds = ", ".join(map(str, sorted({o["seed"] for o in outcomes})))
    held = sum(o["result"] == "held" for o in tried)
    kills = sum(kills_of(o) for o in tried)
    errors = sum(o["faults"] for o in tried if o["fault"].startswith(("errno", "full disk")))
    lines = [f"{day}, seed {seeds}: {len(tried)} cases, {held} held. {kills} kills, {errors} errors "
             "of input and output.", "",
             "| fault | held / run, by phase | faults | rank named after (median) | remarks |",
             "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row_of(fault, its, outcomes)) + " |"
              for fault, its in of_fault.items()]
    path.write_text("\n".join(lines) + "\n")
