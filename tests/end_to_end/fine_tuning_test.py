"""`lockstep train --task sft`: learning, resuming, and what is refused."""

import gzip
import json
import unittest

from data_lines_test import zstd
from support import LOCKSTEP, SOURCE, EndToEnd, launch, metrics, run

RECIPE = SOURCE / "configs/sft_tiny.textproto"
EXAMPLE = SOURCE / "examples/fine_tuning/numbers.jsonl"


class FineTuning(EndToEnd):
    def train(self, output, *fields, ranks=1, arguments=()):
        words = [LOCKSTEP, "train", RECIPE, "--output", self.folder / output, *arguments,
                 *(word for field in fields for word in ("--set", field))]
        return run(*words) if ranks == 1 else launch(ranks, *words)

    def losses(self, output):
        return [line["lm_loss"] for line in metrics(self.folder / output)[0]]

    def test_the_recipe_learns_the_examples(self):
        result = self.train("out", "data.split=1,0", "train.eval_iters=0")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(b"data.path: 42 conversations in ", result.stderr)
        iterations, _ = metrics(self.folder / "out")
        self.assertLess(iterations[-1]["lm_loss"], 0.05)
        self.assertEqual(iterations[0]["num_tokens"], 4 * 128)
        self.assertLess(iterations[0]["num_loss_tokens"], 4 * 128 / 2)
        for prompt, answer in (("What comes after six? ", "seven"), ("2 + 3 = ", "5")):
            generated = run(LOCKSTEP, "generate", self.folder / "out/checkpoint", "--prompt",
                            prompt, "--max-tokens", 40, "--temperature", 0)
            self.assertEqual(generated.stdout.decode().rstrip("\n"), prompt + answer,
                             generated.stderr)

        def hot(*options):
            text = run(LOCKSTEP, "generate", self.folder / "out/checkpoint", "--prompt", "2 + 3 = ",
                       "--max-tokens", 100, "--temperature", 2, "--top-k", 0, *options).stdout
            return text[:-1]

        ended, longer = hot(), hot("--ignore-eos")
        self.assertTrue(longer.startswith(ended), (ended, longer))
        self.assertGreater(len(longer), len(ended))

    def test_ranks_see_the_same_samples_and_a_run_goes_on_where_it_was(self):
        fp64 = ("train.precision=fp64", "train.eval_interval=10")
        whole = self.train("whole", "train.train_iters=30", *fp64)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        self.assertEqual(self.train("two", "train.train_iters=30", *fp64, ranks=2).returncode, 0)
        schedule = "optimizer.lr_decay_iters=30"
        first = self.train("parts", "train.train_iters=13", schedule, *fp64)
        self.assertEqual(first.returncode, 0, first.stderr)
        rest = self.train("parts", "train.train_iters=30", schedule, *fp64,
                          f"checkpoint.load={self.folder}/parts/checkpoint", ranks=2)
        self.assertEqual(rest.returncode, 0, rest.stderr)
        expected = self.losses("whole")
        self.assertEqual(len(expected), 30)
        for output in ("two", "parts"):
            for found, loss in zip(self.losses(output), expected, strict=True):
                self.assertAlmostEqual(found, loss, delta=1e-11 * loss)

    def test_an_early_end_of_the_decay_is_told(self):
        for decay, told in ((11, True), (12, False)):
            result = self.train("out", "train.train_iters=12", f"optimizer.lr_decay_iters={decay}",
                                "train.eval_iters=0")
            self.assertEqual(result.returncode, 0, result.stderr)
            note = (b"optimizer.lr_decay_iters is 11 and train.train_iters 12: after iteration 11 "
                    b"the learning rate stays at optimizer.min_lr (0.0003)\n")
            self.assertEqual(note in result.stderr, told, result.stderr)

    def test_the_decay_lasts_longer_while_batches_are_smaller(self):
        # 11 full batches of samples take more than 12 iterations.
        result = self.train("out", "train.train_iters=12", "optimizer.lr_decay_iters=11",
                            "train.eval_iters=0", "train.micro_batch_size=2",
                            "train.rampup_batch_size=2 2 8")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertNotIn(b"optimizer.lr_decay_iters is", result.stderr)

    def test_stronger_router_losses_are_told(self):
        for per_token in ("true", "false"):
            result = self.train("out", "train.train_iters=1", "train.eval_iters=0",
                                "model.num_experts=2", "model.moe_aux_loss_coeff=0.01",
                                f"ddp.calculate_per_token_loss={per_token}")
            self.assertEqual(result.returncode, 0, result.stderr)
            note = (b"model.moe_aux_loss_coeff: router losses count all tokens and are divided by "
                    b"those with loss, as in Megatron Core, so fewer labels make them stronger; "
                    b"ddp.calculate_per_token_loss=false takes means over all tokens\n")
            self.assertEqual(result.stderr.count(note), per_token == "true", result.stderr)

    def test_the_short_form_and_compressed_files(self):
        lines = EXAMPLE.read_bytes()
        (self.folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
        (self.folder / "b.jsonl.zst").write_bytes(zstd(lines))
        fields = ("train.train_iters=3", "train.eval_iters=1")
        self.train("plain", *fields)
        for name in ("a.jsonl.gz", "b.jsonl.zst"):
            result = self.train(name[0], *fields, f"data.path={self.folder}/{name}", arguments=(
                "--set", "train.task=pretrain", "--task", "sft"))
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(self.losses(name[0]), self.losses("plain"))

    def test_what_cannot_be_is_refused_by_name(self):
        bad = self.folder / "bad.jsonl"
        bad.write_text(EXAMPLE.read_text() + '{"messages": [{"role": "tool", "content": "x"}]}\n')
        for ranks in (1, 2):
            self.assert_failed(self.train("bad", f"data.path={bad}", ranks=ranks), 1,
                               f"data.path: '{bad}': line 43: messages[0].role: found \"tool\", "
                               "allowed: system, user or assistant")
        self.assert_failed(self.train("bad", "data.chat_template=chatml"), 2,
                           "data.chat_template: found chatml, allowed with data.tokenizer = byte")
        self.assert_failed(self.train("bad", f"data.path={self.folder}/text"), 2,
                           "allowed with train.task = sft: files that end in .jsonl")
        self.assert_failed(self.train("bad", arguments=("--task", "tune")), 2,
                           "train.task: found 'tune', allowed: pretrain, sft")
        few = self.folder / "few.jsonl"
        few.write_text(json.dumps({"prompt": "a", "completion": "b"}))
        self.assert_failed(self.train("bad", f"data.path={few}"), 2,
                           "data.split: found no conversation to evaluate; allowed: one or more, or "
                           "train.eval_iters = 0")


if __name__ == "__main__":
    unittest.main()
