"""A run that diverges ends with status 4, keeps its last good checkpoint and names it; weights that
are not finite are refused by name."""

import json
import pathlib
import signal
import struct
import sys
import unittest
import zlib

from support import LOCKSTEP, Ranks, metrics, run, torchrun

# Every gradient overflows, but the loss is finite.
OVERFLOW = ("train.precision=fp16", "optimizer.loss_scale=1e12")
NO_OVERFLOW = ("train.precision=fp16", "optimizer.loss_scale=1")
# Weights of about 1e18 after the first step; their loss in the second step is not a number.
EXPLOSION = ("optimizer.optimizer=sgd", "optimizer.lr=1e20", "optimizer.clip_grad=0")
# Infinite weights after a step whose gradients are finite.
INFINITE = (*EXPLOSION, "optimizer.weight_decay=1e30", "train.eval_iters=0")
GENTLE = ("optimizer.optimizer=sgd", "optimizer.lr=1e-3")


def settings(*fields):
    return [part for field in fields for part in ("--set", field)]


class Divergence(Ranks):
    def setUp(self):
        super().setUp()
        self.output = self.folder / "out"
        self.checkpoints = self.output / "checkpoint"

    def train(self, *fields):
        return run(LOCKSTEP, "train", self.config, "--output", self.output, *settings(*fields))

    def steps(self):
        return sorted(path.name for path in self.checkpoints.glob("step_*"))

    def test_a_loss_that_is_no_number_ends_the_run_at_once(self):
        result = self.train(*EXPLOSION, "checkpoint.save_interval=1", "checkpoint.keep=1")
        self.assert_failed(
            result, 4, "lockstep: training diverged: iteration 2: the loss is not a number\n")
        lines, validations = metrics(self.output)
        self.assertEqual([line["iteration"] for line in lines], [1, 2])
        self.assertIsNone(lines[1]["lm_loss"])
        self.assertEqual(validations, [])
        self.assertEqual(self.steps(), ["step_1"])
        self.assertEqual(run(LOCKSTEP, "checkpoint", "verify", self.checkpoints).returncode, 0)

    def test_a_checkpoint_whose_loss_is_no_number_is_not_taken_for_a_good_one(self):
        for saves in ((), ("checkpoint.async_save=true",)):
            saving = (*saves, "checkpoint.save_interval=1", "checkpoint.keep=1")
            result = self.train(*GENTLE, *saving, "train.train_iters=4")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(self.steps(), ["step_4"])
            self.assert_failed(
                self.train(*EXPLOSION, "optimizer.lr=1e18", *saving,
                           f"checkpoint.load={self.checkpoints}", "train.train_iters=9"), 4,
                "iteration 6: the loss is not a number; the last checkpoint before that is "
                f"'{self.checkpoints}/step_4'")
            self.assertEqual(self.steps(), ["step_4", "step_5"])
            good = f"{self.checkpoints}/step_4"
            result = run(LOCKSTEP, "evaluate", good, "--input", self.folder / "text", "--json")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertGreater(json.loads(result.stdout)["loss"], 0)
            result = self.train(*GENTLE, *saving, f"checkpoint.load={good}", "train.train_iters=6")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(self.steps(), ["step_6"])
            self.checkpoints.rename(self.folder / f"done{len(saves)}")

    def test_an_asynchronous_save_is_completed_before_the_run_ends(self):
        result = self.train(*EXPLOSION, "checkpoint.save_interval=1", "checkpoint.async_save=true")
        self.assert_failed(result, 4)
        self.assertEqual(self.steps(), ["step_1"])
        self.assertEqual(run(LOCKSTEP, "checkpoint", "verify", self.checkpoints).returncode, 0)

    def test_skipped_steps_in_a_row_keep_the_checkpoint_from_before_them(self):
        saving = ("checkpoint.save_interval=1", "checkpoint.keep=2")
        result = self.train(*NO_OVERFLOW, *saving, "train.train_iters=4")
        self.assertEqual(result.returncode, 0, result.stderr)
        going_on = (*saving, f"checkpoint.load={self.checkpoints}", "train.train_iters=30",
                    "train.max_skipped_steps=6")
        ending = "iterations 5 to 10: found 6 skipped steps in a row, whose gradients are not " \
                 "finite, allowed: fewer than train.max_skipped_steps = 6; the last checkpoint " \
                 f"before that " \
                 f"is '{self.checkpoints}/step_4'; if its weights are the cause and not " \
                 f"the loss scale, it is '{self.checkpoints}/step_3'\n"
        self.assert_failed(self.train(*OVERFLOW, *going_on), 4, ending)
        lines = metrics(self.output)[0]
        self.assertEqual([line["iteration"] for line in lines], list(range(1, 11)))
        self.assertEqual([line["skipped"] for line in lines], [False] * 4 + [True] * 6)
        self.assertEqual(self.steps(), ["step_3", "step_4", "step_8", "step_9"])
        # A restarted run continues the count.
        self.assert_failed(self.train(*OVERFLOW, *going_on), 4, ending)
        self.assertEqual(self.steps(), ["step_3", "step_4", "step_8", "step_9"])
        self.assertEqual(metrics(self.output)[0][:9], lines[:9])
        # It resumes from the good checkpoint; after a good step the others are removed.
        result = self.train(*NO_OVERFLOW, *saving, "train.train_iters=7",
                            f"checkpoint.load={self.checkpoints}/step_4")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.steps(), ["step_6", "step_7"])

    def test_weights_whose_gradient_is_never_finite_are_not_named_as_good(self):
        """After some steps, the loss of the weights is finite but its gradient is not."""
        saving = ("checkpoint.save_interval=1", "checkpoint.keep=1", "train.eval_iters=0")
        for saves in ((), ("checkpoint.async_save=true",)):
            result = self.train(*GENTLE, *saving, *saves, "train.train_iters=4")
            self.assertEqual(result.returncode, 0, result.stderr)
            going_on = ("optimizer.optimizer=sgd", "optimizer.lr=1e8", "optimizer.clip_grad=0",
                        *saving, *saves, f"checkpoint.load={self.checkpoints}",
                        "train.train_iters=30", "train.max_skipped_steps=6")
            result = self.train(*going_on)
            lines = metrics(self.output)[0]
            first = 1 + [line["skipped"] for line in lines].index(True)
            self.assertGreater(first, 5)
            good = f"{self.checkpoints}/step_{first - 2}"
            ending = f"iterations {first} to {first + 5}: found 6 skipped steps in a row, whose " \
                     "gradients are not finite, allowed: fewer than train.max_skipped_steps = 6; " \
                     f"the last checkpoint before that is '{good}'\n"
            self.assert_failed(result, 4, ending)
            self.assertTrue(all(line["lm_loss"] is not None for line in lines))
            self.assertEqual([line["skipped"] for line in lines],
                             [False] * (first - 1) + [True] * 6)
            kept = sorted(f"step_{step}" for step in (first - 2, first - 1, first + 4))
            self.assertEqual(self.steps(), kept)
            self.assert_failed(self.train(*going_on), 4, ending)  # it continues the count
            result = self.train(*GENTLE, *saving, *saves, f"checkpoint.load={good}",
                                f"train.train_iters={first}")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertFalse(any(line["skipped"] for line in metrics(self.output)[0]))
            self.checkpoints.rename(self.folder / f"done{len(saves)}")

    def test_a_save_for_a_signal_leaves_the_checkpoint_before_it(self):
        """No loss of its weights is known yet."""
        process = self.start(1, "--output", self.output, *settings(
            *GENTLE, "checkpoint.save_interval=1", "checkpoint.keep=1", "train.eval_iters=0",
            "train.train_iters=1000000"))[0]
        self.wait_for_iterations(self.output)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=60), 3)
        last = metrics(self.output)[0][-1]["iteration"]
        self.assertEqual(self.steps(), sorted([f"step_{last - 1}", f"step_{last}"]))

    def test_a_good_step_starts_the_count_anew(self):
        # The initial scale is 2^9 times too large, so about nine steps are skipped.
        fitting = ("train.precision=fp16", "optimizer.initial_loss_scale=1e10",
                   "optimizer.hysteresis=1", "train.train_iters=40")
        result = self.train(*fitting)
        self.assertEqual(result.returncode, 0, result.stderr)
        skipped = [line["skipped"] for line in metrics(self.output)[0]]
        longest = skipped.index(False)
        self.assertGreater(longest, 2)
        self.assertEqual(sum(skipped), longest)
        self.assertEqual(
            self.train(*fitting, f"train.max_skipped_steps={longest + 1}").returncode, 0)
        self.assert_failed(self.train(*fitting, f"train.max_skipped_steps={longest}"), 4,
                           f"iterations 1 to {longest}")

    def test_all_ranks_end_with_the_status_and_one_tells(self):
        fields = settings(*OVERFLOW, "train.max_skipped_steps=3", "train.global_batch_size=6")
        processes = self.start(3, "--output", self.output, *fields)
        errors = [process.communicate(timeout=60)[1].decode() for process in processes]
        self.assertEqual([process.returncode for process in processes], [4, 4, 4], errors)
        told = "lockstep: rank 0: training diverged: iterations 1 to 3"
        self.assertIn(told, errors[0])
        self.assertEqual(errors[1:], ["", ""])
        result = torchrun(3, LOCKSTEP, "train", self.config, *fields)
        self.assertEqual(result.stderr.decode().count(told), 1, result.stderr)
        self.assertIn("exitcode  : 4", result.stderr.decode())

    def test_a_validation_loss_that_is_no_number_ends_the_run(self):
        result = self.train(*EXPLOSION, "train.train_iters=1")
        self.assert_failed(result, 4, "iteration 1: the validation loss is not a number")
        self.assertIsNone(metrics(self.output)[1][0]["validation_loss"])
        self.assertEqual(self.steps(), [])

    def test_weights_that_are_not_finite_are_not_saved(self):
        self.assertEqual(self.train(*GENTLE, "train.train_iters=1").returncode, 0)
        going_on = (*INFINITE, "checkpoint.keep=1", f"checkpoint.load={self.checkpoints}/step_1")
        good = f"; the last checkpoint before that is '{self.checkpoints}/step_1'"
        result = self.train(*going_on, "train.train_iters=2")
        self.assert_failed(result, 4, "training diverged: rank 0: tensor '",
                           " elements that are not finite, allowed: none" + good)
        for more in ((), ("checkpoint.async_save=true",)):
            result = self.train(*going_on, *more, "checkpoint.save_interval=1")
            told = "the last checkpoint failed: " if more else \
                "no checkpoint after iteration 2, training continues: "
            self.assert_failed(result, 4, "iteration 3: the loss is not a number" + good,
                               told + "rank 0: tensor '")
            self.assertEqual(sorted(path.name for path in self.checkpoints.iterdir()),
                             ["latest", "step_1"])
        processes = self.start(2, "--output", self.output, *settings(
            *going_on, "train.train_iters=2"))
        errors = [process.communicate(timeout=60)[1].decode() for process in processes]
        self.assertEqual([process.returncode for process in processes], [4, 4], errors)
        self.assertIn("lockstep: rank 0: training diverged: rank ", errors[0])

    def poison(self, step):
        """Puts a NaN into a checkpoint and corrects the checksums. Returns the tensor's name."""
        shard, manifest = step / "rank_00000.safetensors", step / "manifest.textproto"
        content = bytearray(shard.read_bytes())
        before = zlib.crc32(content)
        length = struct.unpack("<Q", content[:8])[0]
        name = "decoder.final_layernorm.weight"
        begin = 8 + length + json.loads(content[8:8 + length])[name]["data_offsets"][0]
        content[begin:begin + 4] = struct.pack("<f", float("nan"))
        shard.write_bytes(content)
        body = manifest.read_text().replace(f"[{before}]", f"[{zlib.crc32(content)}]")
        body = body[:body.rindex("# crc32 ")]
        manifest.write_text(f"{body}# crc32 {zlib.crc32(body.encode()):08x}\n")
        return name

    def test_weights_that_are_not_finite_are_refused(self):
        self.assertEqual(self.train("train.train_iters=1").returncode, 0)
        name = self.poison(self.checkpoints / "step_1")
        self.assertEqual(run(LOCKSTEP, "checkpoint", "verify", self.checkpoints).returncode, 0)
        text = self.folder / "text"
        found = f"tensor '{name}': found 1 of 32 elements that are not finite, allowed: none"
        named = f"'{self.checkpoints}/step_1': {found}"
        for command in (("evaluate", self.checkpoints, "--input", text),
                        ("generate", self.checkpoints, "--prompt", "x"),
                        ("checkpoint", "export", "--hf", self.folder / "hf", self.checkpoints)):
            result = run(LOCKSTEP, *command)
            self.assert_failed(result, 1, named)
            self.assertEqual(result.stdout, b"")
        self.assertFalse((self.folder / "hf").exists())
        for fields in ((), ("checkpoint.finetune=true",)):
            result = self.train(f"checkpoint.load={self.checkpoints}", "train.train_iters=3",
                                *fields)
            self.assert_failed(result, 1, named)
        processes = self.start(2, *settings(f"checkpoint.load={self.checkpoints}"))
        for process in processes:
            error = process.communicate(timeout=60)[1].decode()
            self.assertEqual(process.returncode, 1, error)
            self.assertIn(f"'{self.checkpoints}/step_1': rank 0: {found}", error)

    def test_a_loss_of_evaluate_that_is_no_number_is_an_error(self):
        result = self.train(*EXPLOSION, "train.train_iters=1", "train.eval_iters=0")
        self.assertEqual(result.returncode, 0, result.stderr)
        text = self.folder / "text"
        result = run(LOCKSTEP, "evaluate", self.checkpoints, "--input", text, "--json")
        self.assert_failed(result, 1, f"'{self.checkpoints}/step_1': the loss on '{text}' is not")
        result = run(LOCKSTEP, "generate", self.checkpoints, "--prompt", "x")
        self.assert_failed(result, 1, "generate: logits of token 0: found NaN")

    def test_a_perplexity_that_is_no_double_is_the_largest(self):
        result = self.train("optimizer.lr=300", "train.train_iters=1", "train.eval_iters=0")
        self.assertEqual(result.returncode, 0, result.stderr)
        result = run(LOCKSTEP, "evaluate", self.checkpoints, "--input", self.folder / "text",
                     "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        found = json.loads(result.stdout)
        self.assertGreater(found["loss"], 710)
        self.assertEqual(found["perplexity"], sys.float_info.max)

    def test_an_import_of_weights_that_are_not_finite_is_refused(self):
        result = self.train("train.train_iters=1")
        self.assertEqual(result.returncode, 0, result.stderr)
        hf, back = self.folder / "hf", self.folder / "back"
        result = run(LOCKSTEP, "checkpoint", "export", "--hf", hf, self.checkpoints)
        self.assertEqual(result.returncode, 0, result.stderr)
        path = hf / "model.safetensors"
        content = bytearray(path.read_bytes())
        length = struct.unpack("<Q", content[:8])[0]
        name, entry = next((name, entry) for name, entry in json.loads(
            content[8:8 + length]).items() if name.endswith("down_proj.weight"))
        begin = 8 + length + entry["data_offsets"][0]
        content[begin:begin + 8] = struct.pack("<ff", float("nan"), float("-inf"))
        path.write_bytes(content)
        elements = entry["shape"][0] * entry["shape"][1]
        self.assert_failed(run(LOCKSTEP, "checkpoint", "import", "--hf", hf, back), 1,
                           f"'{path}': tensor '{name}': found 2 of {elements} elements that are not "
                           "finite")
        self.assertFalse(pathlib.Path(back).exists())


if __name__ == "__main__":
    unittest.main()
