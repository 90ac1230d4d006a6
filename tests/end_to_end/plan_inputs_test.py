"""The plan commands and the configurations that `train` takes and refuses."""

import json
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, run

TINY = SOURCE / "configs/tiny.textproto"
A100 = SOURCE / "configs/machines/dgx_a100.textproto"


class PlanInputs(EndToEnd):
    def plan(self, *arguments, status=0):
        result = run(LOCKSTEP, "plan", *arguments)
        self.assertEqual(result.returncode, status, result.stderr.decode())
        return result.stdout.decode() if status == 0 else result.stderr.decode()

    def refused(self, *arguments):
        """The error of `plan verify`, which is that of `train`."""
        planned = self.plan("verify", TINY, "--world-size", 2, *arguments, status=2)
        trained = run(LOCKSTEP, "train", TINY, "--output", self.folder / "run", *arguments,
                      WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29599")
        self.assertEqual(trained.returncode, 2, trained.stderr.decode())
        return planned, trained.stderr.decode()

    def test_a_fine_tuning_is_planned(self):
        config = SOURCE / "configs/sft_tiny.textproto"
        self.assertTrue(json.loads(self.plan("verify", config, "--world-size", 2, "--json"))["ok"])
        self.plan("time", config, "--world-size", 2, "--machine", A100)

    def test_what_train_refuses_is_refused(self):
        for overrides, part in (
                (("--set", "train.cuda_graph=step", "--set",
                  "parallel.pipeline_model_parallel_size=2"),
                 "train.cuda_graph = step: found parallel.pipeline_model_parallel_size > 1"),
                (("--set", "train.cuda_graph=step", "--set", "train.device=cpu"),
                 "train.cuda_graph = step: found train.device = cpu"),
                (("--set", "train.replay_interval=5", "--set", "train.device=cuda"),
                 "train.deterministic: found false"),
                (("--set", "model.moe_router_topk=4"), "model.moe_router_topk: found 4"),
                (("--set", "model.vocab_size=100"), "model.vocab_size: found 100"),
                (("--set", "data.tokenizer=nonsense"), "data.tokenizer")):
            with self.subTest(part=part):
                for error in self.refused(*overrides):
                    self.assertIn(part, error)
                for command in ("memory", "audit"):
                    self.assertIn(part, self.plan(command, TINY, "--world-size", 2, *overrides,
                                                  status=2))

    def test_sizes_beyond_64_bits_are_refused(self):
        large = 2**62
        for fields, part in (
                ({"parallel.tensor_model_parallel_size": large,
                  "parallel.context_parallel_size": large, "parallel.sequence_parallel": "true"},
                 "parallel.tensor_model_parallel_size * parallel.context_parallel_size"),
                ({"train.micro_batch_size": large, "train.global_batch_size": large},
                 "train.micro_batch_size"),
                ({"model.hidden_size": large, "model.ffn_hidden_size": 4}, "model.")):
            options = [word for path, value in fields.items() for word in ("--set", f"{path}={value}")]
            with self.subTest(part):
                for error in self.refused(*options):
                    self.assertIn(part, error)
                    self.assertIn("does not fit into 64 bits", error)
                best = ("best", TINY, "--memory", 1)  # which chooses the micro-batch
                for command in (("time", TINY), (TINY,), *([best] if "train" not in part else [])):
                    error = self.plan(*command, "--world-size", 2, "--machine", A100, *options,
                                      status=2)
                    self.assertIn("does not fit into 64 bits", error)

    def test_other_tokenizers_have_other_vocabularies(self):
        self.plan("verify", TINY, "--world-size", 2, "--set", "data.tokenizer=hf:t.json", "--set",
                  "model.vocab_size=200")

    def test_a_step_of_a_batch_that_grows_is_one_of_the_full_batch(self):
        def time(*overrides):
            options = [part for one in overrides for part in ("--set", one)]
            return json.loads(self.plan("time", TINY, "--world-size", 1, "--machine", A100,
                                        "--json", "--set", "train.global_batch_size=64", *options))

        whole = time()
        self.assertEqual(time("train.rampup_batch_size=8 8 100000"), whole)
        config = self.folder / "schedule.textproto"
        config.write_text(TINY.read_text().replace("global_batch_size: 16", ""))
        memory = [json.loads(self.plan("memory", config, "--json", "--set", one))["stages"]
                  for one in ("train.global_batch_size=64",
                              "train.step_batch_size_schedule=0:64 1000:8")]
        self.assertEqual(memory[0], memory[1])

    def test_hosts_of_more_ranks_than_there_are(self):
        report = json.loads(self.plan(TINY, "--world-size", 2, "--json", "--ranks-per-host",
                                      9223372036854775807))
        self.assertEqual(report["hosts"], 1)

    def test_fields_that_need_a_sharded_optimizer_have_layouts(self):
        best = json.loads(self.plan(
            "best", "--keep", "train.micro_batch_size", TINY, "--world-size", 4, "--machine", A100,
            "--memory", 1, "--simulate", 2, "--json", "--set", "train.global_batch_size=16",
            "--set", "ddp.use_distributed_optimizer=true", "--set",
            "ddp.pad_buckets_for_high_nccl_busbw=true"))
        self.assertGreater(best["legal"], 0)
        self.assertEqual(best["refused"], [])

    def test_the_fewest_ranks_hold_whole_experts(self):
        text = self.plan("memory", SOURCE / "configs/moe_tiny.textproto", "--json", "--set",
                         "parallel.expert_model_parallel_size=4", "--set",
                         "train.global_batch_size=32")
        self.assertEqual(json.loads(text)["world_size"], 4)


if __name__ == "__main__":
    unittest.main()
