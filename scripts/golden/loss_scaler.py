"""Writes tests/optimizer/loss_scaler_golden.json: the scale and the counters of Megatron Core's
DynamicGradScaler after each step, for varied settings and runs of overflows.

Its tensors are put on the CPU. Run it with torch and megatron-core 0.16.1:
python scripts/golden/loss_scaler.py
"""

import json
import pathlib
import random
from unittest import mock

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

CASES = 25
STEPS = 40


def on_the_cpu(make):
    return lambda *args, device=None, **options: make(*args, **options)


def trace(numbers, overflows):
    with mock.patch("torch.tensor", on_the_cpu(torch.tensor)):
        scaler = DynamicGradScaler(**numbers)
    steps = []
    for overflow in overflows:
        scaler.update(overflow)
        steps.append([scaler.scale.item(), scaler._growth_tracker, scaler._hysteresis_tracker])
    return steps


def main():
    rng = random.Random(1)
    cases = []
    for _ in range(CASES):
        numbers = {
            "initial_scale": 2.0 ** rng.randint(4, 24),
            "min_scale": 2.0 ** rng.randint(-2, 4),
            "growth_factor": rng.choice([2.0, 4.0]),
            "backoff_factor": rng.choice([0.5, 0.25]),
            "growth_interval": rng.randint(1, 6),
            "hysteresis": rng.randint(1, 4),
        }
        often = rng.choice([0.1, 0.3, 0.7])
        overflows = [rng.random() < often for _ in range(STEPS)]
        cases.append({"numbers": numbers,
                      "overflows": "".join("x" if o else "." for o in overflows),
                      "trace": trace(numbers, overflows)})
    lines = ",\n".join(json.dumps(case) for case in cases)
    target = pathlib.Path(__file__).parents[2] / "tests/optimizer/loss_scaler_golden.json"
    target.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
