"""`lockstep megatron-flags` on published command lines of Megatron-LM, checked by hand."""

import re
import shlex
import unittest

from support import LOCKSTEP, EndToEnd, run

# The flags of examples/gpt3/train_gpt3_175b_distributed.sh of Megatron-LM at d98e8a6.
GPT3 = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
--max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1
--global-batch-size 1536
--step-batch-size-schedule "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
--lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8
--pipeline-model-parallel-size 16 --data-path my/text --vocab-file gpt2/vocab.json
--merge-file gpt2/merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000
--eval-interval 1000 --save out --load out --eval-iters 10 --tensorboard-dir logs
"""
# fp16 without --accumulate-allreduce-grads-in-fp32 reduces in fp16. The warm-up is .001 of 430000.
# The schedule's tokens are divided by 2048. pretrain_gpt.py uses GPT-2's tokenizer. The bias is
# fused with GELU, which then uses tanh.
GPT3_TEXT = """\
# Made from Megatron-LM's flags by `lockstep megatron-flags`.
model {
  num_layers: 96
  hidden_size: 12288
  num_attention_heads: 96
  seq_length: 2048
  vocab_size: 50257
  normalization: "LayerNorm"
  position_embedding_type: "learned_absolute"
  activation: "gelu_tanh"
  add_bias_linear: true
  init_method_std: 0.006
  hidden_dropout: 0.1
  attention_dropout: 0.1
  make_vocab_size_divisible_by: 128
}
parallel {
  tensor_model_parallel_size: 8
  pipeline_model_parallel_size: 16
  distributed_timeout_seconds: 600
}
ddp {
  grad_reduce_in_fp32: false
  overlap_grad_reduce: false
  calculate_per_token_loss: false
}
optimizer {
  lr: 6e-05
  min_lr: 6e-06
  weight_decay: 0.1
  adam_beta1: 0.9
  adam_beta2: 0.95
  clip_grad: 1
  lr_decay_style: "cosine"
  lr_warmup_iters: 430
  lr_decay_iters: 430000
}
data {
  path: "my/text"
  tokenizer: "gpt2:gpt2"
  split: "949,50,1"
}
train {
  micro_batch_size: 1
  train_iters: 500000
  eval_interval: 1000
  eval_iters: 10
  precision: "fp16"
  log_interval: 100
  step_batch_size_schedule: "0:16 1171875:320 2343750:624 3515625:928 4687500:1232 5859375:1536"
}
checkpoint {
  save: "out"
  load: "out"
  load_if_present: true
  save_interval: 10000
}
"""
# From examples/llama/train_llama3_8b_h100_fp8.sh, with two overlapping tensor-parallel ranks.
LLAMA = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--normalization RMSNorm --init-method-std 0.0134 --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --weight-decay 0.1 --bf16 --grad-reduce-in-bf16
--calculate-per-token-loss --manual-gc --exit-duration-in-mins 235
--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --tokenizer-type NullTokenizer --vocab-size 128256
--data-path 30 a 70 b --split 99,1,0 --distributed-timeout-minutes 60
--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --tp-comm-overlap
"""
LLAMA_VALUES = {
    "model": {
        "num_layers": "32", "hidden_size": "4096", "num_attention_heads": "32",
        "num_query_groups": "8", "kv_channels": "128", "ffn_hidden_size": "14336",
        "seq_length": "8192", "vocab_size": "128256", "normalization": '"RMSNorm"',
        "position_embedding_type": '"rope"', "rotary_base": "1000000", "rotary_percent": "1",
        "activation": '"swiglu"', "untie_embeddings_and_output_weights": "true",
        "add_bias_linear": "false", "init_method_std": "0.0134", "hidden_dropout": "0",
        "attention_dropout": "0", "make_vocab_size_divisible_by": "128"},
    "parallel": {"tensor_model_parallel_size": "2", "distributed_timeout_seconds": "3600",
                 "sequence_parallel": "true", "tp_comm_overlap": "true"},
    "ddp": {"grad_reduce_in_fp32": "false", "overlap_grad_reduce": "true",
            "calculate_per_token_loss": "true", "use_distributed_optimizer": "true",
            "overlap_param_gather": "true", "check_for_nan_in_grad": "true"},
    # 3906252 / 128 = 30517.6, 1949218748 / 128 = 15228271.47 (rounded to nearest)
    "optimizer": {"lr": "0.00015", "min_lr": "1e-05", "weight_decay": "0.1",
                  "lr_decay_style": '"cosine"', "lr_warmup_iters": "30518",
                  "lr_decay_iters": "15228271", "decoupled_lr": "0.0005",
                  "decoupled_min_lr": "4.5e-05"},
    "data": {"path": ['"a"', '"b"'], "split": '"99,1,0"', "blend": '"30,70"'},
    "train": {"micro_batch_size": "1", "global_batch_size": "128", "train_iters": "15258789",
              "eval_iters": "100", "precision": '"bf16"', "log_interval": "100", "fp8": '"hybrid"',
              "fp8_amax_history_len": "1024", "fp8_amax_compute_algo": '"max"', "fp8_margin": "0"},
}

BASE = """--num-layers 4 --hidden-size 96 --num-attention-heads 4 --seq-length 64
--micro-batch-size 2 --lr 1e-3 --train-iters 10"""


def parsed(text):
    groups, group = {}, None
    for line in text.splitlines():
        if line.endswith(" {"):
            group = groups.setdefault(line[:-2], {})
        elif match := re.match(r"  (\w+): (.*)", line):
            name, value = match.groups()
            if name in ("path", "valid_path", "test_path"):
                group.setdefault(name, []).append(value)
            else:
                assert name not in group, name
                group[name] = value
    return groups


class MegatronFlags(EndToEnd):
    def convert(self, flags, status=0, base=""):
        result = run(LOCKSTEP, "megatron-flags", "--", *shlex.split(base), *shlex.split(flags))
        self.assertEqual(result.returncode, status, result.stderr.decode())
        return result.stdout.decode(), result.stderr.decode()

    def values(self, flags):
        text, notes = self.convert(flags, base=BASE)
        return {f"{group}.{name}": value for group, values in parsed(text).items()
                for name, value in values.items()}, notes

    def test_the_published_gpt3(self):
        text, notes = self.convert(GPT3)
        self.assertEqual(text, GPT3_TEXT)
        self.assertEqual([line.split(":")[0] for line in notes.splitlines()],
                         ["--attention-backend", "--tensorboard-dir", "--global-batch-size",
                          "--step-batch-size-schedule"])
        renamed = self.convert(GPT3.replace("gpt2/vocab.json", "gpt2/gpt2-vocab.json"))[1]
        self.assertIn("--vocab-file: data.tokenizer reads vocab.json and merges.txt, or", renamed)
        self.assertIn("Megatron-LM refuses it together with --step-batch-size-schedule", notes)

    def test_the_published_llama(self):
        text, notes = self.convert(LLAMA)
        self.assertEqual(parsed(text), LLAMA_VALUES)
        self.assertIn("--lr-warmup-samples: rounded: optimizer.lr_warmup_iters is 30518, exactly "
                      "30517.59 iterations", notes)
        for flag in ("--use-mcore-models", "--apply-layernorm-1p", "--manual-gc"):
            self.assertIn(f"{flag}: not needed: ", notes)
        for flag in ("--exit-duration-in-mins", "--tokenizer-type"):
            self.assertIn(f"{flag}: not there: ", notes)

    def test_what_is_made_is_a_configuration(self):
        for flags in (GPT3, LLAMA, BASE):
            path = self.folder / "made.textproto"
            path.write_text(self.convert(flags)[0])
            printed = run(LOCKSTEP, "train", path, "--print-config")
            self.assertEqual(printed.returncode, 0, printed.stderr.decode())

    def test_defaults_of_megatron_are_written_out(self):
        found, notes = self.values("")
        expected = {"model.normalization": '"LayerNorm"', "model.add_bias_linear": "true",
                    "model.position_embedding_type": '"learned_absolute"',
                    "model.activation": '"gelu_tanh"', "model.vocab_size": "50257",
                    "model.hidden_dropout": "0.1", "model.attention_dropout": "0.1",
                    "model.make_vocab_size_divisible_by": "128",
                    "parallel.distributed_timeout_seconds": "600",
                    "ddp.overlap_grad_reduce": "false", "ddp.calculate_per_token_loss": "false",
                    "ddp.check_for_nan_in_grad": "true", "data.split": '"969,30,1"',
                    "train.eval_iters": "100", "train.log_interval": "100"}
        given = {"model.num_layers", "model.hidden_size", "model.num_attention_heads",
                 "model.seq_length", "train.micro_batch_size", "optimizer.lr", "train.train_iters"}
        self.assertEqual({k: v for k, v in found.items() if k not in given}, expected)
        self.assertEqual(notes, "")

    def test_flags_that_make_a_field_together(self):
        cases = [
            ("--swiglu", {"model.activation": '"swiglu"', "model.ffn_hidden_size": "256"}),
            ("--swiglu --ffn-hidden-size 99", {"model.ffn_hidden_size": "99"}),
            ("--no-bias-gelu-fusion", {"model.activation": '"gelu"',
                                       "model.ffn_hidden_size": None}),
            # Without biases Megatron-LM turns the fusion off, and F.gelu is exact.
            ("--disable-bias-linear", {"model.activation": '"gelu"',
                                       "model.add_bias_linear": "false"}),
            ("--disable-bias-linear --swiglu", {"model.activation": '"swiglu"'}),
            ("--fp16 --check-for-large-grads", {"ddp.check_for_large_grads": None}),
            ("--bf16", {"ddp.grad_reduce_in_fp32": "true", "train.precision": '"bf16"',
                        "ddp.check_for_nan_in_grad": "true"}),
            ("--bf16 --no-check-for-nan-in-loss-and-grad", {"ddp.check_for_nan_in_grad": None}),
            ("--fp16", {"ddp.grad_reduce_in_fp32": "false", "ddp.check_for_nan_in_grad": None}),
            ("--fp16 --accumulate-allreduce-grads-in-fp32 --loss-scale 8",
             {"ddp.grad_reduce_in_fp32": "true", "ddp.check_for_nan_in_grad": "true",
              "optimizer.loss_scale": "8"}),
            ("--num-query-groups 2", {"model.num_query_groups": None}),
            ("--group-query-attention", {"model.num_query_groups": "1"}),
            ("--recompute-activations", {"model.recompute_granularity": '"selective"'}),
            ("--sequence-parallel --tp-comm-overlap", {"parallel.tp_comm_overlap": None}),
            ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
             {"parallel.virtual_pipeline_model_parallel_size": "2"}),
            ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
             "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
             {"parallel.virtual_pipeline_model_parallel_size": "2",
              "ddp.align_param_gather": "true"}),
            ("--num-virtual-stages-per-pipeline-rank 1",
             {"parallel.virtual_pipeline_model_parallel_size": None}),
            ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|t|tL'",
             {"parallel.pipeline_model_parallel_layout": '"Et|t|t|tL"',
              "parallel.virtual_pipeline_model_parallel_size": "2"}),
            ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*2|(t|)*2L' "
             "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
             {"parallel.virtual_pipeline_model_parallel_size": "2",
              "ddp.align_param_gather": "true"}),
            ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|ttL'",
             {"parallel.pipeline_model_parallel_layout": '"Ett|ttL"',
              "parallel.virtual_pipeline_model_parallel_size": None}),
            ("--use-tp-pp-dp-mapping", {"parallel.order": '"tp-cp-ep-pp-dp"'}),
            ("--num-experts 4", {"model.moe_token_dispatcher_type": '"allgather"'}),
            ("--num-experts 4 --moe-expert-capacity-factor -1.0",
             {"model.num_experts": "4", "model.moe_expert_capacity_factor": None}),
            ("--num-experts 4 --moe-expert-capacity-factor 1.5",
             {"model.moe_expert_capacity_factor": "1.5"}),
            ("--num-experts 4 --moe-layer-freq ([0]*1+[1]*3)",
             {"model.moe_layer_freq": "[0, 1, 1, 1]"}),
            ("--num-experts 4 --moe-layer-freq ([0,1])*2", {"model.moe_layer_freq": "[0, 1, 0, 1]"}),
            ("--qk-layernorm", {"model.qk_layernorm": "true"}),
            ("--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32.0",
             {"model.rope_scaling_type": '"llama3"', "model.rope_scaling_factor": "32"}),
            ("--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 20 "
             "--qk-head-dim 12 --qk-pos-emb-head-dim 6 --v-head-dim 10 --kv-channels 7 "
             "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 "
             "--position-embedding-type rope --disable-bias-linear",
             {"model.multi_latent_attention": "true", "model.q_lora_rank": "24",
              "model.kv_lora_rank": "20", "model.qk_head_dim": "12", "model.kv_channels": None,
              "model.qk_pos_emb_head_dim": "6", "model.v_head_dim": "10",
              "model.rope_scaling_type": '"yarn"', "model.rope_scaling_factor": "40",
              "model.rope_original_max_position_embeddings": "4096",
              "model.rope_mscale_all_dim": "1"}),
            ("--multi-latent-attention --position-embedding-type rope --disable-bias-linear "
             "--rope-type rope --mscale 2",
             {"model.kv_lora_rank": "32", "model.rope_scaling_type": None,
              "model.rope_mscale": None}),
            ("--window-size 1023,0", {"model.window_size": "1024"}),
            ('--window-size "(127, 0)"', {"model.window_size": "128"}),
            ("--num-experts 4 --moe-layer-freq 2", {"model.moe_layer_freq": "2"}),
            ("--cp-comm-type a2a p2p p2p p2p --attention-dropout 0",
             {"parallel.cp_comm_type_of_layers": '"a2a,p2p,p2p,p2p"'}),
            ("--lr-warmup-fraction 0.2 --lr-decay-iters 5", {"optimizer.lr_warmup_iters": "1"}),
            ("--rampup-batch-size 2 2 100 --global-batch-size 8",
             {"train.rampup_batch_size": '"2 2 100"', "train.global_batch_size": "8"}),
            ("--optimizer muon", {"optimizer.muon_momentum": "0.9"}),
            ("--exp-avg-dtype bf16", {"optimizer.exp_avg_dtype": None}),
            ("--exp-avg-dtype bf16 --use-precision-aware-optimizer",
             {"optimizer.exp_avg_dtype": '"bf16"'}),
            ("--load x --exit-on-missing-checkpoint", {"checkpoint.load": '"x"',
                                                       "checkpoint.load_if_present": None}),
            ("--tokenizer-type Llama2Tokenizer --tokenizer-model m.model --vocab-size 32000",
             {"data.tokenizer": '"sentencepiece:m.model"', "model.vocab_size": "32000"}),
            ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model my/model",
             {"data.tokenizer": '"hf:my/model/tokenizer.json"'}),
            ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model my/t.json",
             {"data.tokenizer": '"hf:my/t.json"'}),
            ("--data-path a b c", {"data.path": ['"a"', '"b"', '"c"'], "data.blend": None}),
            ("--train-data-path 1 a 3 b --valid-data-path 1 c --test-data-path d e",
             {"data.path": ['"a"', '"b"'], "data.blend": '"1,3"', "data.valid_path": ['"c"'],
              "data.test_path": ['"d"', '"e"'], "data.split": None}),
            ("--train-data-path 1 a 3 b --eval-iters 5",
             {"data.split": '"1,0"', "train.eval_iters": "0", "data.blend": '"1,3"'}),
            ("--train-data-path a --split 9,1 --test-data-path b", {"data.split": '"1,0"'}),
            ("--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 "
             "--num-layers-at-end-in-bf16 3",
             {"train.fp8_amax_history_len": None, "train.num_layers_at_end_in_bf16": "3"}),
            ("--mock-data", {"data.mock": "true", "data.split": '"969,30,1"'}),
            ("--test-data-path d", {"data.test_path": None}),
            ("--loss-scale-window 500.0", {"optimizer.loss_scale_window": "500"}),
            ("--seed=7 --seed 8", {"train.seed": "8"}),
            ('--save "a \\"b\\" c"', {"checkpoint.save": '"a \\"b\\" c"'}),
        ]
        for flags, expected in cases:
            with self.subTest(flags):
                found = self.values(flags)[0]
                self.assertEqual({name: found.get(name) for name in expected}, expected)

    def test_what_is_not_there_is_said(self):
        for flags, note in (
                ("--qk-l2-norm", "--qk-l2-norm: not there: "),
                ("--rope-scaling-factor 4", "--rope-scaling-factor: not needed: "),
                ("--check-for-large-grads",
                 "--check-for-large-grads: not there: ddp.check_for_large_grads ends the run"),
                ("--moe-shared-expert-overlap", "--moe-shared-expert-overlap: not needed: "),
                ("--num-experts 4 --moe-token-drop-policy probs",
                 "--moe-token-drop-policy: not needed: experts keep"),
                ("--num-experts 4 --moe-token-drop-policy position",
                 "--moe-token-drop-policy: not there: "),
                ("--enable-ft-package", "--enable-ft-package: not there: train.elastic = dp"),
                ("--ft-timeouts x", "`lockstep launch` has --max-restarts and --spares"),
                ("--log-straggler", "--log-straggler: not needed: train.log_step_times"),
                ("--optimizer-cuda-graph", "--optimizer-cuda-graph: not there: "),
                ("--mid-level-dataset-surplus 0.1", "--mid-level-dataset-surplus: not needed: "),
                ("--fp8-format hybrid --fp8-param-gather", "--fp8-param-gather: not there: "),
                ("--fp8-format hybrid --fp8-recipe mxfp8", "--fp8-recipe: not there: found 'mxfp8'"),
                ("--fp8-margin 2", "--fp8-margin: not needed: without --fp8-format it has no effect"),
                ("--wandb-project x", "--wandb-project: not needed: "),
                ("--position-embedding-type yarn",
                 "--position-embedding-type: not there: found 'yarn', allowed for "
                 "model.position_embedding_type: rope, learned_absolute, none"),
                ("--max-position-embeddings 128",
                 "--max-position-embeddings: not there: the learned position table has "
                 "model.seq_length (64) rows, not 128"),
                ("--data-path a b", "--data-path: without weights the sets are one set of documents"),
                ("--train-data-path a", "--train-data-path: without --valid-data-path all of it"),
                ("--train-data-path a --split 9,1", "--split: left out: Megatron-LM refuses it"),
                ("--valid-data-path a --split 9,1", "--split: left out: Megatron-LM refuses it"),
                ("--tokenizer-type TikTokenizer --eod-mask-loss",
                 "--eod-mask-loss: needs data.tokenizer, which names the id that ends a document"),
                ("--num-experts 4 --moe-expert-capacity-factor -1",
                 "--moe-expert-capacity-factor: left out: below 0 it means no limit"),
                ("--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss",
                 "--moe-router-load-balancing-type: not there: one value")):
            self.assertIn(note, self.values(flags)[1])
        notes = self.convert("--num-layers 24 --hidden-size 1024")[1]
        self.assertIn("--micro-batch-size: not given, and Megatron-LM needs it; "
                      "train.micro_batch_size stays 8, the default here", notes)

    def test_what_cannot_be_read_is_named(self):
        for flags, part in (
                ("--num-layer 24", "unknown flag '--num-layer'; did you mean '--num-layers'?"),
                ("--frobnicate", "unknown flag '--frobnicate'; `lockstep megatron-flags --list`"),
                ("24", "found '24', allowed first: a flag"),
                ("--window-size 4,4", "--window-size: found '4,4', allowed: LEFT,0 with LEFT >= 0"),
                ("--window-size 4", "--window-size: found '4', allowed: LEFT,0 with LEFT >= 0"),
                ("--num-layers many", "--num-layers: found 'many', allowed: a whole number"),
                ("--num-layers 2.5", "--num-layers: found '2.5', allowed: a whole number"),
                ("--lr high", "--lr: found 'high', allowed: a number"),
                ("--num-layers", "--num-layers: found 0 values, allowed: one"),
                ("--num-layers 2 3", "--num-layers: found 2 values, allowed: one"),
                ("--bf16 yes", "--bf16: found the value 'yes', allowed: none"),
                ("--bf16 --fp16", "--bf16 and --fp16: allowed: one of the two"),
                ("--pipeline-model-parallel-layout EL --num-layers-per-virtual-pipeline-stage 1",
                 "--pipeline-model-parallel-layout and --num-layers-per-virtual-pipeline-stage: "
                 "allowed: one of the two"),
                ("--pipeline-model-parallel-layout EL --num-virtual-stages-per-pipeline-rank 1",
                 "--pipeline-model-parallel-layout and --num-virtual-stages-per-pipeline-rank: "
                 "allowed: one of the two"),
                ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|ttL'",
                 "--pipeline-model-parallel-layout: pipeline layout 'Et|t|ttL': found 3 stages, allowed: "
                 "a multiple of pipeline_model_parallel_size (2)"),
                ("--data-path", "--data-path: found no value, allowed: one or more"),
                ("--num-experts 4 --moe-layer-freq [0", "--moe-layer-freq: found '[0', allowed"),
                ("--num-experts 4 --moe-layer-freq [1]*9999999", "--moe-layer-freq: found"),
                ("--step-batch-size-schedule 0:2,1Q:4", "found '1Q', allowed after a number")):
            with self.subTest(flags):
                self.assertIn(part, self.convert(flags, status=2)[1])
        text, error = self.convert("--context-parallel-size 2", status=2, base=BASE)
        self.assertIn("model.attention_dropout: found 0.1", error)
        self.assertIn("context_parallel_size: 2", text)
        self.assertIn("found no flags", self.convert("", status=2)[1])

    def test_the_table_names_fields_that_exist(self):
        listed = run(LOCKSTEP, "megatron-flags", "--list").stdout.decode().splitlines()
        self.assertEqual(listed[:2], ["| Megatron-LM | here | remark |", "|---|---|---|"])
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in listed[2:]]
        self.assertGreater(len(rows), 300)
        paths = set(re.findall(r"^  (\w+\.\w+)$", run(LOCKSTEP, "train", "--help").stdout.decode(),
                               re.MULTILINE))
        flags = [row[0] for row in rows]
        self.assertEqual(len(set(flags)), len(flags))
        for flag, ours, remark in rows:
            self.assertRegex(flag, r"^`--[a-z0-9_-]+\*?`$")
            if ours in ("not there", "not needed"):
                self.assertTrue(remark, flag)
            else:
                self.assertIn(ours.strip("`").split(" = ")[0], paths, flag)


if __name__ == "__main__":
    unittest.main()
