"""lockstep train --profile and lockstep trace merge: checks the traces of real ranks on several
layouts against the format that Perfetto reads, and for the names that they must contain."""

import json
import os
import re
import resource
import subprocess
import unittest

from support import LOCKSTEP, EndToEnd, clean_environment, launch, run

# Times are written with three decimals, in microseconds.
ROUNDING = 0.0021
TASK = re.compile(r"[FB]\d+\.\d+")

LAYOUTS = {
    "dp": [],
    "tp": ["parallel.tensor_model_parallel_size=2"],
    "pp": ["parallel.pipeline_model_parallel_size=2", "model.num_layers=2"],
    "cp": ["parallel.context_parallel_size=2"],
    "ep": ["parallel.expert_model_parallel_size=2", "model.num_experts=2",
           "model.moe_router_topk=1", "model.moe_router_pre_softmax=true"],
}
# A collective that each layout needs: how its name begins, and its group.
COLLECTIVES = {
    "dp": ("(all_reduce|reduce_scatter) .*of bucket 0 ", "dp-cp"),
    "tp": ("all_reduce ", "tp"),
    "pp": ("wait for receive ", "pp"),
    "cp": ("(wait for )?(exchange|all_gather|all_to_all|send|receive)", "cp"),
    "ep": ("all_to_all", "tp-ep"),
}


def settings(layout):
    return [argument for value in LAYOUTS[layout] for argument in ("--set", value)]


def slices(trace, category=None):
    return [event for event in trace["traceEvents"]
            if event["ph"] == "X" and category in (None, event.get("cat"))]


class Profile(EndToEnd):
    def profile(self, layout, window="3:4"):
        output = self.folder / layout
        result = launch(2, LOCKSTEP, "train", self.config, "--output", output, "--profile", window,
                        "--set", "train.train_iters=6", *settings(layout))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertNotIn("ERROR", result.stderr.decode())
        self.assertIn(f"profile: wrote {output}/traces/rank_0.json", result.stderr.decode())
        traces = sorted((output / "traces").iterdir())
        self.assertEqual([path.name for path in traces], ["rank_0.json", "rank_1.json"])
        return output, [json.loads(path.read_text()) for path in traces]

    def check_format(self, trace):
        """Checks the Chrome format as Perfetto reads it: the fields of each kind of event; slices
        of a thread are nested or disjoint."""
        rows = {}
        for event in trace["traceEvents"]:
            self.assertIn(event["ph"], {"X", "M", "i", "s", "f", "t"})
            self.assertIn("pid", event)
            self.assertIsInstance(event["name"], str)
            if event["ph"] == "M":
                self.assertIsInstance(event["args"], dict)
                continue
            self.assertIsInstance(event["ts"], (int, float))
            self.assertIn("tid", event)
            if event["ph"] in "sft":
                self.assertIn("id", event)
            if event["ph"] == "X":
                self.assertGreaterEqual(event["dur"], 0)
                rows.setdefault((event["pid"], event["tid"]), []).append(event)
        for events in rows.values():
            open_ends = []
            for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
                begin, finish = event["ts"], event["ts"] + event["dur"]
                while open_ends and open_ends[-1] <= begin + ROUNDING:
                    open_ends.pop()
                if open_ends:
                    self.assertLessEqual(finish, open_ends[-1] + ROUNDING, event["name"])
                open_ends.append(finish)

    def check_names(self, layout, trace):
        names = [event["name"] for event in slices(trace, "user_annotation")]
        for expected in ("iteration 3", "iteration 4"):
            self.assertEqual(names.count(expected), 1, names)
        self.assertEqual(names.count("optimizer step"), 2)
        self.assertNotIn("unknown", names)
        self.assertNotIn("iteration 2", names)
        self.assertNotIn("iteration 5", names)
        tasks = [name for name in names if TASK.fullmatch(name)]
        microbatches = {"dp": 2, "ep": 2}.get(layout, 4)
        self.assertEqual(sorted(tasks), sorted(2 * [f"{kind}{m}.0" for kind in "FB"
                                                    for m in range(microbatches)]))
        begin, group = COLLECTIVES[layout]
        found = [name for name in names if re.match(begin, name)
                 and re.search(rf" over group {group} \[0, 1\], \d+ bytes$", name)]
        self.assertTrue(found, (layout, names))
        self.assertTrue([event for event in slices(trace, "cpu_op")
                         if event["name"].startswith("aten::")])

    def test_every_layout(self):
        for layout in LAYOUTS:
            with self.subTest(layout=layout):
                output, traces = self.profile(layout)
                for rank, trace in enumerate(traces):
                    self.assertEqual(trace["lockstep"]["rank"], rank)
                    self.assertEqual(trace["lockstep"]["world_size"], 2)
                    self.check_format(trace)
                    self.check_names(layout, trace)
                result = run(LOCKSTEP, "trace", "merge", output / "traces")
                self.assertEqual((result.returncode, result.stderr), (0, b""))
                merged = json.loads((output / "traces/merged.json").read_text())
                self.check_format(merged)
                self.check_merge(traces, merged)

    def check_merge(self, traces, merged):
        named = {event["pid"]: event["args"]["name"] for event in merged["traceEvents"]
                 if event["name"] == "process_name"}
        self.assertEqual(named, {0: "rank 0", 1: "rank 1"})
        for rank, trace in enumerate(traces):
            process = trace["lockstep"]["process"]
            before = [e for e in slices(trace) if e["pid"] == process]
            after = [e for e in slices(merged) if e["pid"] == rank]
            self.assertEqual([e["name"] for e in before], [e["name"] for e in after])
            shift = after[0]["ts"] - before[0]["ts"]
            for old, new in zip(before, after):
                self.assertAlmostEqual(new["ts"] - old["ts"], shift, delta=ROUNDING)
        self.assertAlmostEqual(min(e["ts"] for e in slices(merged)), 0, delta=1)
        ends = [[e["ts"] + e["dur"] for e in slices(merged, "user_annotation") if e["pid"] == rank
                 and e["name"].startswith("all_reduce (sum) of loss over group world")]
                for rank in (0, 1)]
        self.assertEqual([len(e) for e in ends], [2, 2])
        for one, other in zip(*ends):  # no rank has the sum before both have begun
            self.assertLess(abs(one - other), 500_000)

    def test_hosts_with_clocks_that_differ(self):
        output, traces = self.profile("dp")
        ahead = 3_600e6 + 123_456  # microseconds
        trace = traces[1]
        trace["lockstep"]["host"] = "another host"
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] += ahead
        (output / "traces/rank_1.json").write_text(json.dumps(trace))
        merged_file = self.folder / "merged of both.json"
        link = self.folder / "link"
        link.symlink_to(merged_file)
        result = run(LOCKSTEP, "trace", "merge", output / "traces", "--output", link)
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        self.assertTrue(link.is_symlink())
        merged = json.loads(merged_file.read_text())

        def ends(rank):
            return {e["name"]: e["ts"] + e["dur"] for e in slices(merged, "user_annotation")
                    if e["pid"] == rank and re.match("all_reduce.* over group world", e["name"])}
        one, other = ends(0), ends(1)
        self.assertTrue(one)
        self.assertEqual(one.keys(), other.keys())
        self.assertLess(min(abs(one[name] - other[name]) for name in one), 100_000)

    def test_a_run_that_is_shorter_than_its_window(self):
        output = self.folder / "out"
        base = [LOCKSTEP, "train", self.config, "--output", output, "--set", "train.train_iters=5"]
        result = run(*base, "--profile", "4:5")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertTrue((output / "traces/rank_0.json").exists())
        (output / "traces/rank_0.json").unlink()
        again = run(*base, "--profile", "2:3", "--set", f"checkpoint.load={output}/checkpoint",
                    "--set", "train.train_iters=7")
        self.assertEqual(again.returncode, 0, again.stderr.decode())
        self.assertIn("profile: wrote nothing; this start ran none of these iterations", again.stderr.decode())
        self.assertFalse((output / "traces/rank_0.json").exists())

    def test_refusals(self):
        base = [LOCKSTEP, "train", self.config]
        for window in ("", "3", "3:", ":3", "a:b", "0:3", "4:3", "3:13", "3:4:5", "-1:2", "1 :2",
                       "99999999999999999999:1"):
            result = run(*base, "--output", self.folder / "out", "--profile", window)
            self.assert_failed(result, 2, "--profile", f"'{window}'")
        self.assert_failed(run(*base, "--profile", "1:2"), 2, "--profile", "--output")
        self.assertFalse((self.folder / "out").exists())
        self.assert_failed(run(LOCKSTEP, "trace", "merge", self.folder), 1, "rank_0.json")
        self.assertEqual(run(LOCKSTEP, "trace").returncode, 2)

    def test_a_trace_that_cannot_be_written_does_not_fail_the_run(self):
        output = self.folder / "out"
        (output / "traces/rank_0.json/in the way").mkdir(parents=True)
        result = run(LOCKSTEP, "train", self.config, "--output", output, "--profile", "2:3")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertRegex(result.stderr.decode(), "\nlockstep: rank 0: --profile: '.*' could not be "
                         "written: Is a directory\n")
        self.assertEqual(os.listdir(output / "traces"), ["rank_0.json"])

    def test_a_trace_without_room_is_removed_and_the_reason_told(self):
        output = self.folder / "out"
        limit = 1_500_000  # bytes of a file: more than those of the checkpoint
        result = subprocess.run(
            [LOCKSTEP, "train", self.config, "--output", output, "--profile", "1:12"],
            capture_output=True, env=clean_environment(), check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn(f"\nlockstep: rank 0: --profile: '{output}/traces/rank_0.json' could not be "
                      "written: File too large\n", result.stderr.decode())
        self.assertEqual(os.listdir(output / "traces"), [])


if __name__ == "__main__":
    unittest.main()
