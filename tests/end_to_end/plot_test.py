"""lockstep plot and the loss.svg of a run: the picture as XML, its curves, what is refused."""

import json
import math
import signal
import subprocess
import unittest
import xml.etree.ElementTree

from support import LOCKSTEP, EndToEnd, clean_environment, end, launch, metrics, run

SVG = "{http://www.w3.org/2000/svg}"


class Picture:
    def __init__(self, svg):
        self.root = xml.etree.ElementTree.fromstring(svg)
        frame = self.root.find(f"{SVG}rect[@class='frame']")
        self.left, self.top, width, height = (float(frame.get(k))
                                              for k in ("x", "y", "width", "height"))
        self.right, self.bottom = self.left + width, self.top + height

    def texts(self, kind):
        return [text.text for text in self.root.findall(f"{SVG}text[@class='{kind}']")]

    def all_text(self):
        return [text.text for text in self.root.findall(f"{SVG}text")]

    def paths(self, kind):
        """Returns for each path the list of its strokes, which are lists of points."""
        found = self.root.findall(f"{SVG}path[@class='{kind}']")
        return [[[tuple(map(float, point.split())) for point in stroke.split("L")]
                 for stroke in path.get("d").split("M")[1:]] for path in found]


def points_of(path):
    return [point for stroke in path for point in stroke]


class Plot(EndToEnd):
    def write_run(self, name, losses, **fields):
        folder = self.folder / name
        folder.mkdir(parents=True)
        lines = [json.dumps({"iteration": i, "lm_loss": loss, "num_tokens": 1000,
                             "iteration_ms": 2000.0, **fields}) for i, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        return folder

    def plot(self, *arguments):
        result = run(LOCKSTEP, "plot", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return Picture(result.stdout)

    def test_a_short_run_is_drawn_point_by_point(self):
        picture = self.plot(self.write_run("a", [4, 2, 3]))
        points = points_of(picture.paths("line")[0])
        self.assertEqual([x for x, _ in points],
                         [picture.left, (picture.left + picture.right) / 2, picture.right])
        heights = [y for _, y in points]
        self.assertEqual(heights[0], picture.top)
        self.assertEqual(heights[1], picture.bottom)
        self.assertAlmostEqual(heights[2], (picture.top + picture.bottom) / 2, delta=0.06)
        self.assertEqual(picture.texts("y-tick")[0], "2.0")
        self.assertIn("iteration", picture.all_text())

    def test_a_long_run_is_thinned_and_keeps_its_extremes(self):
        losses = [2 + math.sin(i / 3000) for i in range(200_000)]
        losses[77_777] = 19.5
        picture = self.plot(self.write_run("a", losses))
        raw = points_of(picture.paths("line raw")[0])
        smooth = points_of(picture.paths("line smooth")[0])
        for points in (raw, smooth):
            self.assertGreater(len(points), 1000)
            self.assertLessEqual(len(points), 2000)
            self.assertTrue(all(picture.left - 0.1 <= x <= picture.right + 0.1 and
                                picture.top - 0.1 <= y <= picture.bottom + 0.1 for x, y in points))
        self.assertEqual(sum(y < (picture.top + picture.bottom) / 2 for _, y in raw), 1)
        self.assertEqual(sum(y < (picture.top + picture.bottom) / 2 for _, y in smooth), 0)

    def test_what_runs_to_the_right(self):
        folder = self.write_run("a", [3, 2, 1, 0.5])
        self.assertEqual(self.plot(folder, "--x", "tokens").texts("x-tick")[-1], "4.0k")
        self.assertEqual(self.plot(folder, "--x", "seconds").texts("x-tick")[-1], "8")

    def test_a_log_scale_leaves_out_what_is_not_positive(self):
        picture = self.plot(self.write_run("a", [100, 10, 0, -1, 1]), "--log")
        strokes = picture.paths("line")[0]
        self.assertEqual([len(stroke) for stroke in strokes], [2, 1])
        self.assertAlmostEqual(strokes[0][1][1], (picture.top + picture.bottom) / 2, delta=0.06)

    def test_numbers_that_are_not_finite_are_gaps(self):
        picture = self.plot(self.write_run("a", [3, None, 2, 1]))
        self.assertEqual([len(stroke) for stroke in picture.paths("line")[0]], [1, 2])

    def test_runs_are_compared_under_their_names(self):
        names = ["one <run> & \"more\"", "zwei größer", "x" * 200]
        runs = [self.write_run(name, [3, 2]) for name in names]
        legend = self.plot(*runs[:2], runs[2] / "metrics.jsonl").texts("legend")
        self.assertEqual(len(legend), 3)
        self.assertTrue(legend[0].endswith(names[0]))
        self.assertTrue(legend[1].endswith(names[1]))
        self.assertEqual(legend[2], "…" + "x" * 60)

    def test_other_fields(self):
        folder = self.write_run("a", [3, 2], time_ms={"forward": 7.5})
        picture = self.plot(folder, "--field", "time_ms.forward")
        self.assertIn("time_ms.forward", picture.all_text())
        result = run(LOCKSTEP, "plot", folder, "--field", "grad_nrom")
        self.assert_failed(result, 2, "--field: found 'grad_nrom', allowed: ", "lm_loss",
                           "time_ms.forward")

    def test_a_run_that_lacks_the_field_is_left_out_by_name(self):
        with_norm = self.write_run("a", [3, 2], grad_norm=1)
        without = self.write_run("b", [3, 2])
        result = run(LOCKSTEP, "plot", with_norm, without, "--field", "grad_norm")
        self.assertEqual(result.returncode, 0)
        self.assertIn(f"'{without}': left out, it has no grad_norm", result.stderr.decode())
        self.assertEqual(len(Picture(result.stdout).paths("line")), 1)

    def test_refusals(self):
        empty = self.write_run("empty", [])
        self.assert_failed(run(LOCKSTEP, "plot", empty), 1, str(empty), "no training iteration")
        self.assert_failed(run(LOCKSTEP, "plot", self.folder / "none"), 1, "none")
        good = self.write_run("good", [1])
        self.assert_failed(run(LOCKSTEP, "plot", good, "--x", "steps"), 2, "--x", "steps",
                           "iteration, seconds, tokens")
        self.assert_failed(run(LOCKSTEP, "plot", good, "--output", self.folder), 1,
                           str(self.folder))
        self.assert_failed(run(LOCKSTEP, "plot", self.write_run("zero", [0, -1]), "--log"), 2,
                           "found no positive number")
        self.assertEqual(run(LOCKSTEP, "plot").returncode, 2)

    def test_the_picture_goes_to_a_file(self):
        output = self.folder / "with spaces.svg"
        result = run(LOCKSTEP, "plot", self.write_run("a", [2]), "--output", output)
        self.assertEqual((result.returncode, result.stdout), (0, b""))
        self.assertEqual(len(Picture(output.read_text()).root.findall(f"{SVG}circle")), 1)


class LossOfARun(EndToEnd):
    def train(self, *arguments, ranks=1):
        output = self.folder / "out"
        return output, launch(ranks, LOCKSTEP, "train", self.config, "--output", output, *arguments)

    def test_a_run_leaves_its_picture_and_its_configuration(self):
        output, result = self.train(ranks=2)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        picture = Picture((output / "loss.svg").read_text())
        lines, validations = metrics(output)
        self.assertEqual(len(points_of(picture.paths("line")[0])), len(lines))
        self.assertEqual(len(points_of(picture.paths("line")[1])), len(validations))
        again = run(LOCKSTEP, "train", output / "config.textproto", "--print-config")
        self.assertEqual(again.stdout.decode(), (output / "config.textproto").read_text())
        self.assertIn(b"train_iters: 12", again.stdout)

    def test_a_configuration_that_a_run_leaves_sets_no_batch_that_nobody_set(self):
        self.config.write_text(self.config.read_text().replace("global_batch_size: 8", ""))
        output, result = self.train(ranks=2)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        left = output / "config.textproto"
        self.assertIn("  # global_batch_size: unset", left.read_text())
        saved = (output / "checkpoint/step_12/config.textproto").read_text()
        self.assertIn("global_batch_size: 4\n", saved)
        for ranks, micro_batch, sequences in ((1, 4, 4), (3, 1, 3)):
            again = launch(ranks, LOCKSTEP, "train", left, "--output", self.folder / f"on {ranks}",
                           "--set", f"train.micro_batch_size={micro_batch}")
            self.assertEqual(again.returncode, 0, again.stderr.decode())
            self.assertIn(f", {sequences} sequences of 32 tokens", again.stderr.decode())

    def test_a_run_that_was_stopped_leaves_it_too_and_a_resumed_one_draws_all(self):
        output = self.folder / "out"
        long = ["--output", output, "--set", "train.train_iters=100000", "--set",
                "checkpoint.load_if_present=true", "--set", f"checkpoint.load={output}/checkpoint"]
        process = subprocess.Popen([LOCKSTEP, "train", self.config, *map(str, long)],
                                   env=clean_environment(), stderr=subprocess.DEVNULL)
        self.addCleanup(end, process)
        self.wait_for_iterations(output)
        self.assertFalse((output / "loss.svg").exists())
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=60), 3)
        done = len(metrics(output)[0])
        kind = "line raw" if done >= 50 else "line"
        picture = Picture((output / "loss.svg").read_text())
        self.assertEqual(len(points_of(picture.paths(kind)[0])), done)
        _, result = self.train("--set", f"checkpoint.load={output}/checkpoint", "--set",
                               f"train.train_iters={done + 3}")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        picture = Picture((output / "loss.svg").read_text())
        kind = "line raw" if done + 3 >= 50 else "line"
        self.assertEqual(len(points_of(picture.paths(kind)[0])), done + 3)

    def test_a_run_that_diverged_leaves_it_too(self):
        output, result = self.train("--set", "optimizer.optimizer=sgd", "--set",
                                    "optimizer.lr=1e20", "--set", "optimizer.clip_grad=0")
        self.assertEqual(result.returncode, 4, result.stderr.decode())
        Picture((output / "loss.svg").read_text())

    def test_a_picture_that_cannot_be_written_does_not_fail_the_run(self):
        (self.folder / "out/loss.svg/in the way").mkdir(parents=True)
        output, result = self.train()
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn("no loss.svg", result.stderr.decode())
        self.assertEqual(len(metrics(output)[0]), 12)


if __name__ == "__main__":
    unittest.main()
