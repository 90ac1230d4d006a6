"""TensorBoard reads the event files of runs; uses PyPI's package, which `scripts/setup tensorboard`
installs."""

import math
import sys
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, metrics, run

PACKAGES = list(SOURCE.glob(".venv-tensorboard/lib/python3*/site-packages"))
if PACKAGES:
    sys.path += map(str, PACKAGES)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ON = ["--set", "train.tensorboard=true"]


def flattened(value, path):
    if not isinstance(value, dict):
        return {path: float(value)}
    return {tag: number for key, inner in value.items()
            for tag, number in flattened(inner, f"{path}/{key}").items()}


@unittest.skipUnless(PACKAGES, "TensorBoard is not installed: scripts/setup tensorboard")
class TensorBoard(EndToEnd):
    def train(self, output, *arguments):
        result = run(LOCKSTEP, "train", self.config, "--output", output, *ON, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result

    def scalars(self, output):
        """Returns {tag: [(step, value)]} as TensorBoard shows them."""
        events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        return {tag: [(event.step, event.value) for event in events.Scalars(tag)]
                for tag in events.Tags()["scalars"]}

    def assert_shows(self, output):
        """TensorBoard shows the values of metrics.jsonl, in fp32."""
        iterations, validations = metrics(output)
        expected = {}
        for prefix, lines in (("train", iterations), ("validation", validations)):
            for line in lines:
                step = line.pop("iteration")
                line.pop("slowest_rank", None)
                for tag, value in flattened(line, prefix).items():
                    expected.setdefault(tag, []).append((step, value))
        found = self.scalars(output)
        self.assertEqual(set(found), set(expected))
        for tag, points in expected.items():
            self.assertEqual([step for step, _ in found[tag]], [step for step, _ in points], tag)
            for (_, value), (_, wanted) in zip(found[tag], points, strict=True):
                self.assertTrue(math.isclose(value, wanted, rel_tol=1e-6), (tag, value, wanted))
        return found

    def test_it_shows_the_numbers_of_a_run(self):
        output = self.folder / "a run"
        self.train(output, "--set", "train.log_grad_norm_per_group=true")
        found = self.assert_shows(output)
        self.assertEqual([step for step, _ in found["train/lm_loss"]], list(range(1, 13)))
        for tag in ("train/time_ms/forward", "train/model_tflops_per_device",
                    "train/peak_memory_bytes", "train/grad_norms/wd_mult 0",
                    "validation/perplexity"):
            self.assertIn(tag, found)

    def test_a_resumed_run_drops_the_steps_that_it_overtakes(self):
        output = self.folder / "run"
        self.train(output, "--set", "checkpoint.save_interval=4", "--set", "train.train_iters=10",
                   "--set", "checkpoint.keep=3")
        (output / "checkpoint" / "latest").write_text("8\n")
        for step in (output / "checkpoint").glob("step_*10"):
            step.rename(output / "last")
        result = self.train(output, "--set", f"checkpoint.load={output / 'checkpoint'}")
        self.assertIn("iteration 8", result.stderr.decode())
        self.assertEqual(len(list((output / "tensorboard").iterdir())), 2)
        found = self.assert_shows(output)
        self.assertEqual([step for step, _ in found["train/lm_loss"]], list(range(1, 13)))

    def test_a_run_anew_in_a_folder_hides_the_run_before(self):
        output = self.folder / "run"
        self.train(output)
        self.train(output, "--set", "train.train_iters=3", "--set", "train.seed=5")
        self.assertEqual([step for step, _ in self.assert_shows(output)["train/lm_loss"]],
                         [1, 2, 3])


class WithoutTensorBoard(EndToEnd):
    def test_nothing_is_written_unless_it_is_asked_for(self):
        output = self.folder / "run"
        self.assertEqual(run(LOCKSTEP, "train", self.config, "--output", output).returncode, 0)
        self.assertFalse((output / "tensorboard").exists())

    def test_a_folder_that_cannot_be_made_is_named(self):
        output = self.folder / "run"
        output.mkdir()
        (output / "tensorboard").write_text("a file")
        result = run(LOCKSTEP, "train", self.config, "--output", output, *ON)
        self.assert_failed(result, 1, f"train.tensorboard: folder '{output}/tensorboard'")


if __name__ == "__main__":
    unittest.main()
