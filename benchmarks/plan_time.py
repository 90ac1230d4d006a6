"""`lockstep plan time` beside published measurements of Megatron-LM on A100 hosts.

    python benchmarks/plan_time.py [--table 1|5] [--rows N]

Nothing here is measured: the published programs are not ours. Theirs write the attention's weights
to memory and drop some of them, ours runs fused attention without dropout; the column "with their
attention" adds to a step what those weights cost on the machine's memory, see attention_ms().
"""

import argparse
import json
import pathlib
import statistics
import subprocess

SOURCE = pathlib.Path(__file__).resolve().parents[1]
LOCKSTEP = SOURCE / "build/lockstep"
MACHINE = SOURCE / "configs/machines/dgx_a100.textproto"
SEQUENCE = 2048
BANDWIDTH = 0.9 * 2039e9  # of that file, for large tensors

# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
# arXiv 2205.05198: tables 3 (layouts) and 5 (seconds of an iteration: full recomputation; sequence
# parallelism and selective recomputation). 8-way tensor parallelism.
TABLE_5 = [  # name, heads, hidden, layers, pipeline, chunks, batch, micro-batch, full, selective
    ("22B", 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49)]

# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM", arXiv 2104.04473, table 1: TFLOP/s of a GPU, full recomputation, which its FLOPs
# count as a second forward.
TABLE_1 = [  # name, heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137), ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142), ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138), ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    ("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163)]


def plan_time(ranks, fields):
    """Milliseconds of a step."""
    common = {"model.seq_length": SEQUENCE, "model.vocab_size": 51200, "model.activation": "gelu",
              "model.normalization": "LayerNorm", "model.add_bias_linear": "true",
              "model.position_embedding_type": "learned_absolute", "train.precision": "bf16",
              "train.device": "cuda", "data.mock": "true", "optimizer.lr": 0.0001}
    overrides = [part for path, value in (common | fields).items()
                 for part in ("--set", f"{path}={value}")]
    result = subprocess.run(
        [LOCKSTEP, "plan", "time", SOURCE / "configs/tiny.textproto", *map(str, overrides),
         "--set", f"model.ffn_hidden_size={4 * fields['model.hidden_size']}",
         "--world-size", str(ranks), "--machine", MACHINE, "--json"],
        capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout)["step_ms"]


def model(heads, hidden, layers, tensor, pipeline):
    return {"model.num_attention_heads": heads, "model.num_query_groups": heads,
            "model.hidden_size": hidden, "model.num_layers": layers,
            "parallel.tensor_model_parallel_size": tensor,
            "parallel.pipeline_model_parallel_size": pipeline}


def attention_ms(heads, tensor, micro, runs):
    """Milliseconds of a layer and micro-batch on a rank: S^2 weights of each head, 2 bytes each, go
    through memory 7 times in forward (products, scaled softmax, dropout with its mask of a byte, and
    read by the second product) and 12 times in backward; `runs` forwards."""
    weights = micro * heads // tensor * SEQUENCE * SEQUENCE * 2
    return 1e3 * weights * (7 * runs + 12) / BANDWIDTH


def table_5(rows):
    errors, more = [], []
    print(f"{'model':>8}  {'recompute':>9}  {'published s':>11}  {'planned s':>9}  {'error':>7}  "
          f"{'with their attention':>20}  {'error':>7}")
    for name, heads, hidden, layers, pipeline, chunks, batch, micro, full, selective in rows:
        for kind, published in (("full", full), ("selective", selective)):
            fields = model(heads, hidden, layers, 8, pipeline) | {
                "train.global_batch_size": batch, "train.micro_batch_size": micro,
                "model.recompute_granularity": kind}
            if chunks > 1:
                fields["parallel.virtual_pipeline_model_parallel_size"] = chunks
            if kind == "selective":
                fields["parallel.sequence_parallel"] = "true"
            planned = plan_time(8 * pipeline, fields) / 1e3
            slots = batch // micro + (pipeline - 1) / chunks
            theirs = planned + layers / pipeline * slots * attention_ms(heads, 8, micro, 2) / 1e3
            errors.append(planned / published - 1)
            more.append(theirs / published - 1)
            print(f"{name:>8}  {kind:>9}  {published:11.2f}  {planned:9.2f}  {errors[-1]:+7.1%}  "
                  f"{theirs:20.2f}  {more[-1]:+7.1%}", flush=True)
    summary(errors, more)


def table_1(rows):
    errors, more = [], []
    print(f"{'model':>8}  {'published TFLOP/s':>17}  {'planned':>8}  {'error':>7}  "
          f"{'with their attention':>20}  {'error':>7}")
    for name, heads, hidden, layers, tensor, pipeline, ranks, batch, published in rows:
        data = ranks // tensor // pipeline
        micro = 1
        fields = model(heads, hidden, layers, tensor, pipeline) | {
            "train.global_batch_size": batch, "train.micro_batch_size": micro,
            "model.recompute_granularity": "full"}
        step = plan_time(ranks, fields) / 1e3
        # Equation 3 of the paper.
        flops = 96 * batch * SEQUENCE * layers * hidden ** 2 * (
            1 + SEQUENCE / (6 * hidden) + 51200 / (16 * layers * hidden))
        slots = batch // data // micro + pipeline - 1
        theirs = step + layers / pipeline * slots * attention_ms(heads, tensor, micro, 2) / 1e3
        rates = [flops / ranks / seconds / 1e12 for seconds in (step, theirs)]
        errors.append(rates[0] / published - 1)
        more.append(rates[1] / published - 1)
        print(f"{name:>8}  {published:17.0f}  {rates[0]:8.0f}  {errors[-1]:+7.1%}  "
              f"{rates[1]:20.0f}  {more[-1]:+7.1%}", flush=True)
    summary(errors, more)


def summary(errors, more):
    for text, found in (("as planned", errors), ("with their attention", more)):
        sizes = [abs(error) for error in found]
        print(f"{text}: median {statistics.median(sizes):.1%}, most {max(sizes):.1%}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=int, choices=(1, 5))
    parser.add_argument("--rows", type=int, help="the first of each table")
    arguments = parser.parse_args()
    for table, run, rows in ((5, table_5, TABLE_5), (1, table_1, TABLE_1)):
        if arguments.table in (None, table):
            print(f"table {table}")
            run(rows[:arguments.rows])


if __name__ == "__main__":
    main()
