"""A rank of the same training with Megatron Core on the CPU; megatron_test.py runs it. Usage:
megatron_gpt.py WEIGHTS RESULT, both files written by torch.save."""

import contextlib
import sys

import torch
import torch.distributed as dist

STEPS, BATCH, SEQUENCE = 10, 4, 32


def stand_in_for_cuda():
    """Makes the CUDA devices that Megatron names mean the CPU. The arithmetic is not changed."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        plain = getattr(torch, name)

        def on_cpu(*arguments, plain=plain, **options):
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return plain(*arguments, **options)

        setattr(torch, name, on_cpu)
    torch.Tensor.cuda = lambda self, *arguments, **options: self
    plain_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *arguments: (
        plain_type(self, *arguments) if arguments
        else plain_type(self).replace("torch.", "torch.cuda.", 1))


def tokens_of(step):
    first = (step * dist.get_world_size() + dist.get_rank()) * BATCH * (SEQUENCE + 1)
    i = torch.arange(first, first + BATCH * (SEQUENCE + 1))
    return ((i * i * 7 + i // 3 * 11 + 5) % 128).view(BATCH, SEQUENCE + 1)


def build(weights):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=96, normalization="RMSNorm", layernorm_epsilon=1e-5,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, calculate_per_token_loss=True)
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=128,
        max_sequence_length=SEQUENCE, position_embedding_type="rope",
        share_embeddings_and_output_weights=True)
    parameters = dict(model.named_parameters())
    assert set(parameters) == {key.split(" ")[1] for key in weights if key.startswith("weight ")}, \
        sorted(parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights["weight " + name].view_as(parameter))
    return config, model


def main():
    stand_in_for_cuda()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import (
        OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    # These are random states of CUDA devices; nothing here draws a random number.
    CudaRNGStatesTracker.fork = lambda self, *arguments: contextlib.nullcontext()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    weights = torch.load(sys.argv[1], weights_only=False)
    config, module = build(weights)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(overlap_grad_reduce=False), module)
    settings = OptimizerConfig(optimizer="adam", lr=0.003, weight_decay=0.01, clip_grad=1.0)
    optimizer = get_megatron_optimizer(
        settings, [model], config_overrides=get_standard_config_overrides(settings))
    for group in optimizer.param_groups:  # as OptimizerParamScheduler sets it
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE), diagonal=1).bool()[None, None]
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
    losses, norms, result = torch.zeros(STEPS, dtype=torch.float64), [], {}
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = tokens_of(step)
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).sum()
        loss.backward()
        finalize_model_grads([model], torch.tensor(BATCH * SEQUENCE))
        losses[step] = loss.detach().double()
        if step == 0:
            result = {"gradient " + name: parameter.main_grad.clone()
                      for name, parameter in module.named_parameters()}
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
    dist.all_reduce(losses)
    result["losses"] = losses / (dist.get_world_size() * BATCH * SEQUENCE)
    result["norms"] = torch.tensor(norms, dtype=torch.float64)
    if dist.get_rank() == 0:
        torch.save(result, sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
