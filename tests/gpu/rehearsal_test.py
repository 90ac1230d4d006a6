"""scripts/gpu_check from end to end on this machine: the bundle is made, every stage runs as far as
it can without a GPU, and the layout stage runs completely, with the CPU instead of the GPU."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from gpu_checks import bundle, checkpoint_checks, layout_stage, layouts, speed_stage, stages
from gpu_checks.commands import CommandFailed
from gpu_checks.report import FAILED, LEFT_OUT, OK, VALUE, Report

SOME_LAYOUTS = ("one rank", "dp2, sharded, both overlaps", "pp4 x 2 chunks", "ep2")
STAGES = ["machine", "kernels", "layouts", "speed", "profile", "variants"]


def gpu_check(*words):
    return subprocess.run([sys.executable, ROOT / "scripts/gpu_check", *map(str, words)],
                          capture_output=True, text=True, timeout=600, check=False,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


class Rehearsal(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = pathlib.Path(cls.temporary.name, "build-gpu")
        cls.built = gpu_check("--build", "--as-built", "--rehearse", "--folder", cls.folder)

    def context(self, name):
        report = Report(lambda line: None)
        folder = pathlib.Path(self.temporary.name, name)
        folder.mkdir()
        context = stages.Context(bundle.Bundle(self.folder), report, folder, "cpu")
        context.begin(name, 500)
        return context

    def test_every_stage_goes_as_far_as_it_can(self):
        output = self.built.stdout + self.built.stderr
        self.assertEqual(self.built.returncode, 0, output)
        self.assertIn("5 programs", output)
        table = (self.folder / "out/table.txt").read_text()
        self.assertEqual(self.built.stdout.splitlines()[-1], "7 ok, 0 FAILED, 0 value, 6 left out")
        for stage in STAGES:
            self.assertRegex(table, rf"(?m)^{stage} +ok +what needs no GPU: \S")
            self.assertRegex(table, rf"(?m)^{stage} +left out the stage: no CUDA device$")

    def test_what_travels_is_small_and_has_the_losses_of_every_layout(self):
        travels = bundle.Bundle(self.folder)
        self.assertLess(travels.size(), 48 << 20)
        self.assertGreater(travels.size(), 4 << 20)
        self.assertEqual(set(travels.recorded()), {layout.name for layout in layouts.LAYOUTS})
        for library in travels.folder.glob("lib/*"):
            symbols = subprocess.run(["readelf", "-S", library], capture_output=True, text=True,
                                     check=True).stdout
            self.assertNotIn(".symtab", symbols, library)

    def test_without_a_device_a_run_fails_in_one_line_and_the_stages_go_on(self):
        result = gpu_check("--folder", self.folder, "--stages", "machine,kernels")
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertRegex(result.stdout, r"(?m)^device +FAILED +gpu_bench: no CUDA device$")
        self.assertIn("kernels   left out the stage: no CUDA device", result.stdout)
        self.assertEqual(result.stderr, "")

    def test_unusable_arguments(self):
        result = gpu_check("--stages", "machine,speeed")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--stages: found speeed, allowed: " + ", ".join(STAGES), result.stderr)
        result = gpu_check("--rehearse", "--seconds", "-5")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--seconds: found -5, allowed: more than 0", result.stderr)

    def test_what_was_not_built_is_named(self):
        result = gpu_check("--folder", pathlib.Path(self.temporary.name, "nothing"), "--rehearse",
                           "--stages", "machine")
        self.assertEqual(result.returncode, 1)
        self.assertIn("lacks lockstep, libexec/lockstep, benchmarks/gpu_bench, tests/cuda_test, "
                      "tests/straying_rank", result.stdout)
        result = gpu_check("--folder", pathlib.Path(self.temporary.name, "nothing"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("gpu_bench is not there: run scripts/gpu_check --build", result.stderr)

    def test_an_output_that_cannot_be_written_is_found_at_once(self):
        result = gpu_check("--folder", self.folder, "--rehearse", "--out", "/proc/none")
        self.assertEqual(result.returncode, 1)
        self.assertIn("/proc/none", result.stderr)
        self.assertEqual(result.stdout, "")

    def test_layouts_and_failures_on_the_cpu_in_the_gpus_place(self):
        context = self.context("layouts")
        self.addCleanup(setattr, layouts, "LAYOUTS", layouts.LAYOUTS)
        layouts.LAYOUTS = [layout for layout in layouts.LAYOUTS if layout.name in SOME_LAYOUTS]
        layout_stage.run(context)
        rows = context.report.rows
        self.assertEqual([row.line() for row in rows if row.state != OK], [])
        self.assertEqual(len(rows), len(SOME_LAYOUTS) + len(layout_stage.MISTAKES) + 4)

    def test_a_layout_that_trains_otherwise_is_seen(self):
        context = self.context("other")
        recorded, config = context.bundle.recorded(), layouts.write_config(context.folder)
        for name, settings in (("seed", ("train.seed=2",)), ("rate", ("optimizer.lr=0.0029",)),
                               ("clip", ("optimizer.clip_grad=0.1",)),
                               ("batch", ("train.global_batch_size=2",))):
            layout = layouts.Layout(name, 1, settings)
            context.attempt(name, lambda: layout_stage.train(context, layout, config,
                                                             recorded["one rank"]))
        for row in context.report.rows:
            self.assertEqual(row.state, FAILED, row)
            self.assertRegex(row.detail, "apart by .* at step")

    def test_a_run_that_begins_anew_has_not_resumed(self):
        context = self.context("anew")
        recorded, config = context.bundle.recorded(), layouts.write_config(context.folder)
        train = context.train

        def train_anew(command, *more):
            loads = str(command[-1]).startswith("checkpoint.load=")
            return train(command[:-2] if loads else command, *more)
        context.train = train_anew
        with self.assertRaisesRegex(CommandFailed, "rank 0 does not say 'loaded .*/step_5, iter"):
            checkpoint_checks.resume(context, layouts.Layout("one rank", 1, ()), config,
                                     recorded["one rank"])

    def test_a_rank_that_fails_is_named(self):
        context = self.context("failing")
        layout = layouts.Layout("refused", 2, ("parallel.tensor_model_parallel_size=3",))
        context.attempt("refused", lambda: layout_stage.train(
            context, layout, layouts.write_config(context.folder), []))
        row = context.report.rows[0]
        self.assertEqual(row.state, FAILED)
        self.assertRegex(row.detail, r"^rank \d: exit status 2: .*tensor_model_parallel_size")

    def test_the_rivals_are_timed_round_by_round_and_one_that_fails_is_left_out(self):
        context = self.context("speed")
        size = speed_stage.small()
        data = speed_stage.write_tokens(context.folder, 1 << 15, size.vocabulary)
        sources = speed_stage.rivals(context, size, data)
        sources["compile"] = (["/bin/false"], context.bundle.environment())
        self.addCleanup(setattr, speed_stage, "rivals", speed_stage.rivals)
        speed_stage.rivals = lambda *_: sources
        found = speed_stage.measure_rivals(context, size, data, steps=2, rounds=2)
        speed_stage.add_rows(context, size, found, None)
        rows = {row.check: (row.state, row.detail) for row in context.report.rows}
        self.assertEqual(rows["trial, compile"], (FAILED, "it said nothing"))
        for name in ("ours", "eager"):
            self.assertEqual(rows[f"trial, {name}"][0], VALUE)
            self.assertEqual(len(found[name].times), 2)
            self.assertLess(abs(found[name].loss - 6.24), 0.2)  # ln 512, for an untrained model
        self.assertRegex(rows["trial, eager"][1], r"; theirs / ours \d+\.\d\d$")
        self.assertEqual(found["ours"].parameters, found["eager"].parameters)

    def test_variants_of_one_size(self):
        context = self.context("one")
        size = speed_stage.small()
        data = speed_stage.write_tokens(context.folder, 1 << 15, size.vocabulary)
        one = speed_stage.measure_one(context, size, data, ["--set", "model.hidden_dropout=0.1"],
                                      options=("--attention", "math"))
        self.assertEqual(len(one.times), 2)
        self.assertNotIn(LEFT_OUT, [row.state for row in context.report.rows])


if __name__ == "__main__":
    unittest.main()
