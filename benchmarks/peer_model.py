"""A Llama-style model in plain PyTorch, the peer of Lockstep's in peers.py and in
scripts/gpu_check. Its sizes have the names of config.json in a checkpoint that `lockstep checkpoint
export --hf` wrote."""

import json

import torch
import torch.nn.functional as F


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Layer(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head = hidden // self.heads
        self.input_norm = torch.nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.qkv = torch.nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = torch.nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.gate_up = torch.nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = torch.nn.Linear(ffn, hidden, bias=False)

    def forward(self, x, cos, sin):
        qkv = self.qkv(self.input_norm(x)).unflatten(-1, (-1, self.head)).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        attended = F.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True,
            enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, length = config["hidden_size"], config["max_position_embeddings"]
        head = hidden // config["num_attention_heads"]
        self.embedding = torch.nn.Embedding(config["vocab_size"], hidden)
        self.layers = torch.nn.ModuleList(Layer(config)
                                          for _ in range(config["num_hidden_layers"]))
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

    def load(self, folder):
        """Loads the weights of an exported checkpoint."""
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
