"""The arguments that Megatron-LM saves with a model, and transformers' config.json."""

from torch_dist import fail

# Arguments that change what the weights mean and that config.json cannot express, with the values
# that change nothing.
NEUTRAL = {
    "rotary_percent": 1.0, "rotary_interleaved": False, "rotary_seq_len_interpolation_factor": 1,
    "no_rope_freq": None, "qk_l2_norm": False, "softmax_type": "vanilla",
    "attention_output_gate": False, "apply_residual_connection_post_layernorm": False,
    "apply_layernorm_1p": False, "layernorm_zero_centered_gamma": False,
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "squared_relu": False,
    "openai_gelu": False, "quick_geglu": False,
}


class Model:
    """Megatron-LM's arguments by name; those that are used are checked."""

    def __init__(self, arguments):
        self.given = arguments if isinstance(arguments, dict) else vars(arguments)
        self.layers = self["num_layers"]
        self.heads = self["num_attention_heads"]
        if self.get("multi_latent_attention"):
            fail("argument multi_latent_attention: found True, allowed: False")
        self.gpt2 = self.get("position_embedding_type", "rope") == "learned_absolute"
        grouped = self.get("group_query_attention", self.get("num_query_groups") is not None)
        self.groups = self.get("num_query_groups") or self.heads
        if not grouped:
            self.groups = self.heads
        self.channels = self.get("kv_channels") or self["hidden_size"] // self.heads
        self.ffn = self.get("ffn_hidden_size") or 4 * self["hidden_size"]
        self.experts = self.get("num_experts") or 0
        window = self.get("window_size")
        self.window = window[0] + 1 if isinstance(window, (list, tuple)) else None
        self.model_type = self._model_type()
        self._check()

    def __getitem__(self, name):
        if self.given.get(name) is None:
            fail(f"argument {name}: is missing")
        return self.given[name]

    def get(self, name, otherwise=None):
        value = self.given.get(name)
        return otherwise if value is None else value

    def _model_type(self):
        if self.gpt2:
            return "gpt2"
        if self.experts:
            return "qwen3_moe" if self.get("qk_layernorm") else "mixtral"
        if self.get("qk_layernorm"):
            return "qwen3"
        if self.get("add_qkv_bias"):
            return "qwen2"
        return "mistral" if self.window else "llama"

    def _expect(self, name, allowed, otherwise=None):
        found = self.get(name, otherwise)
        if found != allowed:
            fail(f"argument {name}: found {found}, allowed in a {self.model_type} model: {allowed}")

    def _check(self):
        self._expect("normalization", "LayerNorm" if self.gpt2 else "RMSNorm", "LayerNorm")
        self._expect("swiglu", not self.gpt2, False)
        self._expect("add_bias_linear", self.gpt2, True)
        for name, value in NEUTRAL.items():
            self._expect(name, value, value)
        if self.window:
            self._expect("window_attn_skip_freq", None)
        if not self.gpt2:
            self._expect("position_embedding_type", "rope", "rope")
        if self.gpt2:
            self._expect("window_size", None)
            self._expect("untie_embeddings_and_output_weights", False, False)
            self._expect("num_experts", None)
        if self.experts:
            self._expect("moe_router_score_function", "softmax", "softmax")
            self._expect("moe_router_enable_expert_bias", False, False)
            self._expect("moe_shared_expert_intermediate_size", None)
            self._expect("moe_router_num_groups", None)
            self._expect("moe_router_topk_scaling_factor", None)

    def has_experts(self, layer):
        if not self.experts:
            return False
        frequency = self.get("moe_layer_freq", 1)
        return frequency[layer] == 1 if isinstance(frequency, list) else layer % frequency == 0


def rope_scaling(model):
    if model.get("use_rope_scaling"):
        return {"rope_type": "llama3", "factor": float(model.get("rope_scaling_factor", 8.0)),
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}
    return None


def experts_config(model):
    width = model.get("moe_ffn_hidden_size") or model.ffn
    topk = model.get("moe_router_topk", 2)
    layers = [model.has_experts(layer) for layer in range(model.layers)]
    if model.model_type == "mixtral":
        if not all(layers) or model.get("moe_router_pre_softmax"):
            fail("a mixtral model has experts in all layers and no moe_router_pre_softmax")
        return {"num_local_experts": model.experts, "num_experts_per_tok": topk,
                "intermediate_size": width}
    return {"num_experts": model.experts, "num_experts_per_tok": topk,
            "moe_intermediate_size": width, "decoder_sparse_step": 1,
            "norm_topk_prob": not model.get("moe_router_pre_softmax", False),
            "mlp_only_layers": [layer for layer, sparse in enumerate(layers) if not sparse]}


def config_of(model, vocab_size, dtype):
    names = {"gpt2": "GPT2LMHeadModel", "qwen3_moe": "Qwen3MoeForCausalLM"}
    config = {"architectures": [names.get(model.model_type,
                                          model.model_type.capitalize() + "ForCausalLM")],
              "model_type": model.model_type, "vocab_size": vocab_size, "torch_dtype": dtype}
    length, width = model["max_position_embeddings"], model["hidden_size"]
    epsilon = model.get("norm_epsilon", model.get("layernorm_epsilon", 1e-5))
    if model.gpt2:
        fused = model.get("bias_gelu_fusion", True)  # the fused GELU approximates with tanh
        return config | {
            "activation_function": "gelu_new" if fused else "gelu", "n_layer": model.layers,
            "n_embd": width, "n_head": model.heads, "n_inner": model.ffn, "n_positions": length,
            "layer_norm_epsilon": epsilon, "tie_word_embeddings": True}
    config |= {"hidden_act": "silu", "hidden_size": width, "intermediate_size": model.ffn,
               "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
               "num_key_value_heads": model.groups, "max_position_embeddings": length,
               "rms_norm_eps": epsilon, "rope_theta": float(model.get("rotary_base", 10000)),
               "rope_scaling": rope_scaling(model),
               "tie_word_embeddings": not model.get("untie_embeddings_and_output_weights", False)}
    config["head_dim"] = model.channels
    if model.window:
        config |= {"sliding_window": model.window, "use_sliding_window": True,
                   "max_window_layers": 0}
    elif model.model_type in ("mistral", "mixtral"):
        config["sliding_window"] = None
    return config | (experts_config(model) if model.experts else {})
