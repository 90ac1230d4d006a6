"""Writes tests/models/router_golden.json: the routing weights that Megatron Core's TopKRouter gives
to tokens, and the gradient of its balancing loss alone.

Run it with torch and megatron-core 0.16.1: python scripts/golden/router.py
"""

import json
import math
import pathlib
import types

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, BATCH, EXPERTS = 3, 2, 8
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

# Fields of the configuration; "aux_loss" is the default of moe_router_load_balancing_type.
CASES = [
    {},
    {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    GROUPS,
    {**GROUPS, "moe_router_pre_softmax": True},
    BIASED,
    {**BIASED, **GROUPS, "moe_router_load_balancing_type": "seq_aux_loss"},
    {**BIASED, **GROUPS, "moe_router_load_balancing_type": "global_aux_loss"},
]


def logits(case):
    """Three decimals, so that the text is exact."""
    return [[round(3 * math.sin(1.7 * (EXPERTS * t + e) ** 1.3 + case), 3) for e in range(EXPERTS)]
            for t in range(SEQUENCE * BATCH)]


def rounded(matrix):
    return [[float(f"{x:.9g}") for x in row] for row in matrix.tolist()]


def run(number, fields):
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=EXPERTS,
        moe_router_topk=4, moe_aux_loss_coeff=0.5, moe_router_dtype="fp64",
        **{"moe_router_load_balancing_type": "aux_loss", **fields})
    one = dist.group.WORLD
    groups = types.SimpleNamespace(tp=one, cp=one, tp_cp=one, tp_dp_cp=one)
    layer = router.TopKRouter(config, pg_collection=groups)
    bias = []
    if layer.expert_bias is not None:
        bias = [round(0.4 * math.cos(2.3 * e), 3) for e in range(EXPERTS)]
        layer.expert_bias.copy_(torch.tensor(bias))
    given = logits(number)
    tokens = torch.tensor(given).view(SEQUENCE, BATCH, EXPERTS).requires_grad_(True)
    weights, chosen = layer.routing(tokens)
    assert torch.equal(chosen, weights > 0)
    (0 * weights).sum().backward()
    return {"fields": fields, "logits": given, "bias": bias, "weights": rounded(weights),
            "gradient": rounded(tokens.grad.flatten(0, 1))}


def main():
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    router.save_to_aux_losses_tracker = lambda *arguments, **options: None
    lines = ",\n".join(json.dumps(run(number, fields)) for number, fields in enumerate(CASES))
    target = pathlib.Path(__file__).parents[2] / "tests/models/router_golden.json"
    target.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
