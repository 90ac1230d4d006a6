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
        self.assertIn("does not set the array of '${NOT_SET[@]}', which adds nothing", notes)
        self.assertNotIn("left out", notes)

    def words(self, script):
        """What the script passes as --data-path."""
        return self.script(script)[0].get("data.path", [])

    def test_operators_of_expansions(self):
        for assignment, word, expected in (
                ("CACHE=/c", "${CACHE:+--data-cache-path $CACHE}", "/c"),
                ("CACHE=/c", "${CACHE:+--data-cache-path ${CACHE}}", "/c"),
                ("CACHE=/c", "${CACHE+--data-cache-path ${CACHE:-/d}}", "/c"),
                ("CACHE='/c d'", "${CACHE:+--data-cache-path \"${CACHE}\"}", "/c d"),
                ("CACHE=", "${CACHE:+--data-cache-path $CACHE}", None),
                ("CACHE=", "${CACHE+--data-cache-path /e}", "/e"),
                ("", "${CACHE:+--data-cache-path $CACHE}", None),
                ("", "${CACHE+--data-cache-path $CACHE}", None),
                ("", "--data-cache-path ${CACHE:-${HOME:-/h}}", "/h"),
                ("CACHE=", "--data-cache-path ${CACHE:-/h}", "/h"),
                ("", '--data-cache-path "${CACHE-/h i}"', "/h i"),
                (': "${CACHE:=/h}"', "--data-cache-path $CACHE", "/h"),
                ("CACHE=/c", "--data-cache-path ${CACHE:?must be set}", "/c"),
                ("CACHE=(--data-cache-path '/a b')", "\"${CACHE[@]+\"${CACHE[@]}\"}\"", "/a b"),
                ("", "\"${CACHE[@]+\"${CACHE[@]}\"}\"", None)):
            with self.subTest(assignment=assignment, word=word):
                values, notes = self.script(f"{assignment}\ntorchrun pretrain_gpt.py --bf16 "
                                            f"--data-path /d {word} --num-layers 2\n")
                self.assertEqual(values["data.path"], ['"/d"'])
                self.assertEqual(values.get("data.cache_path"), expected and f'"{expected}"')
                self.assertEqual(values["train.precision"], '"bf16"')
                self.assertNotIn("does not set", notes)
        # Assigned, it is a text; other operators stay as they are written.
        values, notes = self.script("C=/c\nA=${C:+--data-cache-path $C}\nB=${D:-4}\n"
                                    "torchrun pretrain_gpt.py $A --num-layers $B --save ${C%c}\n")
        self.assertEqual((values["data.cache_path"], values["model.num_layers"],
                          values["checkpoint.save"]), ('"/c"', "4", '"${C%c}"'))
        self.assertIn("does not set what stands in '${C%c}'", notes)

    def test_expansions_in_expansions_end(self):
        for deep in ("${A:-" * 100000, "${A:-" * 1000 + "3" + "}" * 1000,
                     "${A:=" * 1000 + "3" + "}" * 1000, '"${A:-' * 1000):
            path = self.folder / "deep"
            path.write_text(f"torchrun pretrain_gpt.py --num-layers 3 --save {deep}")
            result = run(LOCKSTEP, "megatron-flags", "--file", path, timeout=10)
            self.assertEqual(result.returncode, 0, result.stderr[:200])

    def test_a_script_is_read_without_arguments(self):
        for word in ('"$@"', "$@", "$*", '"${@}"', "${*:2}", "${@:+--bf16}"):
            with self.subTest(word):
                values, notes = self.script("torchrun pretrain_gpt.py --num-layers 3 --data-path a "
                                            f"b {word} --save x\n")
                self.assertEqual(values["data.path"], ['"a"', '"b"'])
                self.assertNotIn("train.precision", values)
                self.assertNotIn("does not set", notes)

    def test_elements_of_arrays(self):
        arrays = "I=1\nTPS=(2 4 'x y')\nDIRS=('/a b' \"/c d\")\nONE=/e\n"
        for word, expected in (("${TPS[0]}", ["2"]), ("$TPS", ["2"]), ("${TPS}", ["2"]),
                               ('"${DIRS[1]}"', ["/c d"]), ('"$DIRS"', ["/a b"]),
                               ("/x/${TPS[1]}/y", ["/x/4/y"]), ("${TPS[$I]}", ["4"]),
                               ("${TPS[-2]}", ["4"]), ("${TPS[7]:-none}", ["none"]),
                               ("${TPS[2]}", ["x", "y"]), ('"${DIRS[@]}"', ["/a b", "/c d"]),
                               ('"p${TPS[@]}q"', ["p2", "4", "x yq"]), ("${ONE[0]}", ["/e"]),
                               ('"${ONE[@]}"', ["/e"]), ("${TPS[7]} z", ["z"])):
            with self.subTest(word):
                found = self.words(f"{arrays}torchrun pretrain_gpt.py --num-layers 4 --data-path "
                                   f"{word} --bf16\n")
                self.assertEqual(found, [f'"{path}"' for path in expected])

    def test_assignments_after_declare_and_its_like(self):
        for declared in ("declare -a", "local -a", "readonly -a", "typeset", "typeset -r -a",
                         "export", "declare", "if true; then declare -a X"):
            with self.subTest(declared):
                values, notes = self.script(f"{declared} ARGS=( --num-layers 3 --bf16 )\n"
                                            "torchrun pretrain_gpt.py --save x \"${ARGS[@]}\"\n")
                self.assertEqual(values["model.num_layers"], "3")
                self.assertEqual(values["train.precision"], '"bf16"')
                self.assertNotIn("does not set", notes)
        values, _ = self.script("export -n A=3 B=x\ntorchrun pretrain_gpt.py --num-layers $A "
                                "--save $B\n")
        self.assertEqual((values["model.num_layers"], values["checkpoint.save"]), ("3", '"x"'))

    def test_the_command_with_the_most_known_flags_counts(self):
        training = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --bf16"
        told = ("several commands start a program with flags; those of 'pretrain_gpt.py' count, "
                "which has the most known ones; left out: '{}'\n")
        for script, left_out in (
                (f"{training}\npython tools/eval.py --ckpt out\n", "tools/eval.py"),
                (f"python a.py --input=x --save\n{training}\npython b.py --load y\n",
                 "a.py', 'b.py"),
                (f"{training}\nexec python b.py --load y --save=y\n", "b.py"),
                (f"eval '{training}'\nbash -c 'python b.py --load y'\n", "b.py"),
                (f"bash -c 'python b.py --load y'\neval '{training}'\n", "b.py")):
            with self.subTest(script):
                values, notes = self.script(script)
                self.assertEqual(values["model.num_layers"], "4")
                self.assertEqual(values["train.precision"], '"bf16"')
                self.assertNotIn("checkpoint.load", values)
                self.assertIn(told.format(left_out), notes)
        for script in (f"{training}\npython tools/convert.py model\n",
                       f"CMD='{training}'\necho $CMD\n$CMD\n"):
            values, notes = self.script(script)
            self.assertEqual(values["model.num_layers"], "4")
            self.assertNotIn("left out", notes)

    def test_conditions_are_noted(self):
        note = ("its conditions are not evaluated: all assignments are made, in their order, and "
                "of several of one variable the last counts\n")
        end = '\ntorchrun pretrain_gpt.py --num-layers 4 $A\n'
        for condition in ('[[ $FP8 == 1 ]] && A="$A --bf16"', 'test -d x && A=--bf16',
                          "[ -d x ] || A=--bf16", "! test -d x && A=--bf16",
                          "if false; then A=--fp16; else A=--bf16; fi",
                          'for x in y; do [ -d x ] && A="--bf16"; done'):
            with self.subTest(condition):
                values, notes = self.script("A=\n" + condition + end)
                self.assertIn(note, notes)
                self.assertEqual(values["train.precision"], '"bf16"')
        self.assertNotIn("conditions", self.script("A=--bf16  # [ test" + end)[1])

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
