"""Runs programs of several ranks on this machine, and prints what a benchmark measured."""

import os
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))
from gpu_checks.commands import free_port, run_all  # noqa: E402

SECONDS = 300  # that a program may take


def run_ranks(command, ranks, environment=(), rank_environment=lambda rank: {},
              prefix=lambda rank: []):
    """Returns rank 0's standard output. Each rank is a process that runs prefix(rank) followed by
    `command`, with torchrun's environment, `environment` and rank_environment(rank)."""
    port = free_port()
    results = run_all([([*prefix(rank), *command], os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1", **dict(environment), **rank_environment(rank)})
        for rank in range(ranks)], SECONDS)
    failed = [f"rank {rank}: {result.reason()}\n{result.error[-2000:]}"
              for rank, result in enumerate(results) if result.status != 0]
    if failed:
        sys.exit("\n".join(failed))
    return results[0].output


def show(name, values, at_most=None):
    """Prints the median with the lowest and the highest value, and whether it meets the limit."""
    value = statistics.median(values)
    text = f"  {name:<44} {value:9.3f}   [{min(values):.3f}, {max(values):.3f}]"
    if at_most is not None:
        text += f"   limit: <= {at_most:.2f}, {'met' if value <= at_most else 'MISSED'}"
    print(text, flush=True)
