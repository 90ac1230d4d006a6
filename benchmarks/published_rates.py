"""Compares `lockstep plan time` with published rates of Megatron on A100 and H100 hosts.

    python benchmarks/published_rates.py a100|h100|h100_fp8 [--rows N]

Nothing here is measured, and no constant is fitted to a row. The tables do not specify a run
completely. a100 and h100 omit the micro-batches and the chunks of a pipeline: the fastest choice
that fits in 80 GB is taken. h100 and h100_fp8 omit more: this program assumes a sharded optimizer
with overlapped communication, sequence parallelism and no recomputation.
"""

import argparse
import statistics

import published_steps

MEMORY = 80e9
A100 = published_steps.MACHINE
H100 = published_steps.SOURCE / "configs/machines/dgx_h100.textproto"

# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM", arXiv 2104.04473, table 1: TFLOP/s per GPU, recomputation included. The last two
# rows take many minutes on two cores.
WEAK_SCALING = [  # billions, heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148), (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163)]

# Megatron-LM's README, "Performance Benchmarking": Megatron Core r0.8.0 in bf16, sequences of 4096,
# vocabulary 131,072, communication of data, tensor and pipeline parallelism overlapped, 48
# replicas. TFLOP/s per GPU.
MEGATRON_CORE = [  # billions, heads, hidden, layers, tensor, pipeline, batch, TFLOP/s
    (1.7, 16, 2048, 24, 1, 1, 192, 408.8), (7.1, 32, 4096, 30, 2, 1, 192, 465.9),
    (16, 48, 6144, 32, 4, 1, 192, 489.1), (32, 56, 7168, 48, 8, 1, 192, 459.6),
    (70, 64, 8192, 84, 8, 2, 384, 419.7), (119, 80, 10240, 92, 8, 4, 768, 420.5),
    (177, 96, 12288, 96, 8, 6, 1152, 432.8), (314, 128, 16384, 96, 8, 8, 1536, 474.4),
    (462, 144, 18432, 112, 8, 16, 3072, 459.9)]
REPLICAS = 48

# NVIDIA NeMo 24.07, performance benchmarks, pretraining on DGX H100 in FP8, on Megatron Core:
# tokens per second and GPU. Nemotron's rows are left out: we do not have their activation.
GPT = {"model.activation": "gelu"}
LLAMA = {"model.activation": "swiglu", "model.normalization": "RMSNorm",
         "model.add_bias_linear": "false", "model.position_embedding_type": "rope",
         "model.untie_embeddings_and_output_weights": "true"}
NEMO = [  # name, form, layers, hidden, ffn, heads, groups, vocabulary, GPUs, batch, micro-batch,
          # sequence, tensor, pipeline, context, chunks, tokens/s
    ("GPT3-5B", GPT, 24, 4096, 16384, 32, 32, 51200, 64, 2048, 4, 2048, 1, 1, 1, 1, 23574),
    ("GPT3-20B", GPT, 44, 6144, 24576, 48, 48, 51200, 64, 256, 2, 2048, 2, 1, 1, 1, 5894),
    ("GPT3-175B", GPT, 96, 12288, 49152, 96, 96, 51200, 128, 256, 1, 2048, 4, 8, 1, 6, 745),
    ("GPT3-175B", GPT, 96, 12288, 49152, 96, 96, 51200, 512, 2048, 2, 2048, 4, 8, 1, 6, 832),
    ("LLAMA2-7B", LLAMA, 32, 4096, 11008, 32, 32, 32000, 8, 128, 1, 4096, 1, 1, 1, 1, 16634),
    ("LLAMA2-13B", LLAMA, 40, 5120, 13824, 40, 40, 32000, 16, 128, 1, 4096, 1, 4, 1, 10, 8715),
    ("LLAMA2-70B", LLAMA, 80, 8192, 28672, 64, 8, 32000, 64, 128, 1, 4096, 4, 4, 1, 20, 1717),
    ("LLAMA3-8B", LLAMA, 32, 4096, 14336, 32, 8, 128256, 8, 128, 1, 8192, 1, 1, 2, 1, 11883),
    ("LLAMA3-70B", LLAMA, 80, 8192, 28672, 64, 8, 128256, 64, 128, 1, 8192, 4, 4, 2, 5, 1549)]


OVERLAPPED = {"ddp.use_distributed_optimizer": "true", "ddp.overlap_grad_reduce": "true",
              "ddp.overlap_param_gather": "true"}


def flops_with_recomputation(batch, layers, hidden):
    """FLOPs of the matrix products of a step, by the paper's formula."""
    length, vocabulary = published_steps.SEQUENCE, 51200
    return (96 * batch * length * layers * hidden ** 2 *
            (1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)))


def weak_scaling(row):
    """Returns the name, the published TFLOP/s per GPU, the planned ones without and with their
    attention, and the micro-batch and chunks."""
    billions, heads, hidden, layers, tensor, pipeline, gpus, batch, published = row
    replicas = gpus // tensor // pipeline
    best = None
    for micro in (1, 2, 4, 8):
        for chunks in (1, 2) if pipeline > 1 and layers % (2 * pipeline) == 0 else (1,):
            if batch // replicas % micro or (chunks > 1 and batch // replicas // micro % pipeline):
                continue
            fields = {"model.num_attention_heads": heads, "model.num_query_groups": heads,
                      "model.hidden_size": hidden, "model.num_layers": layers,
                      "model.hidden_dropout": 0.1, "parallel.tensor_model_parallel_size": tensor,
                      "parallel.pipeline_model_parallel_size": pipeline,
                      "train.global_batch_size": batch, "train.micro_batch_size": micro,
                      "model.recompute_granularity": "full"}
            if chunks > 1:
                fields["parallel.virtual_pipeline_model_parallel_size"] = chunks
            plan = published_steps.plan_time(gpus, fields, A100)
            if max(plan["peak_bytes"]) > MEMORY:
                continue
            slots = batch // replicas // micro + (pipeline - 1) / chunks
            theirs = plan["step_ms"] + (layers / pipeline * slots *
                                        published_steps.attention_ms(heads, hidden, tensor, micro,
                                                                     2))
            if best is None or theirs < best[0]:
                best = theirs, plan["step_ms"], micro, chunks
    work = flops_with_recomputation(batch, layers, hidden) / gpus / 1e9
    return (f"{billions}B", published, work / best[1], work / best[0],
            f"micro-batch {best[2]}, chunks {best[3]}")


def chunk_choices(layers):
    """Chunks of a stage's layers: one, and numbers that divide them."""
    return [chunks for chunks in range(1, layers + 1) if layers % chunks == 0]


def fastest_that_fits(gpus, fields, sequences, pipeline, layers):
    """Returns the least planned milliseconds of a step over micro-batches and chunks, and a text.
    `sequences`: of a replica. `layers`: of a stage."""
    best = None
    for micro in (1, 2, 4):
        for chunks in chunk_choices(layers) if pipeline > 1 else (1,):
            if sequences % micro or (chunks > 1 and sequences // micro % pipeline):
                continue
            choice = fields | {"train.micro_batch_size": micro}
            if chunks > 1:
                choice["parallel.virtual_pipeline_model_parallel_size"] = chunks
            plan = published_steps.plan_time(gpus, choice, H100)
            if max(plan["peak_bytes"]) <= MEMORY and (best is None or plan["step_ms"] < best[0]):
                best = plan["step_ms"], f"micro-batch {micro}, chunks {chunks}"
    return best


def megatron_core(row):
    """Returns the name, the published TFLOP/s per GPU, the planned ones without and with overlap of
    tensor parallelism, and the micro-batch and chunks of both."""
    billions, heads, hidden, layers, tensor, pipeline, batch, published = row
    gpus, length, vocabulary = REPLICAS * tensor * pipeline, 4096, 131072
    fields = OVERLAPPED | {
        "model.num_attention_heads": heads, "model.num_query_groups": heads,
        "model.hidden_size": hidden, "model.num_layers": layers, "model.vocab_size": vocabulary,
        "model.seq_length": length, "model.untie_embeddings_and_output_weights": "true",
        "parallel.tensor_model_parallel_size": tensor,
        "parallel.pipeline_model_parallel_size": pipeline, "train.global_batch_size": batch,
        "parallel.sequence_parallel": str(tensor > 1).lower()}
    # Megatron's formula for FLOPs without recomputation.
    work = (72 * batch * length * layers * hidden ** 2 *
            (1 + length / (6 * hidden) + vocabulary / (12 * layers * hidden))) / gpus / 1e9
    found = []
    for overlap in ("false", "true") if tensor > 1 else ("false",):
        choice = fields | {"parallel.tp_comm_overlap": overlap}
        found.append(fastest_that_fits(gpus, choice, batch // REPLICAS, pipeline,
                                       layers // pipeline))
    return (f"{billions}B", published, work / found[0][0], work / found[-1][0],
            "; ".join(text for _, text in found))


def nemo(row):
    """Returns the name, the published tokens/s per GPU, the planned ones twice, and the layout."""
    (name, form, layers, hidden, ffn, heads, groups, vocabulary, gpus, batch, micro, length, tensor,
     pipeline, context, chunks, published) = row
    fields = form | OVERLAPPED | {
        "model.num_layers": layers, "model.hidden_size": hidden, "model.ffn_hidden_size": ffn,
        "model.num_attention_heads": heads, "model.num_query_groups": groups,
        "model.vocab_size": vocabulary, "model.seq_length": length,
        "parallel.tensor_model_parallel_size": tensor,
        "parallel.pipeline_model_parallel_size": pipeline,
        "parallel.context_parallel_size": context, "train.global_batch_size": batch,
        "train.micro_batch_size": micro, "train.fp8": "hybrid"}
    if tensor > 1:
        fields["parallel.sequence_parallel"] = "true"
    if chunks > 1:
        fields["parallel.virtual_pipeline_model_parallel_size"] = chunks
    plan = published_steps.plan_time(gpus, fields, H100)
    rate = batch * length / gpus / plan["step_ms"] * 1e3
    return (name, published, rate, rate,
            f"tp {tensor}, pp {pipeline}, cp {context}, {max(plan['peak_bytes']) / 1e9:.0f} GB")


TABLES = {  # rows, plan, what the second planned column is
    "a100": (WEAK_SCALING, weak_scaling, "with their attention"),
    "h100": (MEGATRON_CORE, megatron_core, "with tp_comm_overlap"),
    "h100_fp8": (NEMO, nemo, "the same")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--rows", type=int, help="the first of the table")
    arguments = parser.parse_args()
    rows, plan, second = TABLES[arguments.table]
    errors = []
    print(f"{'model':>10}  {'published':>9}  {'planned':>9}  {'error':>7}  {second:>20}  "
          f"{'error':>7}")
    for row in rows[:arguments.rows]:
        name, published, *planned, layout = plan(row)
        errors.append([rate / published - 1 for rate in planned])
        columns = "  ".join(f"{rate:{width},.0f}  {error:+7.1%}"
                            for rate, error, width in zip(planned, errors[-1], (9, 20)))
        print(f"{name:>10}  {published:9,}  {columns}  {layout}", flush=True)
    for text, column in (("planned", 0), (second, 1)):
        sizes = [abs(row[column]) for row in errors]
        print(f"{text}: median {statistics.median(sizes):.1%}, most {max(sizes):.1%}")


if __name__ == "__main__":
    main()
