"""Checks what `make train` promises: python check_metrics.py metrics.jsonl"""

import json
import math
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    lines = [json.loads(line) for line in file]
iterations = [line for line in lines if "lm_loss" in line]
validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
assert abs(iterations[0]["lm_loss"] - math.log(256)) < 0.1, iterations[0]
assert [line["iteration"] for line in iterations] == list(range(1, len(iterations) + 1))
assert validation[-1] < 2.2, validation
print(f"first loss {iterations[0]['lm_loss']:.4f}, validation losses {validation}")
