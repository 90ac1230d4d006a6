"""scripts/gpu_check without its programs: the table, time limits, failures, sizes, comparisons."""

import contextlib
import io
import json
import os
import pathlib
import runpy
import sys
import tempfile
import threading
import time
import types
import unittest
from unittest import mock

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from gpu_checks import (bundle, commands, kernel_stage, layouts, parsing, profile_stage, samples,
                        speed_stage, stages)
from gpu_checks.report import FAILED, LEFT_OUT, OK, VALUE, Report

SHELL = {"PATH": "/usr/bin:/bin"}
GPU_CHECK = runpy.run_path(str(SCRIPTS / "gpu_check"))["check"].__globals__


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.report = Report(lambda line: None)

    def program(self, name, *lines):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(0o755)
        return path

    def context(self, device="cpu"):
        plain = types.SimpleNamespace(environment=lambda more=None: SHELL | (more or {}))
        return stages.Context(plain, self.report, self.folder, device)

    def rows(self):
        return [(row.check, row.state, row.detail) for row in self.report.rows]


class Table(Folder):
    def test_it_holds_every_row_and_counts_them(self):
        self.report.add("speed", "125M", VALUE, "12 ms")
        self.report.add("layouts", "dp2", FAILED, "noise\n\n  rank 1:  gone  \n")
        self.assertEqual(self.report.table().splitlines(), [
            "speed     value    125M: 12 ms", "layouts   FAILED   dp2: rank 1: gone",
            "0 ok, 1 FAILED, 1 value, 0 left out"])

    def test_a_long_one_keeps_what_failed_and_says_what_it_leaves_out(self):
        for i in range(200):
            self.report.add("layouts", f"row {i}", FAILED if i == 190 else OK, "x" * 300)
        table = self.report.table()
        self.assertLessEqual(len(table), 12_000)
        lines = table.splitlines()
        self.assertIn("row 190", lines[0])
        self.assertEqual(lines[-2], f"({200 - len(lines) + 2} more rows are in table.txt)")
        self.assertTrue(all(len(line) <= 160 for line in lines))

    def test_what_is_written_fits_what_may_be_carried(self):
        for i in range(20):
            self.report.document(f"figures{i}", {"i": i})
        self.report.note("y" * (17 << 20))
        self.report.add("speed", "125M", VALUE, "12 ms")
        self.report.write(self.folder / "out")
        files = list((self.folder / "out").iterdir())
        self.assertEqual(len(files), 8)
        self.assertLessEqual(max(path.stat().st_size for path in files), 16 << 20)
        bundle.check_replaceable(self.folder)
        self.assertEqual(json.loads((self.folder / "out/figures0.json").read_text()), {"i": 0})
        self.assertEqual((self.folder / "out/table.txt").read_text(),
                         "speed     value    125M: 12 ms\n")


class Commands(Folder):
    def test_a_program_that_hangs_is_ended_with_its_children(self):
        program = self.program("hangs", "sleep 60 & echo $! > child", "echo waiting >&2", "wait")
        begun = time.monotonic()
        result = commands.run([program], SHELL, 4, cwd=self.folder)
        self.assertLess(time.monotonic() - begun, 50)
        self.assertIsNone(result.status)
        self.assertRegex(result.reason(), r"^not done within \d+ s; waiting$")
        child = (self.folder / "child").read_text().strip()
        deadline = time.monotonic() + 20
        while (status := pathlib.Path(f"/proc/{child}/status")).exists() and \
                "zombie" not in status.read_text():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_the_rank_that_failed_is_named_and_not_one_that_waited_for_it(self):
        program = self.program("rank", 'if [ "$RANK" = 1 ]; then echo "no such file" >&2; exit 3; fi',
                               "sleep 60")
        results = commands.run_ranks([program], 3, SHELL, 5)
        with self.assertRaisesRegex(commands.CommandFailed, "rank 1: exit status 3: no such file"):
            commands.all_ranks_need(results)

    def test_ranks_on_one_gpu_look_like_hosts_to_nccl(self):
        program = self.program("rank", "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE "
                               "$NCCL_HOSTID $NCCL_NET $NCCL_SOCKET_IFNAME")
        one = commands.run_ranks([program], 2, SHELL, 30, one_gpu=True)
        self.assertEqual([r.output for r in one], ["0 2 0 1 h0 Socket lo\n", "1 2 0 1 h1 Socket lo\n"])
        several = commands.run_ranks([program], 2, SHELL, 30)
        self.assertEqual([r.output for r in several], ["0 2 0 2\n", "1 2 1 2\n"])

    def test_a_server_answers_until_it_ends_and_says_why(self):
        program = self.program("server", "echo '{\"parameters\": 7}'", "read n",
                               'echo "{\\"ms\\": $n}"', "read n", 'echo "out of memory" >&2')
        server = commands.Server([program], SHELL)
        self.addCleanup(server.close)
        self.assertEqual(server.answer(30), {"parameters": 7})
        self.assertEqual(server.ask(3, 30), {"ms": 3})
        with self.assertRaisesRegex(commands.CommandFailed, "^out of memory$"):
            server.ask(3, 30)

    def test_a_server_that_hangs_is_late(self):
        server = commands.Server([self.program("server", "sleep 60")], SHELL)
        self.addCleanup(server.close)
        with self.assertRaisesRegex(commands.CommandFailed, "no answer within"):
            server.answer(0.3)


class Stages(Folder):
    def stage(self, name, seconds, run=lambda context: None, check=lambda context: "fine"):
        return types.SimpleNamespace(NAME=name, SECONDS=seconds, run=run, check=check)

    def test_one_that_fails_is_a_row_and_the_next_one_runs(self):
        def fails(context):
            raise ValueError("first line\nlast line")

        told = self.stage("second", 9, lambda context: context.add("figure", VALUE, "3"))
        stages.run_stages([self.stage("first", 9, fails, fails), told], self.context(), 60, True)
        self.assertEqual(self.rows(), [("the stage", FAILED, "last line"), ("figure", VALUE, "3")])

    def test_one_that_is_late_leaves_the_rest_of_itself_out_and_no_more(self):
        sleeper = self.program("sleeper", "sleep 60")

        def late(context):
            context.attempt("slow", lambda: context.run([sleeper], 50).needs() and "")
            context.attempt("never begun", lambda: context.run([sleeper], 50).needs() and "")

        told = self.stage("second", 9, lambda context: context.add("figure", VALUE, "3"))
        begun = time.monotonic()
        stages.run_stages([self.stage("first", 6, late), told], self.context(), 60, True)
        self.assertLess(time.monotonic() - begun, 50)
        checks = {check: (state, detail) for check, state, detail in self.rows()}
        self.assertEqual(checks["slow"][0], FAILED)
        self.assertRegex(checks["slow"][1], r"^not done within \d+ s; ")
        self.assertEqual(checks["never begun"], (LEFT_OUT, "the stage has no time left"))
        self.assertEqual(checks["figure"], (VALUE, "3"))

    def test_the_whole_has_a_limit(self):
        now = [0.0]
        context = self.context()
        context.clock = lambda: now[0]

        def takes_50(context):
            self.assertLessEqual(context.left(), 60 - now[0])
            now[0] += 50

        stages.run_stages([self.stage("first", 100, takes_50), self.stage("second", 100, takes_50),
                           self.stage("third", 100, takes_50)], context, 60, True)
        self.assertEqual(self.rows()[-1], ("the stage", LEFT_OUT, "no time is left"))
        self.assertEqual(now[0], 100)

    def test_neighbours_that_time_nothing_run_side_by_side_and_the_others_alone(self):
        running, seen = [], {}
        together = threading.Barrier(2)

        def run(context):
            running.append(context.stage)
            if context.stage.startswith("check"):
                together.wait(20)
            seen[context.stage] = set(running)
            if context.stage.startswith("check"):
                together.wait(20)
            running.remove(context.stage)

        made = [self.stage(name, 30, run) for name in ("time1", "check1", "check2", "time2")]
        for stage in made[1:3]:
            stage.TIMED = False
        stages.run_stages(made, self.context(), 60, True)
        self.assertEqual(self.rows(), [])
        self.assertEqual(seen, {"time1": {"time1"}, "check1": {"check1", "check2"},
                                "check2": {"check1", "check2"}, "time2": {"time2"}})

    def test_without_a_device_only_what_needs_none_runs(self):
        def must_not(context):
            self.fail("it ran")

        def fails(context):
            raise commands.CommandFailed("no program")

        stages.run_stages([self.stage("first", 9, must_not),
                           self.stage("second", 9, must_not, fails)], self.context(), 60, False)
        self.assertEqual(self.rows(), [
            ("what needs no GPU", OK, "fine"), ("the stage", LEFT_OUT, "no CUDA device"),
            ("what needs no GPU", FAILED, "no program"),
            ("the stage", LEFT_OUT, "no CUDA device")])


class Device(Folder):
    def test_a_driver_that_does_not_answer_is_a_row_and_takes_its_time_from_the_stages(self):
        self.program("benchmarks/gpu_bench", "sleep 60")
        options = types.SimpleNamespace(out=self.folder / "out", folder=self.folder, rehearse=False,
                                        stages="machine", seconds=stages.SHORTEST)
        with contextlib.redirect_stdout(io.StringIO()), \
                mock.patch.dict(GPU_CHECK, DEVICE_SECONDS=0.5):
            self.assertEqual(GPU_CHECK["check"](options), 1)
        self.assertEqual((self.folder / "out/table.txt").read_text().splitlines()[1:], [
            "device    FAILED   gpu_bench did not answer within 0.5 s",
            "machine   left out the stage: no time is left"])

    def test_a_program_that_dies_without_a_word_has_no_device(self):
        self.program("benchmarks/gpu_bench", "kill -9 $$")
        self.assertEqual(GPU_CHECK["sees_device"](bundle.Bundle(self.folder), 30),
                         (False, "signal 9: it said nothing"))

    def test_the_callers_libraries_are_found_after_ours(self):
        travels = bundle.Bundle(self.folder)
        context = self.context()
        context.bundle = travels

        def paths():
            rivals = speed_stage.rivals(context, speed_stage.small(), "data")
            self.assertEqual(rivals["ours"][1], travels.environment())
            return [rivals[name][1].get("LD_LIBRARY_PATH") for name in ("ours", "eager")]

        driver = "/usr/local/nvidia/lib64"
        with mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": driver}):
            ours, eager = paths()
        self.assertRegex(ours, f"^{self.folder}/lib:.*/torch/lib.*:{driver}$")
        self.assertEqual(eager, driver)
        with mock.patch.dict(os.environ):
            os.environ.pop("LD_LIBRARY_PATH", None)
            ours, eager = paths()
        self.assertRegex(ours, f"^{self.folder}/lib:.*[^:]$")
        self.assertIsNone(eager)

    def test_a_tool_that_the_machine_lacks_is_no_failure(self):
        context = self.context()
        context.bundle = bundle.Bundle(self.folder)
        with mock.patch.dict(os.environ, {"PATH": ""}), \
                mock.patch.object(kernel_stage, "FOLDERS", ()):
            context.attempt("memcheck", lambda: kernel_stage.sanitize(
                context, ["--tool", "memcheck"], "of layers"))
            context.attempt("ncu", lambda: profile_stage.counters(context))
        self.assertEqual(self.rows(), [
            ("memcheck", LEFT_OUT, "compute-sanitizer is not on this machine"),
            ("ncu", LEFT_OUT, "ncu is not on this machine")])
        self.assertEqual(self.report.failed(), [])


class Losses(unittest.TestCase):
    LAYOUT = layouts.Layout("dp2", 2, ())
    RECORDED = [(5.0 - 0.1 * i, 2.0) for i in range(10)]

    def compare(self, step, loss, norm):
        found = list(self.RECORDED)
        found[step] = (loss, norm)
        return layouts.compare(self.LAYOUT, found, self.RECORDED)

    def test_the_same_curve_is_good(self):
        self.assertTrue(layouts.compare(self.LAYOUT, self.RECORDED, self.RECORDED)[0])
        self.assertTrue(self.compare(3, 4.7 * 1.000008, 2.0 * 0.99992)[0])

    def test_a_wrong_loss_is_seen_and_its_step_told(self):
        good, told = self.compare(3, 4.7 * 1.0001, 2.0)
        self.assertFalse(good)
        self.assertIn("loss apart by 1.0e-04 at step 4 (allowed 1e-05)", told)

    def test_a_wrong_norm_is_seen_although_the_loss_is_right(self):
        good, told = self.compare(9, 4.1, 1.0)
        self.assertFalse(good)
        self.assertIn("norm apart by 5.0e-01 at step 10", told)

    def test_what_is_no_number_is_seen(self):
        for value in (None, float("nan"), float("inf")):
            self.assertFalse(self.compare(5, value, 2.0)[0], value)
            self.assertFalse(self.compare(5, 4.5, value)[0], value)

    def test_a_run_that_ended_early_is_seen(self):
        self.assertEqual(layouts.compare(self.LAYOUT, self.RECORDED[:7], self.RECORDED),
                         (False, "7 steps, recorded: 10"))

    def test_a_recorded_curve_that_would_let_a_run_without_training_pass_is_refused(self):
        layouts.check_recorded(self.LAYOUT, self.RECORDED)
        with self.assertRaisesRegex(ValueError, "from 5.0000 to 4.9999, too little"):
            layouts.check_recorded(self.LAYOUT, [(5.0 - 1e-5 * i, 2.0) for i in range(10)])
        with self.assertRaisesRegex(ValueError, "9 recorded steps, allowed: 10"):
            layouts.check_recorded(self.LAYOUT, self.RECORDED[1:])


class Travel(Folder):
    def test_a_folder_that_is_too_large_is_refused_and_its_largest_files_named(self):
        (self.folder / "small").write_bytes(b"x" * 100)
        (self.folder / "large").write_bytes(b"x" * (2 << 20))
        (self.folder / "out").mkdir()
        (self.folder / "out/log.txt").write_bytes(b"x" * (3 << 20))
        travels = bundle.Bundle(self.folder)
        bundle.check_size(travels, largest=3 << 20)
        with self.assertRaisesRegex(commands.CommandFailed,
                                    "has 2.0 MiB, allowed: 1; the largest: large 2.0, small 0.0"):
            bundle.check_size(travels, largest=1 << 20)

    def test_what_the_other_machine_may_lack_goes_along(self):
        torch = [pathlib.Path("/venv/torch/lib")]
        self.assertTrue(bundle.is_foreign("libprotobuf.so.32", "/usr/lib/libprotobuf.so.32", torch))
        self.assertFalse(bundle.is_foreign("libc10.so", "/venv/torch/lib/libc10.so", torch))
        for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1"):
            self.assertFalse(bundle.is_foreign(name, "/usr/lib/" + name, torch), name)

    def test_only_an_earlier_bundle_is_replaced(self):
        build, other, checked, theses = (self.folder / str(i) for i in range(4))
        other.mkdir()
        for folder in (other, other / "not there"):
            bundle.check_replaceable(folder)
        for name in (*bundle.PROGRAMS, "losses.json", "out/table.txt"):
            self.program(build / name)
        bundle.check_replaceable(build)
        self.report.write(checked / "out")  # before there was a bundle
        bundle.check_replaceable(checked)
        self.program(build / "build.ninja")  # a build folder has the same programs
        for path in (other / "lib/thesis.tex", checked / "out/thesis.tex", theses / "out/1.json"):
            self.program(path)
        for folder, names in ((build, "benchmarks, build.ninja, lib"), (other, "lib"),
                              (checked, "out"), (theses, "out")):
            with self.assertRaisesRegex(commands.CommandFailed, f"would be deleted, .* {names}"):
                bundle.build(SCRIPTS, build, folder, compiles=False)
        self.assertTrue((other / "lib/thesis.tex").exists())

    def test_a_missing_program_is_named(self):
        with self.assertRaisesRegex(commands.CommandFailed, "lacks lockstep, libexec/lockstep"):
            bundle.Bundle(self.folder).check()


class Tools(Folder):
    def test_each_parser_reads_its_sample(self):
        for parser, text, expected in samples.SAMPLES:
            self.assertEqual(parser(text), expected, parser.__name__)
        self.assertEqual(samples.wrong(), [])

    def test_a_failed_test_is_told_by_its_first_complaint(self):
        self.assertEqual(parsing.gtest_failure(samples.GTEST, "Kernels.Sgd"),
                         "cuda_test.cpp:31: Failure Value of: at::allclose(a, b) Actual: false "
                         "Expected: true")

    def test_the_sanitizers_verdict(self):
        def verdict(status, output):
            context = self.context()
            context.bundle = bundle.Bundle(self.folder)
            context.run = lambda *words: commands.Result(status, output, "", 1)
            return kernel_stage.sanitize(context, ["--tool", "memcheck"], "of layers")

        find, kernel_stage.find = kernel_stage.find, lambda name: name
        self.addCleanup(setattr, kernel_stage, "find", find)
        clean = "[       OK ] Kernels.AdamW (12 ms)\n========= ERROR SUMMARY: 0 errors\n"
        self.assertEqual(verdict(0, clean), "nothing found, 1 ok, 0 failed, 0 skipped")
        for status, output, message in ((9, samples.MEMCHECK, "^1 findings"),
                                        (0, samples.RACECHECK, "^2 findings"),
                                        (0, "Device not supported", "exit status 0: Device not"),
                                        (1, clean, "exit status 1")):
            with self.assertRaisesRegex(commands.CommandFailed, message):
                verdict(status, output)

    def test_the_peak_is_that_of_the_gpu(self):
        context, asked = self.context(), []

        def answers(name):
            context.report = Report(lambda line: None)
            context.run = lambda *words: (asked.append(words), commands.Result(
                0, f"{name}, 580.1, 81559 MiB\n" if name else "", "", 1))[1]

        for name, peak in (("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
                           ("NVIDIA H100 NVL", 835), ("NVIDIA GH200 480GB", 989), ("", None),
                           ("NVIDIA L4", None), ("NVIDIA A100-SXM4-80GB", 312)):
            answers(name)
            self.assertEqual(speed_stage.peak_of(context), peak, name)
        self.assertEqual(len(asked), 7)
        answers("NVIDIA L4")
        context.add("nvidia-smi", OK, "NVIDIA H100 PCIe, 81559 MiB, driver 580.1")
        self.assertEqual(speed_stage.peak_of(context), 756)
        self.assertEqual(len(asked), 7)

    def test_mfu_counts_as_palm_does(self):
        size = speed_stage.SIZES[2]
        contender = speed_stage.Contender.__new__(speed_stage.Contender)
        contender.times, contender.parameters, contender.peak = [400.0], 1_320_000_000, 3 << 30
        # 2 micro-batches of 4 x 2048 tokens, 74.8 TFLOP each, in 0.4 s: 374 TFLOP/s of 989.
        self.assertIn("41.0k tokens/s, MFU 37.8%, 3.0 GiB", contender.told(size, 989))


if __name__ == "__main__":
    unittest.main()
