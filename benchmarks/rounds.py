"""Runs programs of several ranks on this machine, and prints what a benchmark measured."""

import os
import socket
import statistics
import subprocess
import sys


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(command, ranks, environment=(), rank_environment=lambda rank: {},
              prefix=lambda rank: []):
    """Returns rank 0's standard output. Each rank is a process that runs prefix(rank) followed by
    `command`, with torchrun's environment, `environment` and rank_environment(rank)."""
    port, processes = free_port(), []
    for rank in range(ranks):
        variables = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1", **dict(environment), **rank_environment(rank)}
        processes.append(subprocess.Popen([*prefix(rank), *(str(word) for word in command)],
                                          env=variables, stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE))
    outputs = [process.communicate(timeout=300) for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("\n".join(error.decode()[-2000:] for _, error in outputs))
    return outputs[0][0].decode()


def show(name, values, at_most=None):
    """Prints the median with the lowest and the highest value, and whether it meets the limit."""
    value = statistics.median(values)
    text = f"  {name:<44} {value:9.3f}   [{min(values):.3f}, {max(values):.3f}]"
    if at_most is not None:
        text += f"   limit: <= {at_most:.2f}, {'met' if value <= at_most else 'MISSED'}"
    print(text, flush=True)
