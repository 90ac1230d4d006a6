"""lockstep plan schedule: every option, both output formats, the drawing, what is refused."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree

from faults import faults
from support import LOCKSTEP, SOURCE, EndToEnd, clean_environment, run


def plan(*arguments):
    return run(LOCKSTEP, "plan", "schedule", *arguments)


def bubble_by_hand(ranks, chunks, costs):
    """Computes the share of idle time from the lists alone: rounds over all ranks until no task is
    left. A task follows the one before it on its rank and the one whose output it reads."""
    last, ended, clock, place = len(ranks) - 1, {}, [0] * len(ranks), [0] * len(ranks)

    def reads(rank, kind, m, c):
        if kind == "F":
            return ("F", m, c, rank - 1) if rank else ("F", m, c - 1, last) if c else None
        if kind == "W":
            return ("B", m, c, rank)
        if rank < last:
            return ("B", m, c, rank + 1)
        return ("B", m, c + 1, 0) if c + 1 < chunks else ("F", m, c, last)

    total = sum(map(len, ranks))
    while sum(place) < total:
        before = sum(place)
        for rank, tasks in enumerate(ranks):
            while place[rank] < len(tasks):
                name = tasks[place[rank]]
                kind, (m, c) = name[0], map(int, name[1:].split("."))
                source = reads(rank, kind, m, c)
                if source is not None and source not in ended:
                    break
                clock[rank] = max(clock[rank], ended.get(source, 0)) + costs[kind]
                ended[kind, m, c, rank] = clock[rank]
                place[rank] += 1
        assert sum(place) > before, "deadlock"
    busy = sum(costs[name[0]] for tasks in ranks for name in tasks)
    return 1 - busy / (len(ranks) * max(clock))


class PlanSchedule(EndToEnd):
    def schedule(self, *arguments):
        result = plan("--json", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        return json.loads(result.stdout)

    def test_the_contract(self):
        result = plan("--pipeline", 2, "--microbatches", 4, "--json")
        answer = json.loads(result.stdout)
        self.assertEqual(list(answer), ["warmup", "bubble_fraction", "ranks"])
        self.assertEqual(answer, {
            "warmup": [1, 0], "bubble_fraction": 0.2,
            "ranks": ["F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0".split(),
                      "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0".split()]})
        self.assertIn(b'"bubble_fraction":0.2,', result.stdout)
        interleaved = self.schedule("--pipeline", 2, "--virtual", 2, "--microbatches", 4)
        self.assertEqual(interleaved["warmup"], [4, 2])
        self.assertEqual(interleaved["ranks"][0],
                         "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 "
                         "B2.0 B3.0".split())
        self.assertAlmostEqual(interleaved["bubble_fraction"], 1 / 9, delta=1e-15)
        alone = self.schedule("--pipeline", 1, "--microbatches", 2)
        self.assertEqual(alone, {"warmup": [0], "bubble_fraction": 0,
                                 "ranks": [["F0.0", "B0.0", "F1.0", "B1.0"]]})

    def test_equals_megatron_core(self):
        golden = json.loads((SOURCE / "tests/pipeline/pipeline_golden.json").read_text())
        compared = 0
        for case in golden["schedules"]:
            if case["forward_only"] or case["order"][0][0] != "F":
                continue
            answer = self.schedule("--pipeline", case["pipeline"], "--virtual", case["virtual"],
                                   "--microbatches", case["microbatches"],
                                   "--microbatch-group-size", case["group"])
            self.assertEqual(answer["warmup"], case["warmup"])
            self.assertEqual([" ".join(rank) for rank in answer["ranks"]], case["order"])
            compared += 1
        self.assertGreater(compared, 25)

    def test_the_bubble_is_that_of_the_lists(self):
        one_f_one_b, zero_bubble = {"F": 1, "B": 2}, {"F": 1, "B": 1, "W": 1}
        cases = [
            ((4, 1, 8), one_f_one_b, (), 3 / 11),
            ((4, 1, 2), one_f_one_b, (), 3 / 5),
            ((4, 3, 8), one_f_one_b, (), 3 / 27),
            ((3, 2, 10), one_f_one_b, ("--microbatch-group-size", 5), None),
            ((5, 4, 23), one_f_one_b, ("--microbatch-group-size", 9), None),
            ((16, 4, 64), one_f_one_b, ("--microbatch-group-size", 24), None),
            ((4, 1, 8), one_f_one_b, ("--schedule", "1f1b"), 3 / 11),
            ((4, 1, 8), one_f_one_b, ("--schedule", "gpipe"), 3 / 11),
            ((4, 1, 8), zero_bubble, ("--schedule", "zb-h1"), 3 / 27),
            ((7, 1, 3), zero_bubble, ("--schedule", "zb-h1"), None),
        ]
        for (pipeline, chunks, microbatches), costs, more, expected in cases:
            with self.subTest((pipeline, chunks, microbatches, more)):
                answer = self.schedule("--pipeline", pipeline, "--virtual", chunks,
                                       "--microbatches", microbatches, *more)
                by_hand = bubble_by_hand(answer["ranks"], chunks, costs)
                self.assertAlmostEqual(answer["bubble_fraction"], by_hand, delta=1e-14)
                if expected is not None:
                    self.assertAlmostEqual(by_hand, expected, delta=1e-14)
                for tasks in answer["ranks"]:
                    self.assertEqual(sorted(tasks), sorted(
                        f"{kind}{m}.{c}" for kind in costs for m in range(microbatches)
                        for c in range(chunks)))

    def test_families(self):
        gpipe = self.schedule("--pipeline", 2, "--microbatches", 2, "--schedule", "gpipe")
        self.assertEqual(gpipe["ranks"], [["F0.0", "F1.0", "B0.0", "B1.0"]] * 2)
        self.assertEqual(gpipe["warmup"], [2, 2])
        zero_bubble = self.schedule("--pipeline", 2, "--microbatches", 2, "--schedule", "zb-h1")
        self.assertEqual(zero_bubble["ranks"], [["F0.0", "F1.0", "B0.0", "W0.0", "B1.0", "W1.0"],
                                                ["F0.0", "B0.0", "F1.0", "B1.0", "W0.0", "W1.0"]])
        self.assertEqual(zero_bubble["warmup"], [1, 0])

    def test_text_form(self):
        lines = plan("--pipeline", 2, "--microbatches", 4).stdout.decode().splitlines()
        self.assertEqual(lines, [
            "1f1b: pipeline 2, 4 micro-batches; the step takes 15 forwards, bubble 20.00 %",
            "rank  warm-up  alive  tasks",
            "   0        1      2  F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0",
            "   1        0      1  F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0"])
        first = plan("--pipeline", 2, "--virtual", 2, "--microbatches", 4).stdout.splitlines()[0]
        self.assertEqual(first, b"interleaved 1f1b: pipeline 2 x 2 chunks, 4 micro-batches in "
                                b"groups of 2; the step takes 13.5 forwards, bubble 11.11 %")

    def test_the_drawing(self):
        path = self.folder / "timeline.svg"
        shown = self.schedule("--pipeline", 3, "--virtual", 2, "--microbatches", 6, "--svg", path)
        root = xml.etree.ElementTree.parse(path).getroot()
        names = "{http://www.w3.org/2000/svg}"
        self.assertEqual(root.tag, names + "svg")
        boxes = [box for box in root.iter(names + "rect") if box.find(names + "title") is not None]
        titles = [box.find(names + "title").text.split(":")[0] for box in boxes]
        self.assertEqual(titles, [task for tasks in shown["ranks"] for task in tasks])
        width = float(root.get("width"))
        for box in boxes:
            self.assertLess(float(box.get("x")) + float(box.get("width")), width)
        idle = 1 - sum(float(box.get("width")) for box in boxes) / (
            3 * max(float(b.get("x")) + float(b.get("width")) for b in boxes)
            - 3 * min(float(b.get("x")) for b in boxes))
        self.assertAlmostEqual(idle, shown["bubble_fraction"], delta=0.002)
        self.assert_failed(plan("--pipeline", 2, "--microbatches", 2, "--svg", "/nowhere/a.svg"), 1,
                           "'/nowhere/a.svg' cannot be written")

    def test_unusable_arguments_exit_2_and_are_named(self):
        of_4 = ("--pipeline", 4, "--microbatches", 8)
        interleaved = (*of_4, "--virtual", 2)
        cases = [
            ((), "--pipeline is required"),
            (("--pipeline", 4), "--microbatches is required"),
            (("--pipeline", "four", "--microbatches", 8), "--pipeline: found 'four'"),
            (("--pipeline", 0, "--microbatches", 8), "pipeline: found 0, allowed: >= 1"),
            (("--pipeline", 4, "--microbatches", 0), "microbatches: found 0, allowed: >= 1"),
            ((*of_4, "--virtual", 0), "virtual: found 0, allowed: >= 1"),
            ((*of_4, "--microbatch-group-size", 0), "microbatch-group-size: found 0"),
            (("--pipeline", 1, "--microbatches", 8, "--virtual", 2),
             "lockstep: --virtual: found 2, allowed with --pipeline (1): 1"),
            ((*interleaved, "--microbatch-group-size", 3),
             "lockstep: --microbatch-group-size: found 3, allowed with --virtual (2)"),
            ((*interleaved, "--microbatch-group-size", 9), "microbatch-group-size: found 9"),
            ((*interleaved, "--microbatch-group-size", 5),
             "microbatch-group-size: found 5, which leaves 3 of --microbatches (8)"),
            (("--pipeline", 4, "--virtual", 2, "--microbatches", 3), "microbatches: found 3"),
            (("--pipeline", 4, "--virtual", 2, "--microbatches", 6),
             "leaves 2 of --microbatches (6)"),
            ((*interleaved, "--schedule", "gpipe"),
             "lockstep: --virtual: found 2, allowed with schedule gpipe: 1"),
            ((*interleaved, "--schedule", "zb-h1"), "allowed with schedule zb-h1: 1"),
            ((*of_4, "--schedule", "zb"), "--schedule: found 'zb', allowed: 1f1b, gpipe, zb-h1"),
            (("--pipeline", 4, "--microbatches", 10**9), "more than 4194304 tasks"),
            (("--pipeline", 4, "--microbatches", 10**20), "--microbatches: found '1000"),
            ((*of_4, "--stages", 4), "--stages"),
            ((*of_4, "--svg", ""), "--svg: found '', allowed: a path"),
        ]
        for arguments, part in cases:
            with self.subTest(part):
                result = plan(*arguments)
                self.assert_failed(result, 2, part)
                self.assertEqual(result.stdout, b"")

    def test_help(self):
        text = plan("--help").stdout.decode()
        for option in ("--pipeline", "--virtual", "--microbatches", "--microbatch-group-size",
                       "--schedule", "--svg", "--json"):
            self.assertIn(f"  {option} ", text)

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                [LOCKSTEP, "plan", "schedule", "--pipeline", "2", "--microbatches", "2"],
                stdout=full, stderr=subprocess.PIPE, env=clean_environment(), check=False)
        self.assert_failed(result, 1, "standard output cannot be written: No space left on device")
        result = plan("--pipeline", 2, "--microbatches", 2, "--svg", "/dev/full")
        self.assert_failed(result, 1, "'/dev/full' cannot be written")

    def test_a_drawing_appears_whole_or_not_at_all(self):
        drawing = ("--pipeline", 2, "--microbatches", 2, "--svg")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "timeline.svg"
            for before in (None, "an earlier one"):
                if before:
                    path.write_text(before)
                for rules in (("write:short:1:timeline", "write:ENOSPC:1:timeline"),
                              ("fsync:ENOSPC:1:timeline",), ("close:ENOSPC:1:timeline",),
                              ("rename:ENOSPC:1:timeline",)):
                    result = run(LOCKSTEP, "plan", "schedule", *drawing, path, **faults(*rules))
                    self.assert_failed(result, 1, f"'{path}' cannot be ",
                                       ": No space left on device")
                    self.assertEqual(result.stdout, b"")
                    self.assertEqual([p.name for p in path.parent.iterdir()],
                                     ["timeline.svg"] if before else [])
                    self.assertEqual(path.read_text() if before else None, before)
            link = pathlib.Path(folder) / "link"
            link.symlink_to(path)
            self.assertEqual(plan(*drawing, link).returncode, 0)
            self.assertTrue(link.is_symlink())
            self.assertTrue(path.read_text().startswith("<svg"))
            away = pathlib.Path(folder) / "away"
            away.symlink_to("not there yet.svg")
            self.assertEqual(plan(*drawing, away).returncode, 0)
            self.assertTrue(away.is_symlink())
            self.assertTrue(away.read_text().startswith("<svg"))
            away.unlink()
            away.symlink_to("away")
            self.assert_failed(plan(*drawing, away), 1, f"'{away}' cannot be written: Too many")
            away.unlink()
            (pathlib.Path(folder) / "not there yet.svg").unlink()
            result = plan(*drawing, folder)
            self.assert_failed(result, 1, f"'{folder}' cannot be written: found no regular file")
            self.assertEqual(len(os.listdir(folder)), 2)

    def test_a_drawing_does_not_replace_what_is_printed(self):
        with tempfile.TemporaryDirectory() as folder:
            printed = pathlib.Path(folder) / "printed"
            for drawing in ("/dev/stdout", printed):
                with printed.open("wb") as output:
                    result = subprocess.run(
                        [LOCKSTEP, "plan", "schedule", "--pipeline", "2", "--microbatches", "2",
                         "--json", "--svg", drawing], stdout=output, stderr=subprocess.PIPE,
                        env=clean_environment(), check=False)
                self.assert_failed(result, 2, f"--svg: found '{drawing}', which is standard "
                                   "output, allowed: another file")
                self.assertEqual(printed.read_bytes(), b"")


if __name__ == "__main__":
    unittest.main()
