"""lockstep plan audit and lockstep train --audit."""

import json
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, launch, metrics, run

TINY = SOURCE / "configs/tiny.textproto"
TENSOR = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
SHARDED = ["ddp.use_distributed_optimizer=true"]
WHOLLY_SHARDED = [*SHARDED, "ddp.data_parallel_sharding_strategy=optim_grads_params",
                  "ddp.overlap_grad_reduce=true"]
PIPELINE = ["parallel.pipeline_model_parallel_size=2", "model.num_layers=2",
            "model.untie_embeddings_and_output_weights=false"]
EXPERTS = ["model.num_experts=4", "parallel.expert_model_parallel_size=2"]
SHORT = ["train.train_iters=2", "train.eval_iters=0"]


def settings(fields):
    return [part for field in fields for part in ("--set", field)]


class Audit(EndToEnd):
    def plan(self, config, *arguments):
        result = run(LOCKSTEP, "plan", "audit", config, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        return result.stdout.decode()

    def test_the_contract(self):
        answer = json.loads(self.plan(TINY, "--world-size", 4, *settings(TENSOR), "--json"))
        self.assertEqual(list(answer), ["world_size", "layout", "scaling", "ranks"])
        self.assertEqual((answer["world_size"], answer["layout"], answer["scaling"]),
                         (4, "tp 2, dp 2", "per-token"))
        self.assertEqual([rank["rank"] for rank in answer["ranks"]], [0, 1, 2, 3])
        params = {param["name"]: param for param in answer["ranks"][3]["parameters"]}
        norm = params["decoder.final_layernorm.weight"]
        self.assertEqual(list(norm), ["name", "chunk", "shape", "description", "reduction", "first",
                                      "last", "terms", "token_ranks", "counted", "update",
                                      "problem"])
        self.assertEqual(norm["terms"], [{"numerator": 1, "denominator": 1, "ranks": [0, 1, 2, 3]}])
        self.assertEqual(norm["token_ranks"], [1, 3])
        self.assertFalse(norm["counted"])
        cut = params["decoder.layers.0.self_attention.linear_qkv.weight"]
        self.assertEqual(cut["terms"], [{"numerator": 1, "denominator": 1, "ranks": [1, 3]}])
        self.assertTrue(cut["counted"])
        self.assertIn("all-reduce sum over dp-cp [1, 3]", cut["reduction"])
        self.assertIn("adam, by range, state exp_avg exp_avg_sq, max_lr ", cut["update"])
        [rank] = json.loads(self.plan(TINY, "--world-size", 4, "--rank", 2, "--json"))["ranks"]
        self.assertEqual(rank["rank"], 2)
        text = self.plan(TINY, "--world-size", 2)
        self.assertIn("gradient: 1 x ranks [0, 1], divided by the tokens of ranks [0, 1]", text)
        self.assertIn("held by ranks [0, 1], counted in the norm by [0, 1]", text)

    def test_what_is_refused(self):
        self.assert_failed(run(LOCKSTEP, "plan", "audit", TINY, "--world-size", 2, "--rank", 7), 2,
                           "--rank: found 7, allowed: 0 to 1")
        self.assert_failed(run(LOCKSTEP, "plan", "audit", TINY, "--world-size", 3,
                               *settings(TENSOR)), 2, "allowed: a divisor of the number of ranks (3)")

    def losses(self, ranks, fields, output, *more):
        result = launch(ranks, LOCKSTEP, "train", self.config, *settings(SHORT + fields), *more,
                        "--output", output)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        steps = [(line["lm_loss"], line["grad_norm"]) for line in metrics(output)[0]]
        return steps, result.stderr.decode()

    def test_a_run_measures_what_is_worked_out_and_trains_as_without(self):
        for ranks, fields in ((1, []), (4, TENSOR), (2, SHARDED), (2, WHOLLY_SHARDED),
                              (4, PIPELINE), (2, EXPERTS)):
            with self.subTest(fields):
                name = f"{ranks} ranks {' '.join(fields)}"
                without, _ = self.losses(ranks, fields, self.folder / (name + " without"))
                audited, told = self.losses(ranks, fields, self.folder / name, "--audit")
                self.assertEqual(audited, without)
                self.assertIn("audit: equal: `embedding.word_embeddings.weight` on ", told)
                self.assertRegex(told, r"audit: \d+ parameters on \d ranks?, all as worked out")
                planned = self.plan(self.config, "--world-size", ranks, *settings(SHORT + fields),
                                    "--json")
                measured = (self.folder / name / "audit.json").read_text()
                self.assertEqual(json.loads(planned), json.loads(measured))


if __name__ == "__main__":
    unittest.main()
