"""Tensor, pipeline and context parallelism as a user runs them: real processes."""

import unittest

from support import LOCKSTEP, EndToEnd, launch, metrics, run

MODEL = ("model.num_layers=4", "model.num_attention_heads=4", "train.train_iters=6",
         "train.eval_interval=3", "train.precision=fp64")


def options(*overrides):
    return [part for override in overrides for part in ("--set", override)]


class Layouts(EndToEnd):
    def train(self, ranks, *overrides):
        output = self.folder / "-".join([str(ranks), *overrides]).replace("/", "_")
        command = [LOCKSTEP, "train", self.config, "--output", output,
                   *options(*MODEL, *overrides)]
        result = launch(ranks, *command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        iterations, validations = metrics(output)
        self.assertEqual([line["iteration"] for line in iterations], [1, 2, 3, 4, 5, 6])
        return ([line["lm_loss"] for line in iterations] +
                [line["grad_norm"] for line in iterations] +
                [line["validation_loss"] for line in validations])

    def test_every_layout_gives_the_metrics_of_one_process(self):
        expected = self.train(1)
        for ranks, *overrides in (
                (2, "parallel.tensor_model_parallel_size=2"),
                (2, "parallel.tensor_model_parallel_size=2", "parallel.tp_comm_overlap=true",
                 "parallel.sequence_parallel=true"),
                (2, "parallel.pipeline_model_parallel_size=2"),
                (2, "parallel.context_parallel_size=2"),
                (4, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
                 "parallel.pipeline_model_parallel_size=2",
                 "parallel.virtual_pipeline_model_parallel_size=2", "train.micro_batch_size=1"),
                (4, "parallel.pipeline_model_parallel_size=2",
                 "parallel.pipeline_schedule=zb-h1", "train.micro_batch_size=1",
                 "ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true")):
            with self.subTest(overrides):
                for value, wanted in zip(self.train(ranks, *overrides), expected, strict=True):
                    self.assertAlmostEqual(value, wanted, delta=1e-12 * wanted)

    def test_layouts_that_cannot_be_end_with_2_and_name_the_field(self):
        for override, field in (
                ("parallel.pipeline_model_parallel_size=3", "model.num_layers"),
                ("parallel.virtual_pipeline_model_parallel_size=2",
                 "parallel.virtual_pipeline_model_parallel_size"),
                ("parallel.sequence_parallel=true", "parallel.sequence_parallel"),
                ("parallel.tp_comm_overlap=true", "parallel.tp_comm_overlap: found true"),
                ("parallel.tensor_model_parallel_size=3", "model.num_attention_heads"),
                ("parallel.pipeline_model_parallel_layout=Ettt|tL",
                 "pipeline_model_parallel_size")):
            with self.subTest(override):
                result = run(LOCKSTEP, "train", self.config, *options(*MODEL, override))
                self.assertEqual(result.returncode, 2, result.stderr.decode())
                self.assertIn(field, result.stderr.decode())


if __name__ == "__main__":
    unittest.main()
