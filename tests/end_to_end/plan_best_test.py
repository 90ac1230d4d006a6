"""lockstep plan best: its candidates are simulated and verified; they fit, and they train."""

import json
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, run

TINY = SOURCE / "configs/tiny.textproto"
A100 = SOURCE / "configs/machines/dgx_a100.textproto"
COMMON = ("--set", "train.global_batch_size=16", "--set", "train.precision=bf16", "--set",
          "data.mock=true", "--set", "data.path=[]")


def set_options(overrides):
    return [part for one in overrides for part in ("--set", one)]


class PlanBest(EndToEnd):
    def best(self, *arguments, world=4, memory=1):
        result = run(LOCKSTEP, "plan", "best", TINY, *COMMON, "--world-size", world, "--machine",
                     A100, "--memory", memory, "--json", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return json.loads(result.stdout)

    def ask(self, command, overrides, *more):
        result = run(LOCKSTEP, "plan", command, TINY, *COMMON, *set_options(overrides),
                     "--world-size", 4, *more, "--json")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return json.loads(result.stdout)

    def test_what_is_listed_is_what_the_other_commands_say(self):
        answer = self.best("--simulate", 6)
        self.assertEqual(list(answer), ["candidates", "legal", "too_large", "simulated",
                                        "search_seconds", "best", "refused"])
        layouts = answer["best"]
        self.assertGreater(len(layouts), 3)
        self.assertEqual(answer["refused"], [])
        times = [layout["step_ms"] for layout in layouts]
        self.assertEqual(times, sorted(times))
        for layout in layouts[:4]:
            with self.subTest(layout=layout["set"]):
                time = self.ask("time", layout["set"], "--machine", A100)
                self.assertAlmostEqual(time["step_ms"], layout["step_ms"], delta=1e-6)
                self.assertAlmostEqual(sum(layout["parts_ms"].values()), layout["step_ms"], delta=1e-6)
                self.assertEqual(max(time["peak_bytes"]), layout["peak_bytes"])
                self.assertTrue(self.ask("verify", layout["set"])["ok"])

    def test_the_best_trains(self):
        best = self.best("--simulate", 2)["best"][0]
        result = run(LOCKSTEP, "launch", "-n", 4, "--starter", "own", "--", "train", TINY, *COMMON,
                     *set_options(best["set"]), "--set", "train.train_iters=2", "--set",
                     "train.eval_iters=0", "--set", "optimizer.lr_warmup_iters=0", "--set",
                     "train.sample_tokens=0")
        self.assertEqual(result.returncode, 0, result.stderr.decode())

    def test_memory_prunes(self):
        all_of_it = self.best("--simulate", 3)
        most = max(layout["peak_bytes"] for layout in all_of_it["best"])
        little = 0.5 * most / 2**30
        for layout in self.best("--simulate", 3, memory=little)["best"]:
            self.assertLessEqual(layout["peak_bytes"], 0.5 * most)

    def test_fields_stay(self):
        field = "parallel.pipeline_model_parallel_size"
        for layout in self.best("--simulate", 3, "--set", f"{field}=2", "--keep", field)["best"]:
            self.assertFalse([one for one in layout["set"] if one.startswith(field)], layout["set"])

    def test_text(self):
        result = run(LOCKSTEP, "plan", "best", TINY, *COMMON, "--world-size", 2, "--machine", A100,
                     "--memory", 1, "--simulate", 2)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        text = result.stdout.decode()
        self.assertIn(" legal, ", text)
        self.assertRegex(text, r" 1\. [0-9.]+ ms a step, [0-9.]+ GiB; largest cost besides "
                               r"compute: ")
        self.assertIn("simulating", result.stderr.decode())

    def test_a_number_of_ranks_for_which_nothing_is_legal(self):
        result = run(LOCKSTEP, "plan", "best", TINY, *COMMON, "--world-size", 7, "--machine", A100,
                     "--memory", 1)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr.decode(), "found no legal layout of 7 ranks; as configured: "
                                                 "train.global_batch_size: found")

    def test_what_is_refused(self):
        for arguments, status, told in (
                (("--memory", "0.001"), 1, "no layout of 2 ranks fits 0.001 GiB"),
                (("--memory", "0"), 2, "--memory"),
                (("--memory", "1", "--keep", "model.num_layers"), 2,
                 "lockstep: --keep: found 'model.num_layers', allowed: parallel."),
                (("--memory", "1", "--set", "model.hidden_size=0"), 2, "model.hidden_size")):
            with self.subTest(arguments=arguments):
                result = run(LOCKSTEP, "plan", "best", TINY, *COMMON, "--world-size", 2,
                             "--machine", A100, *arguments)
                self.assertEqual(result.returncode, status, result.stderr.decode())
                self.assertIn(told, result.stderr.decode())


if __name__ == "__main__":
    unittest.main()
