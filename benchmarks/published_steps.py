"""Compares `lockstep plan time` with published steps of Megatron-LM on A100 hosts.

    python benchmarks/published_steps.py [--rows N]

Nothing here is measured, and no constant is fitted to a row. The published programs differ from
ours: they compute all attention weights, write them to memory and apply dropout to them; ours runs
fused attention without dropout, which skips what the causal mask hides. Both apply a dropout of 0.1
to the layers' outputs. The column "with their attention" adds the difference to a step, see
attention_ms().
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import time

SOURCE = pathlib.Path(__file__).resolve().parents[1]
LOCKSTEP = SOURCE / "build/lockstep"
MACHINE = SOURCE / "configs/machines/dgx_a100.textproto"
SEQUENCE = 2048
# Of that machine file: bytes per second of large tensors, and FLOPs per second of a product.
BANDWIDTH = 0.9 * 2039e9
PEAK, LARGE, SHARE, SHARE_OF_SMALL, SHARE_OF_ATTENTION = 312e12, 16e9, 0.869, 0.6, 0.554

# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv
# 2205.05198: tables 3 (layouts) and 5 (seconds of an iteration: full recomputation; sequence
# parallelism and selective recomputation). 8-way tensor parallelism. Calculon's validation has the
# same seconds and layouts (calculon/llm/validation.py, validation/seqsel/tab5).
TABLE_5 = [  # name, heads, hidden, layers, pipeline, chunks, batch, micro-batch, full, selective
    ("22B", 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49)]


def plan_time(ranks, fields, machine):
    """Runs `plan time` for GPTs of that time, unless `fields` override them."""
    common = {"model.seq_length": SEQUENCE, "model.vocab_size": 51200, "model.activation": "gelu",
              "model.normalization": "LayerNorm", "model.add_bias_linear": "true",
              "model.position_embedding_type": "learned_absolute", "train.precision": "bf16",
              "train.device": "cuda", "train.eval_iters": 0, "data.mock": "true",
              "optimizer.lr": 0.0001, "optimizer.min_lr": 0, "ddp.bucket_size": 40000000}
    common["model.ffn_hidden_size"] = 4 * fields["model.hidden_size"]
    overrides = [part for path, value in (common | fields).items()
                 for part in ("--set", f"{path}={value}")]
    result = subprocess.run(
        [LOCKSTEP, "plan", "time", SOURCE / "configs/tiny.textproto", *map(str, overrides),
         "--world-size", str(ranks), "--machine", machine, "--json"],
        capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout)


def attention_ms(heads, hidden, tensor, micro, runs):
    """Milliseconds that their attention takes beyond ours, of a layer and micro-batch on a rank.
    S^2 weights of each head, 2 bytes each, go through memory 7 times in forward (products, scaled
    softmax, dropout with its one-byte mask, and the read by the second product) and 12 times in
    backward. Theirs takes two products in forward and four in backward, over the whole square; the
    plan counts half of two, and half of five. `runs`: forward passes."""
    square = micro * SEQUENCE * SEQUENCE
    weights = square * heads // tensor * 2
    product = 2 * square * hidden / tensor
    rate = PEAK * (SHARE if product >= LARGE else SHARE_OF_SMALL)
    theirs = weights * (7 * runs + 12) / BANDWIDTH + product * (2 * runs + 4) / rate
    return 1e3 * (theirs - product * (runs + 2.5) / (PEAK * SHARE_OF_ATTENTION))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, help="the first of the table")
    arguments = parser.parse_args()
    errors, more = [], []
    print(f"{'model':>6}  {'recompute':>9}  {'published s':>11}  {'planned s':>9}  {'error':>7}  "
          f"{'with their attention':>20}  {'error':>7}  {'planning s':>10}")
    for row in TABLE_5[:arguments.rows]:
        name, heads, hidden, layers, pipeline, chunks, batch, micro, full, selective = row
        for kind, published in (("full", full), ("selective", selective)):
            fields = {"model.num_attention_heads": heads, "model.num_query_groups": heads,
                      "model.hidden_size": hidden, "model.num_layers": layers,
                      "model.hidden_dropout": 0.1, "parallel.tensor_model_parallel_size": 8,
                      "parallel.pipeline_model_parallel_size": pipeline,
                      "train.global_batch_size": batch, "train.micro_batch_size": micro,
                      "model.recompute_granularity": kind}
            if chunks > 1:
                fields["parallel.virtual_pipeline_model_parallel_size"] = chunks
            if kind == "selective":
                fields["parallel.sequence_parallel"] = "true"
            begin = time.monotonic()
            planned = plan_time(8 * pipeline, fields, MACHINE)["step_ms"] / 1e3
            spent = time.monotonic() - begin
            slots = batch // micro + (pipeline - 1) / chunks
            more_ms = attention_ms(heads, hidden, 8, micro, 2)
            theirs = planned + layers / pipeline * slots * more_ms / 1e3
            errors.append(planned / published - 1)
            more.append(theirs / published - 1)
            print(f"{name:>6}  {kind:>9}  {published:11.2f}  {planned:9.2f}  {errors[-1]:+7.1%}  "
                  f"{theirs:20.2f}  {more[-1]:+7.1%}  {spent:10.0f}", flush=True)
    for text, found in (("as planned", errors), ("with their attention", more)):
        sizes = [abs(error) for error in found]
        print(f"{text}: median {statistics.median(sizes):.1%}, most {max(sizes):.1%}")


if __name__ == "__main__":
    main()
