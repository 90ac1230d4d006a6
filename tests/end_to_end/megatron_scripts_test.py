"""`lockstep megatron-flags --file` on shell scripts and on files of flags, and what it says about
tokens that Megatron-LM adds to documents."""

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

    def test_commands_in_a_text_are_read_like_the_script(self):
        for command in ('srun -l --container-image "a/b" sh -c "${COMMAND}"',
                        'docker exec -it box /bin/bash -lc "cd /there && $COMMAND"',
                        "eval $COMMAND", 'eval "$COMMAND"', "eval $COMMAND &> log.txt",
                        'eval "$COMMAND 2>&1 | tee --append log"',
                        'eval eval "$COMMAND"'):
            with self.subTest(command):
                values, _ = self.script(f"""
OPTIONS=" \\
    --num-layers 12 --split '99, 1, 0' --bf16"
COMMAND="python -u $HERE/pretrain_gpt.py ${{OPTIONS}} --seq-length 64"
{command}
""")
                self.assertEqual(values["model.num_layers"], "12")
                self.assertEqual(values["data.split"], '"99, 1, 0"')
                self.assertEqual(values["train.precision"], '"bf16"')
                self.assertEqual(values["model.seq_length"], "64")
        self.assertEqual(self.script("A='eval $A'\n--num-layers 3\neval $A")[0]["model.num_layers"],
                         "3")

    def test_files_of_flags_alone(self):
        self.assertEqual(self.script("--num-layers 3 \\\n --bf16\n")[0]["model.num_layers"], "3")
        self.assertEqual(self.script("A=(--num-layers 3)\nA=(--bf16)\n")[0]["model.num_layers"], "3")
        self.assert_failed(run(LOCKSTEP, "megatron-flags", "--file", self.folder / "none"), 1,
                           "none")

    def test_expanded_text_has_no_operators_and_no_comments(self):
        freq = "([0]*1+[1]*3)"
        for assignment, used in ((f'ARGS="--moe-layer-freq {freq}"', "$ARGS"),
                                 (f'FREQ="{freq}"', "--moe-layer-freq $FREQ"),
                                 (f'ARGS=("--moe-layer-freq {freq}")', "${ARGS[@]}"),
                                 ("", f"--moe-layer-freq ${{FREQ:-{freq}}}")):
            with self.subTest(used):
                values, _ = self.script(f"{assignment}\ntorchrun pretrain_gpt.py --num-layers 4 "
                                        f"--num-experts 4 {used} --save x > log; echo --bf16\n")
                self.assertEqual(values["model.moe_layer_freq"], "[0, 1, 1, 1]")
                self.assertEqual(values["checkpoint.save"], '"x"')
                self.assertNotIn("train.precision", values)
        values, _ = self.script('ARGS="--save #1;<a>&|(b) --num-layers 3"\n'
                                "torchrun pretrain_gpt.py $ARGS # --num-layers 5\n")
        self.assertEqual(values["checkpoint.save"], '"#1;<a>&|(b)"')
        self.assertEqual(values["model.num_layers"], "3")

    def test_flags_after_the_dashes_are_taken_as_they_are(self):
        path = self.folder / "flags"
        path.write_text("--num-layers 3 --num-experts 4\n")
        for freq in ("[0,1,1,1]", "[0]*1+[1]*3", "([0]*1+[1]*3)"):
            with self.subTest(freq):
                result = run(LOCKSTEP, "megatron-flags", "--file", path, "--", "--num-layers", 4,
                             "--save", "[a,b]", "--moe-layer-freq", freq)
                self.assertEqual(result.returncode, 0, result.stderr.decode())
                found = parsed(result.stdout.decode())
                self.assertEqual(found["model"]["num_layers"], "4")
                self.assertEqual(found["model"]["moe_layer_freq"], "[0, 1, 1, 1]")
                self.assertEqual(found["checkpoint"]["save"], '"[a,b]"')
        self.assert_failed(run(LOCKSTEP, "megatron-flags", "--num-layers", 4), 2,
                           "not expected: --num-layers")

    def test_tokens_that_megatron_adds_to_documents_are_told(self):
        added = ("--tokenizer-type: Megatron-LM, except 0.15 to 0.16.1, adds the tokens of the "
                 "tokenizer's post_processor to each document, such as one for its beginning; "
                 "`lockstep data build` does not\n")
        first = ("--tokenizer-type: Megatron-LM up to 0.14, and up to 0.16.1 with "
                 "--legacy-tokenizer, puts the tokenizer's beginning-of-text token before each "
                 "document; `lockstep data build` does not\n")
        without = "--tokenizer-hf-no-include-special-tokens"
        for flags, expected in (
                ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model m", {added}),
                (f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model m {without}", set()),
                ("--tokenizer-type Llama2Tokenizer --tokenizer-model m", {first}),
                ("--tokenizer-type SentencePieceTokenizer --tokenizer-model m", set()),
                ("--tokenizer-type GPT2BPETokenizer", set())):
            with self.subTest(flags):
                notes = self.script(flags + "\n")[1]
                self.assertEqual({note for note in (added, first) if note in notes}, expected)
                self.assertEqual("`lockstep data build` does not" in notes, bool(expected))
                self.assertEqual(f"{without}: not needed: no tokens are added" in notes,
                                 without in flags)

    def test_unknown_flags_are_named_together_and_the_rest_is_printed(self):
        known = ["--bf16", "--qk-l2-norm"]
        result = run(LOCKSTEP, "megatron-flags", "--", "--frobnicate", "1", "2",
                     "--num-layer", "24", *known, "--frobnicate", "--zzzz")
        self.assert_failed(result, 2, "unknown flags '--frobnicate', '--num-layer', '--zzzz'; did "
                           "you mean '--num-layers'? (the configuration is printed anyway")
        self.assertIn("--qk-l2-norm: not there: ", result.stderr.decode())
        without = run(LOCKSTEP, "megatron-flags", "--", *known)
        self.assertEqual(without.returncode, 0, without.stderr.decode())
        self.assertEqual(result.stdout, without.stdout)


if __name__ == "__main__":
    unittest.main()
