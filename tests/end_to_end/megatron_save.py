"""Models of Megatron Core on the CPU, saved in the format torch_dist with the arguments that
Megatron-LM would save; megatron_checkpoint_test.py runs it under torchrun. Usage: megatron_save.py
FOLDER TOKENS WINDOWS: saves FOLDER/NAME, and the logits of the tokens, [windows, length,
vocabulary] in fp32, in FOLDER/NAME.logits."""

import argparse
import contextlib
import pathlib
import sys

import torch
import torch.distributed as dist

from megatron_gpt import stand_in_for_cuda

LENGTH, VOCABULARY = 32, 256
BASE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48,
        "max_position_embeddings": LENGTH, "vocab_size": VOCABULARY, "norm_epsilon": 1e-5,
        "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
        "position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_base": 5000,
        "untie_embeddings_and_output_weights": True}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}
MODELS = {
    "gpt2": BASE | {"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True,
                    "position_embedding_type": "learned_absolute", "bias_gelu_fusion": False,
                    "untie_embeddings_and_output_weights": False},
    "llama": BASE | GROUPED,
    "qwen2": BASE | GROUPED | {"add_qkv_bias": True},
    "qwen3": BASE | GROUPED | {"qk_layernorm": True, "kv_channels": 16},
    "mixtral": BASE | GROUPED | EXPERTS,
}


def config_of(given):
    from megatron.core.transformer import TransformerConfig
    swiglu = given["swiglu"]
    fields = {name: given[name] for name in (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "ffn_hidden_size", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
        "moe_router_topk", "moe_ffn_hidden_size") if name in given}
    if "num_experts" in given:
        fields |= {"num_moe_experts": given["num_experts"], "moe_token_dispatcher_type": "allgather"}
    return TransformerConfig(
        layernorm_epsilon=given["norm_epsilon"], gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        bias_activation_fusion=False, gradient_accumulation_fusion=False,
        tensor_model_parallel_size=dist.get_world_size(), **fields)


def build(given):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    spec = get_gpt_layer_local_spec(
        num_experts=given.get("num_experts"), qk_layernorm=given.get("qk_layernorm", False),
        normalization=given["normalization"])
    return GPTModel(
        config_of(given), spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        parallel_output=False, position_embedding_type=given["position_embedding_type"],
        rotary_base=given["rotary_base"],
        share_embeddings_and_output_weights=not given["untie_embeddings_and_output_weights"])


def fill(model):
    """Fills in random weights; replicated ones are the same on all ranks."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name:
                continue
            if "local_tokens_per_expert" in name:
                continue
            seed = sum(map(ord, name))
            if getattr(tensor, "tensor_model_parallel", False):
                seed += 7919 * dist.get_rank()
            values = torch.empty(tensor.shape).normal_(
                0.0, 0.2, generator=torch.Generator().manual_seed(seed))
            norm = "norm" in name and name.endswith("weight")
            tensor.copy_(values + 1.0 if norm else values)


def save(folder, name, given, tokens):
    from megatron.core import dist_checkpointing
    model = build(given)
    fill(model)
    model.eval()
    batch = tokens.shape[0]
    mask = torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1).bool()[None, None]
    positions = torch.arange(LENGTH)[None].expand(batch, -1)
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    if dist.get_rank() == 0:
        (folder / f"{name}.logits").write_bytes(logits.float().contiguous().numpy().tobytes())
        (folder / name / "iter_0000007").mkdir(parents=True)
        (folder / name / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    state = {"args": argparse.Namespace(**given), "iteration": 7}
    dist_checkpointing.save(state | model.sharded_state_dict(), folder / name / "iter_0000007")


def main():
    folder, text, windows = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    stand_in_for_cuda()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda self, *arguments: contextlib.nullcontext()
    from megatron.core.transformer.moe import moe_utils
    moe_utils.te_general_gemm = None  # Megatron does not define it without Transformer Engine
    torch.cuda.synchronize = lambda *arguments: None
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size(), 1)
    data = pathlib.Path(text).read_bytes()
    tokens = torch.tensor(list(data[:windows * LENGTH])).view(windows, LENGTH)
    for name in sys.argv[4:] or MODELS:
        save(folder, name, MODELS[name], tokens)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
