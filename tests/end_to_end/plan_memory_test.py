"""lockstep plan memory: the contract, sums, sizes of other layouts, what is refused."""

import json
import time
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, run

TINY = SOURCE / "configs/tiny.textproto"
PARTS = ["parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes",
         "communication_bytes"]
KEYS = ["stage", "parameters", *PARTS, "total_bytes"]


def plan(*arguments):
    return run(LOCKSTEP, "plan", "memory", *arguments)


def overrides(fields):
    return [part for path, value in fields.items() for part in ("--set", f"{path}={value}")]


class PlanMemory(EndToEnd):
    def memory(self, fields=None, *arguments):
        result = plan(TINY, *overrides(fields or {}), *arguments, "--json")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        return json.loads(result.stdout)

    def test_the_contract(self):
        answer = self.memory()
        self.assertEqual(list(answer), ["world_size", "stages"])
        self.assertEqual(answer["world_size"], 1)
        [stage] = answer["stages"]
        self.assertEqual(list(stage), KEYS)
        self.assertEqual(stage["stage"], 0)
        # The table is 256 x 128. A layer has qkv, projection, gate and up, down, two norms.
        layer = 256 * 128 + 128 * 128 + 672 * 128 + 336 * 128 + 2 * 128
        self.assertEqual(stage["parameters"], 256 * 128 + 4 * layer + 128)
        self.assertEqual(stage["parameter_bytes"], 4 * stage["parameters"])
        self.assertEqual(stage["gradient_bytes"], 4 * stage["parameters"])
        self.assertEqual(stage["optimizer_bytes"], 8 * stage["parameters"])
        self.assertEqual(stage["total_bytes"], sum(stage[part] for part in PARTS))
        # Padding rows of the vocabulary take memory like the others.
        [padded] = self.memory({"model.vocab_size": 257,
                                "model.make_vocab_size_divisible_by": 128})["stages"]
        self.assertEqual(padded["parameters"], stage["parameters"] + 128 * 128)
        self.assertEqual(padded["parameter_bytes"], 4 * padded["parameters"])

    def test_the_distributed_optimizer(self):
        fields = {"ddp.use_distributed_optimizer": "true", "train.precision": "bf16",
                  "train.global_batch_size": 64}
        for ranks in (1, 2, 4):
            [stage] = self.memory(fields, "--world-size", ranks)["stages"]
            padded = stage["parameter_bytes"] // 2
            self.assertEqual(stage["gradient_bytes"], 4 * padded)
            self.assertEqual(stage["optimizer_bytes"], 12 * padded // ranks)

    def test_stages(self):
        fields = {"parallel.pipeline_model_parallel_size": 4,
                  "parallel.tensor_model_parallel_size": 2}
        answer = self.memory(fields)
        self.assertEqual(answer["world_size"], 8)
        self.assertEqual([s["stage"] for s in answer["stages"]], [0, 1, 2, 3])
        whole = self.memory({"parallel.tensor_model_parallel_size": 2})["stages"][0]
        self.assertEqual(sum(s["parameters"] for s in answer["stages"]),
                         whole["parameters"] + 256 * 128 // 2)  # the tied table twice
        self.assertGreater(self.memory(fields | {"train.global_batch_size": 64})["stages"][0]
                           ["activation_bytes"], answer["stages"][0]["activation_bytes"])
        half = self.memory({"parallel.context_parallel_size": 2})["stages"][0]
        self.assertLess(half["activation_bytes"], whole["activation_bytes"])

    def test_a_large_model_is_planned_at_once(self):
        fields = {"model.num_layers": 126, "model.hidden_size": 16384,
                  "model.num_attention_heads": 128, "model.num_query_groups": 8,
                  "model.ffn_hidden_size": 53248, "model.seq_length": 8192,
                  "model.vocab_size": 128256, "model.untie_embeddings_and_output_weights": "true",
                  "train.precision": "bf16", "train.micro_batch_size": 1,
                  "train.global_batch_size": 2048, "parallel.tensor_model_parallel_size": 8,
                  "parallel.pipeline_model_parallel_size": 14,
                  "ddp.use_distributed_optimizer": "true"}
        begin = time.monotonic()
        answer = self.memory(fields, "--world-size", 112 * 128)
        self.assertLess(time.monotonic() - begin, 1)
        norms = 253 * 16384
        self.assertEqual(sum(s["parameters"] for s in answer["stages"]) * 8 - norms * 7,
                         405_853_388_800)  # Llama 3.1 405B

    def test_text_form(self):
        lines = plan(TINY).stdout.decode().splitlines()
        self.assertEqual(lines[0], "world size 1; one rank of each pipeline stage, MiB")
        self.assertEqual(len(lines), 3)
        stage = self.memory()["stages"][0]
        self.assertEqual(lines[2].split(), ["0", str(stage["parameters"]),
                                            *(f"{stage[k] / 2**20:.2f}" for k in KEYS[2:])])

    def test_unusable_arguments_exit_2_and_are_named(self):
        cases = [
            ((), "CONFIG is required"),
            ((self.folder / "none",), "none"),
            ((TINY, "--set", "model.layers=3"), "model.layers"),
            ((TINY, "--set", "model.num_layers=0"), "model.num_layers"),
            ((TINY, "--world-size", 0), "world-size: found 0, allowed: >= 1"),
            ((TINY, "--world-size", "x"), "--world-size: found 'x'"),
            ((TINY, "--world-size", 3), "train.global_batch_size: found 16"),
            ((TINY, "--set", "parallel.tensor_model_parallel_size=3", "--world-size", 3),
             "model.num_attention_heads (4)"),
            ((TINY, "--set", "parallel.pipeline_model_parallel_size=3"), "model.num_layers (4)"),
            ((TINY, "--set", "parallel.tensor_model_parallel_size=2", "--world-size", 3),
             "parallel.tensor_model_parallel_size (2) x "),
            ((TINY, "--set", "parallel.order=tp-dp-dp"), "parallel.order = tp-dp-dp"),
            ((TINY, "--set", "model.hidden_size=4611686018427387904"), "64 bits"),
            ((TINY, "--rank", 1), "--rank"),
        ]
        for arguments, part in cases:
            with self.subTest(part):
                result = plan(*arguments)
                self.assert_failed(result, 2, part)
                self.assertEqual(result.stdout, b"")

    def test_help_names_every_key(self):
        text = plan("--help").stdout.decode()
        for key in ("CONFIG", "--set", "--world-size", "--json", "world_size", "stages", *KEYS):
            self.assertIn(key, text)
        self.assertIn("including rows that pad the vocabulary, without the padding of buffers",
                      " ".join(text.split()))


if __name__ == "__main__":
    unittest.main()
