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
                                      "last", "terms", "token_ranks", "counted", "update", "tie",
                                      "copies", "replicas", "effect", "problem"])
        self.assertEqual(norm["terms"], [{"numerator": 1, "denominator": 1, "ranks": [0, 1, 2, 3]}])
        self.assertEqual(norm["token_ranks"], [1, 3])
        self.assertFalse(norm["counted"])
        cut = params["decoder.layers.0.self_attention.linear_qkv.weight"]
        self.assertEqual(cut["terms"], [{"numerator": 1, "denominator": 1, "ranks": [1, 3]}])
        self.assertTrue(cut["counted"])
        self.assertIn("all-reduce sum over dp-cp [1, 3]", cut["reduction"])
        self.assertIn("adam, by range, state exp_avg exp_avg_sq, max_lr ", cut["update"])
        self.assertEqual(norm["effect"], "every term x 1, divided by all tokens")
        self.assertEqual((norm["copies"], norm["replicas"]), (2, 2))
        self.assertIn("gradients x 1 / loss scale, norm at most ", norm["update"])
        [rank] = json.loads(self.plan(TINY, "--world-size", 4, "--rank", 2, "--json"))["ranks"]
        self.assertEqual(rank["rank"], 2)
        self.assertEqual(list(rank), ["rank", "norm_elements", "zero_elements", "parameters"])
        self.assertEqual({of["norm_elements"] for of in answer["ranks"]}, {rank["norm_elements"]})
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
                              (4, PIPELINE), (2, EXPERTS), (4, [*EXPERTS, *WHOLLY_SHARDED])):
            with self.subTest(fields):
                name = f"{ranks} ranks {' '.join(fields)}"
                without, _ = self.losses(ranks, fields, self.folder / (name + " without"))
                audited, told = self.losses(ranks, fields, self.folder / name, "--audit")
                self.assertEqual(audited, without)
                self.assertIn("audit: equal: `embedding.word_embeddings.weight` on ", told)
                self.assertRegex(told, r"audit: \d+ parameters on \d ranks?, all as expected")
                planned = self.plan(self.config, "--world-size", ranks, *settings(SHORT + fields),
                                    "--json")
                measured = (self.folder / name / "audit.json").read_text()
                self.assertEqual(json.loads(planned), json.loads(measured))
                answer = self.diff(0, self.folder / name, self.config, "--world-size-b", 1,
                                   *settings(SHORT + self.same_model(fields)))
                self.assertEqual(answer["differences"], [])
                self.assertGreater(answer["parameters"], 5)

    @staticmethod
    def same_model(fields):
        return [field for field in fields if field.startswith("model.")]

    def diff(self, status, *arguments):
        result = run(LOCKSTEP, "audit", "diff", *arguments, "--json")
        self.assertEqual(result.returncode, status, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        answer = json.loads(result.stdout)
        self.assertEqual(list(answer), ["equivalent", "parameters", "differences", "layouts"])
        self.assertEqual(answer["equivalent"], status == 0)
        return answer

    def test_layouts_of_one_model_are_equivalent(self):
        context = ["parallel.context_parallel_size=2"]
        layouts = [(2, []), (4, TENSOR), (4, SHARDED), (4, WHOLLY_SHARDED), (4, context),
                   (4, PIPELINE), (8, TENSOR + PIPELINE + context)]
        for model in ([], EXPERTS[:1]):
            for ranks, fields in layouts + ([(4, EXPERTS)] if model else []):
                with self.subTest(model=model, fields=fields):
                    whole = [*PIPELINE[1:], *model]
                    answer = self.diff(0, TINY, TINY, "--world-size-a", 1, "--world-size-b", ranks,
                                       *settings(whole), *[part for field in fields
                                                           for part in ("--set-b", field)])
                    self.assertGreater(answer["parameters"], 10)
                    self.assertGreater(len(answer["layouts"]), 0)

    def test_what_differs_is_found_and_named(self):
        plan = self.folder / "plan.json"
        plan.write_text(self.plan(TINY, "--world-size", 2, "--json"))
        report = json.loads(plan.read_text())
        for rank in report["ranks"]:
            [param] = [param for param in rank["parameters"]
                       if param["name"] == "decoder.final_layernorm.weight"]
            param["terms"][0]["numerator"] = 2
            param["effect"] = "every term x 2, divided by all tokens"
        changed = self.folder / "changed.json"
        changed.write_text(json.dumps(report))
        [found] = self.diff(1, plan, changed)["differences"]
        self.assertEqual(found, {"parameter": "decoder.final_layernorm.weight", "field": "gradient",
                                 "a": "every term x 1, divided by all tokens",
                                 "b": "every term x 2, divided by all tokens"})
        result = run(LOCKSTEP, "audit", "diff", plan, changed)
        self.assertEqual((result.returncode, result.stderr), (1, b""))
        self.assertIn("decoder.final_layernorm.weight: gradient\n"
                      "  A: every term x 1, divided by all tokens\n"
                      "  B: every term x 2, divided by all tokens\n", result.stdout.decode())
        self.assertIn("not equivalent: 1 difference\n", result.stdout.decode())
        fields = {found["field"] for found in self.diff(
            1, TINY, plan, "--set-a", "ddp.calculate_per_token_loss=false")["differences"]}
        self.assertEqual(fields, {"scaling", "gradient"})
        fields = {found["field"] for found in self.diff(
            1, TINY, TINY, "--set-b", "optimizer.clip_grad=0")["differences"]}
        self.assertEqual(fields, {"update"})
        result = run(LOCKSTEP, "audit", "diff", plan, plan)
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        self.assertRegex(result.stdout.decode(), r"^\d+ parameters, equivalent\n$")

    def test_reports_that_cannot_be_read(self):
        plan = self.folder / "plan.json"
        plan.write_text(self.plan(TINY, "--world-size", 2, "--rank", 1, "--json"))
        broken = self.folder / "broken.json"
        broken.write_text(plan.read_text().replace('"counted":true', '"counted":7', 1))
        self.assert_failed(run(LOCKSTEP, "audit", "diff", plan, plan), 1,
                           f"{plan}: found 1 rank of 2, allowed: all")
        self.assert_failed(run(LOCKSTEP, "audit", "diff", plan, broken), 1,
                           f"{broken}: no audit: ranks[0].parameters[", "].counted: found 7, allowed: "
                           "true, false")
        self.assert_failed(run(LOCKSTEP, "audit", "diff", plan, self.folder), 1, "audit.json")
        self.assert_failed(run(LOCKSTEP, "audit", "diff", plan, plan, "--world-size", 2), 2,
                           "--set, --world-size: found beside two reports")
        self.assert_failed(run(LOCKSTEP, "audit", "diff", plan, TINY, "--set-a", "optimizer.lr=1"), 2,
                           "A '", "is a report")
        self.assert_failed(run(LOCKSTEP, "audit", "diff", TINY, TINY, "--set-b", "nonsense=1"), 2,
                           "B '", "nonsense")
        self.assert_failed(run(LOCKSTEP, "audit", "diff", TINY, "nowhere"), 2,
                           "lockstep: B 'nowhere': cannot be read as a configuration: No such file")
        for name, text, reason in (
                ("metrics.jsonl", '{"iteration":1}\n{"iteration":2}\n',
                 "document: found one on each line, allowed: one in the file"),
                ("lines.json", '{"iteration":1}\n{"iteration":2}\n', "document: found one on each"),
                ("metrics.jsonl", '{"iteration":1}\n', "world_size: missing"),
                ("list", " \n[1]\n", "document: found")):
            lines = self.folder / name
            lines.write_text(text)
            self.assert_failed(run(LOCKSTEP, "audit", "diff", TINY, lines), 1,
                               f"lockstep: {lines}: no audit: {reason}")
        self.assert_failed(run(LOCKSTEP, "audit", "diff", plan), 2, "B")


if __name__ == "__main__":
    unittest.main()
