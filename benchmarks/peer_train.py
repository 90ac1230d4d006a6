"""One rank of PyTorch's side of train.py: the model of a folder that
`lockstep checkpoint export --hf` wrote (Llama's form), DistributedDataParallel with its defaults,
clipping and a fused AdamW.

Usage: peer_train.py MODEL TEXT MICRO_BATCH MICRO_BATCHES STEPS, under torchrun's environment. Rank 0
prints one JSON document: the milliseconds of each step, or, for 0 steps, the loss over TEXT as
`lockstep evaluate` defines it."""

import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

folder = pathlib.Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
hidden, ffn, heads = (config[key] for key in
                      ("hidden_size", "intermediate_size", "num_attention_heads"))
kv_heads, length = config["num_key_value_heads"], config["max_position_embeddings"]
head = hidden // heads


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm = torch.nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.qkv = torch.nn.Linear(hidden, (heads + 2 * kv_heads) * head, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = torch.nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.gate_up = torch.nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = torch.nn.Linear(ffn, hidden, bias=False)

    def forward(self, x, cos, sin):
        qkv = self.qkv(self.input_norm(x)).unflatten(-1, (-1, head)).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        attended = F.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(config["vocab_size"], hidden)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(config["num_hidden_layers"]))
        self.norm = torch.nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        frequencies = config["rope_theta"] ** (-torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def load(self):
        data = (folder / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:begin])

        def tensor(name):
            first, last = (begin + offset for offset in entries[name]["data_offsets"])
            flat = torch.frombuffer(bytearray(data[first:last]), dtype=torch.float32)
            return flat.view(entries[name]["shape"])

        def joined(*names):
            return torch.cat([tensor(name + ".weight") for name in names])

        weights = {"embedding.weight": joined("model.embed_tokens"),
                   "norm.weight": joined("model.norm"), "cos": self.cos, "sin": self.sin}
        for i in range(len(self.layers)):
            theirs, ours = f"model.layers.{i}.", f"layers.{i}."
            attention = [theirs + f"self_attn.{name}_proj" for name in "qkvo"]
            mlp = [theirs + f"mlp.{name}_proj" for name in ("gate", "up", "down")]
            weights |= {
                ours + "input_norm.weight": joined(theirs + "input_layernorm"),
                ours + "qkv.weight": joined(*attention[:3]),
                ours + "out.weight": joined(attention[3]),
                ours + "mlp_norm.weight": joined(theirs + "post_attention_layernorm"),
                ours + "gate_up.weight": joined(*mlp[:2]), ours + "down.weight": joined(mlp[2])}
        self.load_state_dict(weights)


def windows(tokens, first):
    rows = torch.stack([tokens[i:i + length + 1] for i in first])
    return rows[:, :-1], rows[:, 1:]


def initial_loss(model, tokens):
    starts = range(0, len(tokens) - length, length)
    with torch.no_grad():
        return statistics.fmean(model(*windows(tokens, [i])).item() for i in starts)


def train(model, tokens, micro_batch, micro_batches, steps):
    """Milliseconds of each step."""
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95),
                                  weight_decay=0.1, fused=True)
    torch.manual_seed(dist.get_rank())
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        for m in range(micro_batches):
            first = torch.randint(len(tokens) - length, (micro_batch,))
            model.require_backward_grad_sync = m + 1 == micro_batches
            (model(*windows(tokens, first)) / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def main():
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    micro_batch, micro_batches, steps = (int(argument) for argument in sys.argv[3:6])
    tokens = torch.frombuffer(bytearray(pathlib.Path(sys.argv[2]).read_bytes()),
                              dtype=torch.uint8).long()
    model = Model()
    model.load()
    result = (train(model, tokens, micro_batch, micro_batches, steps) if steps
              else initial_loss(model, tokens))
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


main()
