"""The recipes of configs/ for published models: they have as many parameters as published, and a
rank fits in a GPU of 80 GB."""

import json
import unittest

from support import LOCKSTEP, EndToEnd, run

# Hugging Face's count of the published parameters, and the number of GPUs of the recipe.
PUBLISHED = {
    "gpt2_124m": (124_439_808, 8),
    "gpt2_355m": (354_823_168, 8),
    "gpt2_774m": (774_030_080, 8),
    "gpt2_1558m": (1_557_611_200, 8),
    "llama3_8b": (8_030_261_248, 8),
    "llama3_70b": (70_553_706_496, 64),
    "qwen3_8b": (8_190_735_360, 8),
    "qwen3_30b_a3b": (30_532_122_624, 32),
    "mixtral_8x7b": (46_702_792_704, 64),
    "deepseek_v3": (671_026_404_352, 1024),
}
ONE_PROCESS = ("model.make_vocab_size_divisible_by=1", "parallel.tensor_model_parallel_size=1",
               "parallel.sequence_parallel=false", "parallel.pipeline_model_parallel_size=1",
               "parallel.expert_model_parallel_size=1", "parallel.expert_tensor_parallel_size=1")
UNEVEN = {"deepseek_v3": ("--set", "parallel.num_layers_in_last_pipeline_stage=61")}


class Recipes(EndToEnd):
    def stages(self, name, *arguments):
        result = run(LOCKSTEP, "plan", "memory", name, "--json", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return json.loads(result.stdout)["stages"]

    def test_they_have_as_many_parameters_as_published(self):
        one = [word for field in ONE_PROCESS for word in ("--set", field)]
        for name, (parameters, _) in PUBLISHED.items():
            [stage] = self.stages(name, *one, *UNEVEN.get(name, ()))
            self.assertEqual(stage["parameters"], parameters, name)

    def test_a_rank_fits_on_its_gpu(self):
        for name, (_, gpus) in PUBLISHED.items():
            for stage in self.stages(name, "--world-size", gpus):
                self.assertLess(stage["total_bytes"], 76e9, f"{name} stage {stage['stage']}")


if __name__ == "__main__":
    unittest.main()
