"""Writes tests/models/gpt_golden.json: losses and gradients of Hugging Face's Llama and GPT-2, in
double precision, for weights given by a formula. The test fills GPTModel by the same formula.

Run it with torch and transformers 4.57: python scripts/golden/gpt.py
"""

import json
import math
import pathlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

VOCAB, HIDDEN, LAYERS, HEADS, GROUPS, FFN, SEQ, BATCH = 11, 16, 2, 4, 2, 24, 8, 3
HEAD = HIDDEN // HEADS


def fill(ordinal, shape, around=0.0):
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return (around + (0.1 if around else 0.3) * torch.sin(0.37 * i + ordinal)).reshape(shape)


def probe(gradient):
    i = torch.arange(gradient.numel(), dtype=torch.float64)
    return [gradient.norm().item(), (gradient.flatten() * torch.cos(0.11 * i)).sum().item()]


def split_qkv(weight, groups):
    """Rows by group (queries, key, value) -> all queries, all keys, all values."""
    per = HEADS // groups
    blocks = weight.reshape(groups, per + 2, HEAD, -1)
    tail = weight.shape[1:]
    return (blocks[:, :per].reshape(-1, *tail), blocks[:, per].reshape(-1, *tail),
            blocks[:, per + 1].reshape(-1, *tail))


def join_qkv(query, key, value, groups):
    per, tail = HEADS // groups, query.shape[1:]
    return torch.cat([query.reshape(groups, per, HEAD, -1), key.reshape(groups, 1, HEAD, -1),
                      value.reshape(groups, 1, HEAD, -1)], 1).reshape(-1, *tail)


def tokens_and_labels():
    i = torch.arange(BATCH * (SEQ + 1)).reshape(BATCH, SEQ + 1)
    ids = (i * i + 3 * i) % VOCAB
    return ids[:, :-1], ids[:, 1:]


def run(model, parameters):
    """parameters: our name -> (shape, put, get); put writes the weight, get reads the gradient."""
    weights = {}
    for ordinal, (name, (shape, put, _)) in enumerate(parameters.items()):
        norm = "norm" in name and name.endswith("weight")
        weights[name] = fill(ordinal, shape, 1.0 if norm else 0.0)
        with torch.no_grad():
            put(weights[name])
    tokens, labels = tokens_and_labels()
    logits = model(tokens).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                               reduction="none")
    (losses.sum()).backward()
    return {"losses": losses.tolist(), "parameters": [
        {"name": name, "shape": list(shape), "gradient": probe(get())}
        for name, (shape, _, get) in parameters.items()]}


def direct(parameter, transpose=False):
    def put(value):
        parameter.copy_(value.T if transpose else value)

    def get():
        return (parameter.grad.T if transpose else parameter.grad).contiguous()

    shape = tuple(parameter.T.shape) if transpose else tuple(parameter.shape)
    return shape, put, get


def llama():
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, max_position_embeddings=SEQ,
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, pad_token_id=None,
        bos_token_id=0, eos_token_id=0)).double()
    for module in model.modules():  # Llama's own RMSNorm computes in single precision
        if isinstance(module, LlamaRMSNorm):
            module.forward = lambda x, m=module: torch.nn.functional.rms_norm(
                x, m.weight.shape, m.weight, m.variance_epsilon)
    # The rotary tables would be kept in single precision otherwise.
    rotary = model.model.rotary_emb
    rotary.inv_freq = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)

    def forward(x, position_ids):
        angles = position_ids[:, :, None].double() * rotary.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    rotary.forward = forward
    parameters = {"embedding.word_embeddings.weight": direct(model.model.embed_tokens.weight)}
    for n, layer in enumerate(model.model.layers):
        attention, mlp, prefix = layer.self_attn, layer.mlp, f"decoder.layers.{n}."

        def put_qkv(value, a=attention):
            for part, target in zip(split_qkv(value, GROUPS), (a.q_proj, a.k_proj, a.v_proj)):
                target.weight.copy_(part)

        def get_qkv(a=attention):
            return join_qkv(a.q_proj.weight.grad, a.k_proj.weight.grad, a.v_proj.weight.grad,
                            GROUPS)

        def put_fc1(value, m=mlp):
            m.gate_proj.weight.copy_(value[:FFN])
            m.up_proj.weight.copy_(value[FFN:])

        def get_fc1(m=mlp):
            return torch.cat([m.gate_proj.weight.grad, m.up_proj.weight.grad])

        parameters |= {
            prefix + "input_layernorm.weight": direct(layer.input_layernorm.weight),
            prefix + "self_attention.linear_qkv.weight":
                (((HEADS + 2 * GROUPS) * HEAD, HIDDEN), put_qkv, get_qkv),
            prefix + "self_attention.linear_proj.weight": direct(attention.o_proj.weight),
            prefix + "pre_mlp_layernorm.weight": direct(layer.post_attention_layernorm.weight),
            prefix + "mlp.linear_fc1.weight": ((2 * FFN, HIDDEN), put_fc1, get_fc1),
            prefix + "mlp.linear_fc2.weight": direct(mlp.down_proj.weight)}
    parameters |= {"decoder.final_layernorm.weight": direct(model.model.norm.weight),
                   "output_layer.weight": direct(model.lm_head.weight)}
    return run(model, parameters)


def gpt2():
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=SEQ, n_inner=FFN,
        activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0)).double()
    body = model.transformer
    parameters = {"embedding.word_embeddings.weight": direct(body.wte.weight),
                  "embedding.position_embeddings.weight": direct(body.wpe.weight)}
    for n, layer in enumerate(body.h):
        qkv, prefix = layer.attn.c_attn, f"decoder.layers.{n}."

        def pack(part):
            return join_qkv(*part.chunk(3), HEADS)

        def put_weight(value, q=qkv):
            q.weight.copy_(torch.cat(split_qkv(value, HEADS)).T)

        def put_bias(value, q=qkv):
            q.bias.copy_(torch.cat(split_qkv(value, HEADS)))

        parameters |= {
            prefix + "input_layernorm.weight": direct(layer.ln_1.weight),
            prefix + "input_layernorm.bias": direct(layer.ln_1.bias),
            prefix + "self_attention.linear_qkv.weight":
                ((3 * HIDDEN, HIDDEN), put_weight, lambda q=qkv: pack(q.weight.grad.T)),
            prefix + "self_attention.linear_qkv.bias":
                ((3 * HIDDEN,), put_bias, lambda q=qkv: pack(q.bias.grad)),
            prefix + "self_attention.linear_proj.weight": direct(layer.attn.c_proj.weight, True),
            prefix + "self_attention.linear_proj.bias": direct(layer.attn.c_proj.bias),
            prefix + "pre_mlp_layernorm.weight": direct(layer.ln_2.weight),
            prefix + "pre_mlp_layernorm.bias": direct(layer.ln_2.bias),
            prefix + "mlp.linear_fc1.weight": direct(layer.mlp.c_fc.weight, True),
            prefix + "mlp.linear_fc1.bias": direct(layer.mlp.c_fc.bias),
            prefix + "mlp.linear_fc2.weight": direct(layer.mlp.c_proj.weight, True),
            prefix + "mlp.linear_fc2.bias": direct(layer.mlp.c_proj.bias)}
    parameters |= {"decoder.final_layernorm.weight": direct(body.ln_f.weight),
                   "decoder.final_layernorm.bias": direct(body.ln_f.bias)}
    return run(model, parameters)


if __name__ == "__main__":
    path = pathlib.Path(__file__).parents[2] / "tests/models/gpt_golden.json"
    path.write_text(json.dumps({"llama": llama(), "gpt2": gpt2()}, indent=1) + "\n")
    print(path)
