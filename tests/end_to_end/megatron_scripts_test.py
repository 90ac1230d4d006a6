"""`lockstep megatron-flags --file` on shell scripts and on files of flags."""

import unittest

from megatron_flags_test import parsed
from support import LOCKSTEP, EndToEnd, run


class MegatronScripts(EndToEnd):
    def script(self, text):
        path = self.folder / "a script.sh"
        path.write_text(text)
        result = run(LOCKSTEP, "megatron-flags", "--file", path)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        values = {f"{g}.{n}": v for g, values in parsed(result.stdout.decode()).items()
                  for n, v in values.items()}
        return values, result.stderr.decode()

    def test_a_script_is_read_and_not_run(self):
        values, notes = self.script("""#!/bin/bash
# --num-layers 99
export CUDA_DEVICE_MAX_CONNECTIONS=1
LAYERS=12   # of the model
TP=${TP:-2}
touch ran-here
DATA_PATH=$1
DISTRIBUTED_ARGS=(--nproc_per_node 8)
MODEL_ARGS=(
    --num-layers $LAYERS  # a comment
    --hidden-size 96 --num-attention-heads 4
    --seq-length 64
    # --micro-batch-size 7
)
MODEL_ARGS+=("--swiglu" "--split '99,1,0'")
TRAINING="--lr 1e-3 \\
    --train-iters 10"
if [ -f "pretrain_gpt.py" ]; then echo "pretrain_gpt.py is there"; fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} "${NOT_SET[@]}" \\
    $TRAINING --micro-batch-size 2 \\
    --save "${DATA_PATH}/a b" --tensor-model-parallel-size ${TP} 2>&1 | tee log
""")
        self.assertEqual(values["model.num_layers"], "12")
        self.assertEqual(values["model.activation"], '"swiglu"')
        self.assertEqual(values["data.split"], '"99,1,0"')
        self.assertEqual(values["optimizer.lr"], "0.001")
        self.assertEqual(values["train.train_iters"], "10")
        self.assertEqual(values["train.micro_batch_size"], "2")
        self.assertEqual(values["parallel.tensor_model_parallel_size"], "2")
        self.assertEqual(values["checkpoint.save"], '"$1/a b"')
        self.assertIn("its conditions are not evaluated", notes)
        self.assertIn("does not set what stands in '$1/a b'", notes)

    def test_files_of_flags_alone(self):
        self.assertEqual(self.script("--num-layers 3 \\\n --bf16\n")[0]["model.num_layers"], "3")
        self.assertEqual(self.script("A=(--num-layers 3)\nA=(--bf16)\n")[0]["model.num_layers"], "3")
        self.assert_failed(run(LOCKSTEP, "megatron-flags", "--file", self.folder / "none"), 1,
                           "none")


if __name__ == "__main__":
    unittest.main()
