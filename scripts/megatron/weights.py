"""Maps Megatron-LM's weights to the names and shapes of Hugging Face's files."""

import torch

from torch_dist import fail


class Weights:
    """Yields transformers' name, the shape and a function that reads the tensor, in file order."""

    def __init__(self, checkpoint, model, vocab_size):
        self.checkpoint, self.model, self.vocab_size = checkpoint, model, vocab_size

    def find(self, layer, *names):
        """Returns (key, index) of the first of `names` that layer `layer` has."""
        for name in names:
            for key, first in ((f"decoder.layers.{layer}.{name}", None),
                               (f"decoder.layers.{name}", layer)):
                shape = self.checkpoint.shape(key) if key in self.checkpoint.tensors else []
                if shape and (first is None or first < shape[0]):
                    return key, first
        fail(f"'{self.checkpoint.folder}': layer {layer}: none of {', '.join(names)} is there")

    def shape(self, place):
        return self.checkpoint.shape(place[0])[0 if place[1] is None else 1:]

    def same(self, theirs, place, change=lambda x: x, shape=None):
        yield theirs, shape or self.shape(place), lambda: change(self.checkpoint.read(*place))

    def norm(self, theirs, place):
        one = 1 if self.model.get("apply_layernorm_1p") and theirs.endswith("weight") else 0
        return self.same(theirs, place, lambda x: x + one)

    def table(self, theirs, key):
        size = [self.vocab_size, self.checkpoint.shape(key)[1]]
        return self.same(theirs, (key, None), lambda x: x[:self.vocab_size], size)

    def parts(self, names, place, shapes, split):
        """Yields several parts of one tensor, which is read again for each."""
        for index, (name, shape) in enumerate(zip(names, shapes)):
            yield name, shape, lambda index=index: split(self.checkpoint.read(*place))[index]

    def heads(self, x):
        """Splits rows ordered by group into queries, keys, values."""
        model = self.model
        each = model.heads // model.groups
        groups = x.reshape(model.groups, each + 2, model.channels, *x.shape[1:])
        return [part.reshape(-1, *x.shape[1:]) for part in groups.split([each, 1, 1], dim=1)]

    def attention(self, layer, theirs):
        model = self.model
        rows = [model.heads * model.channels] + 2 * [model.groups * model.channels]
        for part in ["weight"] + (["bias"] if model.get("add_qkv_bias") else []):
            place = self.find(layer, f"self_attention.linear_qkv.{part}")
            names = [f"{theirs}{name}_proj.{part}" for name in "qkv"]
            yield from self.parts(names, place, [[r] + self.shape(place)[1:] for r in rows],
                                  self.heads)
        yield from self.same(theirs + "o_proj.weight",
                             self.find(layer, "self_attention.linear_proj.weight"))
        if model.get("qk_layernorm"):
            for name in "qk":
                yield from self.norm(f"{theirs}{name}_norm.weight",
                                     self.find(layer, f"self_attention.{name}_layernorm.weight"))

    def gated(self, layer, ours, theirs):
        place = self.find(layer, ours + "linear_fc1.weight")
        rows, width = self.shape(place)
        yield from self.parts([theirs + "gate_proj.weight", theirs + "up_proj.weight"], place,
                              2 * [[rows // 2, width]], lambda x: x.chunk(2))
        yield from self.same(theirs + "down_proj.weight",
                             self.find(layer, ours + "linear_fc2.weight"))

    def experts(self, layer, theirs):
        mixtral = self.model.model_type == "mixtral"
        root = theirs + ("block_sparse_moe." if mixtral else "mlp.")
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        yield from self.same(root + "gate.weight", self.find(layer, "mlp.router.weight"))
        first = self.find(layer, "mlp.experts.experts.linear_fc1.weight")
        second = self.find(layer, "mlp.experts.experts.linear_fc2.weight")
        _, rows, width = self.shape(first)
        held = {}

        def matrix(place, expert):
            if held.get("place") != place:
                held.clear()
                held.update(place=place, values=self.checkpoint.read(*place))
            return held["values"][expert]

        for expert in range(self.model.experts):
            for half, name in enumerate(names[:2]):
                yield (f"{root}experts.{expert}.{name}.weight", [rows // 2, width],
                       lambda e=expert, h=half: matrix(first, e).chunk(2)[h])
        for expert in range(self.model.experts):
            yield (f"{root}experts.{expert}.{names[2]}.weight", self.shape(second)[1:],
                   lambda e=expert: matrix(second, e))

    def rotary_layer(self, layer):
        theirs = f"model.layers.{layer}."
        yield from self.norm(theirs + "input_layernorm.weight", self.find(
            layer, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"))
        yield from self.attention(layer, theirs + "self_attn.")
        yield from self.norm(theirs + "post_attention_layernorm.weight", self.find(
            layer, "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"))
        if self.model.has_experts(layer):
            yield from self.experts(layer, theirs)
        else:
            yield from self.gated(layer, "mlp.", theirs + "mlp.")

    def gpt2_layer(self, layer):
        theirs = f"transformer.h.{layer}."
        for part in ("weight", "bias"):
            turn = (lambda x: x.t()) if part == "weight" else (lambda x: x)
            yield from self.norm(f"{theirs}ln_1.{part}", self.find(
                layer, f"self_attention.linear_qkv.layer_norm_{part}", f"input_layernorm.{part}"))
            yield from self.norm(f"{theirs}ln_2.{part}", self.find(
                layer, f"mlp.linear_fc1.layer_norm_{part}", f"pre_mlp_layernorm.{part}"))
            for ours, name in (("self_attention.linear_qkv", "attn.c_attn"),
                               ("self_attention.linear_proj", "attn.c_proj"),
                               ("mlp.linear_fc1", "mlp.c_fc"), ("mlp.linear_fc2", "mlp.c_proj")):
                place = self.find(layer, f"{ours}.{part}")
                def change(x, joined=ours.endswith("qkv"), turn=turn):
                    return turn(torch.cat(self.heads(x)) if joined else x)
                yield from self.same(f"{theirs}{name}.{part}", place, change,
                                     self.shape(place)[::-1])

    def __iter__(self):
        gpt2 = self.model.gpt2
        root = "transformer." if gpt2 else "model."
        yield from self.table(root + ("wte" if gpt2 else "embed_tokens") + ".weight",
                              "embedding.word_embeddings.weight")
        if gpt2:
            yield from self.same(root + "wpe.weight",
                                 ("embedding.position_embeddings.weight", None))
        for layer in range(self.model.layers):
            yield from self.gpt2_layer(layer) if gpt2 else self.rotary_layer(layer)
        for part in ("weight", "bias") if gpt2 else ("weight",):
            yield from self.norm(f"{root}{'ln_f' if gpt2 else 'norm'}.{part}",
                                 (f"decoder.final_layernorm.{part}", None))
        if self.model.get("untie_embeddings_and_output_weights", False):
            yield from self.table("lm_head.weight", "output_layer.weight")
