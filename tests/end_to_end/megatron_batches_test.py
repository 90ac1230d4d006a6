"""`lockstep megatron-flags`: iterations that are counted from samples, settings of experts in a
dense model and of virtual stages without any, values that mean none, second names, counts out of
range, and scripts and expressions that could take for ever."""

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

    def test_settings_of_experts_without_experts_are_left_out(self):
        dense, _ = self.convert("")
        for flag in ("--moe-router-topk 4", "--moe-ffn-hidden-size 48", "--moe-layer-freq 2",
                     "--moe-shared-expert-intermediate-size 512", "--moe-router-pre-softmax",
                     "--moe-aux-loss-coeff 1e-2", "--moe-expert-capacity-factor -1",
                     "--moe-token-drop-policy position", "--moe-router-num-groups 4",
                     "--moe-router-enable-expert-bias", "--moe-token-dispatcher-type alltoall"):
            with self.subTest(flag):
                text, notes = self.convert(flag)
                self.assertEqual(text, dense)
                self.assertIn(f"{flag.split()[0]}: not needed: without --num-experts there are no "
                              "experts\n", notes)
        text, notes = self.convert("--num-experts 0 --moe-router-topk 4")
        self.assertEqual(text, dense)
        self.assertIn("--moe-router-topk: not needed: with --num-experts 0 there are no experts\n",
                      notes)
        self.assertIn("  num_experts: 4\n", self.convert("--num-experts 4")[0])

    def test_a_loss_scale_of_0_adapts_itself(self):
        self.assertEqual(self.convert("--fp16 --loss-scale 0")[0], self.convert("--fp16")[0])
        self.assertEqual(self.convert("--bf16 --loss-scale 0.0")[0], self.convert("--bf16")[0])
        fixed = self.convert("--fp16 --loss-scale 1024")[0]
        self.assertIn("  check_for_nan_in_grad: true\n", fixed)
        self.assertIn("  loss_scale: 1024\n", fixed)

    def test_sums_in_fp32_count_where_gradients_are_sent_in_16_bits(self):
        flag = "--ddp-reduce-scatter-with-fp32-accumulation"
        sharded = "--use-distributed-optimizer"
        for precision, counts in (("--bf16", False), ("--bf16 --grad-reduce-in-bf16", True),
                                  ("--fp16", True), ("", False),
                                  ("--fp16 --accumulate-allreduce-grads-in-fp32", False)):
            with self.subTest(precision):
                plain = self.convert(f"{precision} {sharded}")[0]
                text, notes = self.convert(f"{precision} {sharded} {flag}")
                told = f"{flag}: not needed: gradients are reduced in fp32\n" in notes
                self.assertEqual(told, not counts)
                self.assertEqual(text == plain, not counts)
                self.assertEqual("  reduce_scatter_with_fp32_accumulation: true\n" in text, counts)

    def test_second_names_of_flags(self):
        self.assertIn("  save_interval: 7\n", self.convert("--persistent-save-interval 7")[0])
        both = "--persistent-save-interval 7 --save-interval 8"
        self.assertIn("  save_interval: 8\n", self.convert(both)[0])
        plain = self.convert("")[0]
        for flag, told in (("--disable-manual-gc-eval", "not needed: no Python"),
                           ("--disable-align-grad-reduce", "not needed: the order of collectives"),
                           ("--disable-fp8-wgrad", "not there: fp8 applies only"),
                           ("--disable-tp-comm-overlap-ag", "not there: parallel.tp_comm_overlap"),
                           ("--exit-signal SIGUSR1", "not there: SIGTERM and SIGINT save and stop"),
                           ("--record-shapes", "not there: an option of the command"),
                           ("--pytorch-profiler-collect-shapes", "not there: an option of the")):
            with self.subTest(flag):
                text, notes = self.convert(flag)
                self.assertEqual(text, plain)
                self.assertIn(f"{flag.split()[0]}: {told}", notes)

    def test_a_group_of_micro_batches_without_virtual_stages_is_left_out(self):
        flag = "--microbatch-group-size-per-virtual-pipeline-stage"
        for pipeline in ("--pipeline-model-parallel-size 2",
                         "--pipeline-model-parallel-size 2 "
                         "--num-virtual-stages-per-pipeline-rank 1"):
            plain, _ = self.convert(pipeline)
            text, notes = self.convert(f"{pipeline} {flag} 3")
            self.assertEqual(text, plain)
            self.assertIn(f"{flag}: not needed: without virtual stages it has no effect\n", notes)
        for virtual in ("--num-virtual-stages-per-pipeline-rank 2",
                        "--num-layers-per-virtual-pipeline-stage 1"):
            text, notes = self.convert(f"--pipeline-model-parallel-size 2 {virtual} {flag} 3")
            self.assertIn("  microbatch_group_size_per_vp_stage: 3\n", text)
            self.assertNotIn(flag, notes)

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

    def test_a_long_growth_is_not_counted_one_by_one(self):
        # 10^12 samples each in batches of 16, 32 and 48, the last of which takes 32 more; then
        # 64 at a time.
        growing = 10**12 // 16 + 10**12 // 32 + (10**12 + 32) // 48
        expected = growing + (10**13 - 3 * 10**12 - 32) // 64
        text, _ = self.convert(f"--global-batch-size 64 --train-samples {10**13} "
                               f"--rampup-batch-size 16 16 {3 * 10**12}")
        self.assertIn(f"  train_iters: {expected}\n", text)
        _, notes = self.convert(f"--global-batch-size {10**9} --train-samples {10**15} "
                                f"--rampup-batch-size 1 1 {10**14}")
        self.assertIn("--train-samples: not there: with that --rampup-batch-size", notes)

    def test_schedules_count_the_batches_of_megatron_or_are_noted(self):
        grows = "--rampup-batch-size 16 16 3000 --global-batch-size 64"
        weight = "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear"
        ends = ("--rampup-batch-size: the schedule of the weight decay ends with the run here; in "
                "Megatron-LM after train-iters batches of global-batch-size\n")
        text, notes = self.convert(f"{grows} --train-iters 500 --lr-warmup-fraction 0.1 {weight}")
        self.assertIn("  lr_decay_iters: 500\n", text)
        self.assertIn("  lr_warmup_iters: 50\n", text)
        self.assertIn(ends, notes)
        text, _ = self.convert(f"{grows} --train-iters 500 --lr-decay-iters 400")
        self.assertIn("  lr_decay_iters: 400\n", text)
        # The weight decay's schedule ends with the samples of the run, as Megatron's does.
        _, notes = self.convert(f"{grows} --train-samples 6400000 {weight}")
        self.assertNotIn("weight decay", notes)

        steps = "--step-batch-size-schedule 0:16,64K:32"
        theirs = "micro-batch-size x data-parallel size\n"
        given = ("--step-batch-size-schedule: optimizer.{} batches of the last step here; "
                 "Megatron-LM counts " + theirs)
        ends = ("--step-batch-size-schedule: {} with the run here; in Megatron-LM after "
                "train-iters batches of " + theirs)
        for flags, expected in (
                ("--train-iters 500", ends.format("the decay of the learning rate ends")),
                ("--train-iters 500 --lr-decay-style constant", ""),
                ("--train-iters 500 --lr-warmup-iters 5 --lr-decay-iters 50",
                 given.format("lr_warmup_iters, lr_decay_iters count")),
                ("--train-iters 500 --lr-decay-iters 50 " + weight,
                 given.format("lr_decay_iters counts")
                 + ends.format("the schedule of the weight decay ends"))):
            with self.subTest(flags):
                text, notes = self.convert(f"{steps} {flags}")
                told = [line for line in notes.splitlines(keepends=True)
                        if line.startswith("--step-batch-size-schedule")]
                self.assertEqual("".join(told), expected)
                self.assertNotIn("lr_decay_iters: 500", text)

    def test_a_growth_that_does_not_lead_to_the_batch_is_noted(self):
        _, notes = self.convert("--global-batch-size 100 --train-samples 1000 --rampup-batch-size "
                                "16 16 100")
        self.assertIn("--train-samples: not there: with that --rampup-batch-size", notes)
        _, notes = self.convert("--global-batch-size 0 --train-samples 1000 --rampup-batch-size "
                                "16 16 100", status=2)
        self.assertIn("--train-samples: not there: without a constant --global-batch-size", notes)

    def test_counts_that_are_no_integers_are_refused_by_name(self):
        allowed = ", allowed: -1e15 to 1e15"
        for flags, told in (
                ("--train-iters 500 --lr-warmup-fraction 1e30",
                 f"--lr-warmup-fraction: found 5e+32 iterations{allowed}"),
                ("--train-iters 500 --lr-warmup-fraction nan",
                 f"--lr-warmup-fraction: found nan iterations{allowed}"),
                (f"--global-batch-size 1 --train-samples {2 ** 63 - 1}",
                 f"--train-samples: found 9.22337e+18 iterations{allowed}"),
                ("--step-batch-size-schedule '0:8 1e30:16'",
                 f"--step-batch-size-schedule: found '1e30'{allowed}"),
                ("--step-batch-size-schedule '0:8 64:1001T'",
                 f"--step-batch-size-schedule: found '1001T'{allowed}")):
            with self.subTest(flags):
                self.assertIn(told, self.convert(flags, status=2)[1])
        text, _ = self.convert("--step-batch-size-schedule '0:8 1000T:16'")
        self.assertIn(f'step_batch_size_schedule: "0:8 {10 ** 15 // 64}:16"', text)

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
