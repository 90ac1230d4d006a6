"""Writes tests/datasets/batch_sizes_golden.json: global batches of Megatron Core's ramp-up.

Run where torch and megatron-core 0.16.1 are installed: python scripts/golden/batch_sizes.py
"""

import json
import pathlib
import random

from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

SOURCE = pathlib.Path(__file__).resolve().parents[2]


def case(rng):
    micro, ranks = rng.randint(1, 4), rng.randint(1, 4)
    together = micro * ranks
    start, increment = together * rng.randint(1, 5), together * rng.randint(1, 4)
    steps, samples = rng.randint(1, 7), rng.choice([1, 7, 10, 999, 1000, 123457, 10**9 + 7])
    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        start + steps * increment, micro, ranks, False, 1, start, increment, samples)
    places = {0, 1, samples - 1, samples, samples + 1, 2 * samples}
    for step in range(steps + 1):
        boundary = samples * step // steps
        places |= {boundary - 1, boundary, boundary + 1}
    rows = []
    for consumed in sorted(place for place in places if place >= 0):
        calculator.update(consumed, True)
        rows.append([consumed, calculator.get_current_global_batch_size(), calculator.get()])
    return {"micro": micro, "ranks": ranks, "global": start + steps * increment,
            "rampup": f"{start} {increment} {samples}", "rows": rows}


def main():
    rng = random.Random(106)
    cases = [case(rng) for _ in range(60)]
    target = SOURCE / "tests/datasets/batch_sizes_golden.json"
    target.write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main()
