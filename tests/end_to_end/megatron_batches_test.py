"""`lockstep megatron-flags`: iterations that are counted from samples, and scripts and expressions
that could take for ever."""

import re
import shlex
import unittest

from support import LOCKSTEP, EndToEnd, run

BASE = """--num-layers 4 --hidden-size 96 --num-attention-heads 4 --seq-length 64
--micro-batch-size 1 --lr 1e-3"""


def megatron_iterations(samples, batch, start, increment, growth):
    """As Megatron Core counts them: batch by batch while they grow, then whole batches."""
    steps = (batch - start) // increment
    consumed = iterations = 0
    while consumed <= growth and consumed <= samples:
        grown = int(consumed / (growth / steps)) if consumed <= growth and steps else steps
        consumed += min(batch, start + grown * increment)
        iterations += 1
    return iterations + max(0, samples - consumed) // batch


class MegatronBatches(EndToEnd):
    def convert(self, flags, status=0):
        result = run(LOCKSTEP, "megatron-flags", "--", *shlex.split(BASE), *shlex.split(flags))
        self.assertEqual(result.returncode, status, result.stderr.decode())
        return result.stdout.decode(), result.stderr.decode()

    def test_iterations_of_a_batch_that_grows(self):
        for samples, batch, start, increment, growth in ((146484375, 1536, 16, 16, 5859375),
                                                         (10000, 64, 16, 16, 3000),
                                                         (500, 64, 16, 16, 3000),
                                                         (10000, 64, 64, 16, 3000)):
            with self.subTest(samples=samples, batch=batch):
                text, _ = self.convert(f"--global-batch-size {batch} --train-samples {samples} "
                                       f"--rampup-batch-size {start} {increment} {growth}")
                expected = megatron_iterations(samples, batch, start, increment, growth)
                self.assertIn(f"  train_iters: {expected}\n", text)
                self.assertIn(f"  lr_decay_iters: {round(samples / batch)}\n", text)

    def test_a_growth_that_does_not_lead_to_the_batch_is_noted(self):
        _, notes = self.convert("--global-batch-size 100 --train-samples 1000 --rampup-batch-size "
                                "16 16 100")
        self.assertIn("--train-samples: not there: with that --rampup-batch-size", notes)
        _, notes = self.convert("--global-batch-size 0 --train-samples 1000 --rampup-batch-size "
                                "16 16 100", status=2)
        self.assertIn("--train-samples: not there: without a constant --global-batch-size", notes)

    def test_torn_scripts_end(self):
        for text in ("", "A=(", "A=(--x", "'", '"', "$", "${", "$(", "\\", "A=", "(", ")", ";;&&",
                     "#", "A=('", "pretrain.py --num-layers", "`", "--num-layers \"$("):
            path = self.folder / "torn"
            path.write_text(text)
            result = run(LOCKSTEP, "megatron-flags", "--file", path, timeout=10)
            self.assertEqual(result.returncode, 2, (text, result.stderr))

    def test_expressions_that_would_not_end_are_refused_by_name(self):
        deep = "(" * 100000 + "["
        for flags in ("--num-experts 8 --moe-layer-freq '[]*9223372036854775807'",
                      f"--num-experts 8 --moe-layer-freq '{deep}'"):
            with self.subTest(flags=flags[:50]):
                _, error = self.convert(flags, status=2)
                self.assertTrue(re.match(r".*--moe-layer-freq: found", error), error[:200])
        _, error = self.convert("--pipeline-model-parallel-size 4294967296 "
                                "--num-layers-per-virtual-pipeline-stage 4294967296", status=2)
        self.assertIn("--num-layers-per-virtual-pipeline-stage: found 4294967296", error)
        _, error = self.convert("--window-size 9223372036854775807,0", status=2)
        self.assertIn("--window-size: found", error)


if __name__ == "__main__":
    unittest.main()
