"""Helpers of the end-to-end tests, which run the built program as a user does."""

import functools
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", SOURCE / "build"))
LOCKSTEP = BUILD / "lockstep"
TORCHRUN = pathlib.Path(sys.executable).parent / "torchrun"

signal.signal(signal.SIGINT, signal.default_int_handler)  # in case this process ignores it


@functools.cache
def has_host_transport():
    return "LOCKSTEP_HOST_TRANSPORT:BOOL=OFF" not in (BUILD / "CMakeCache.txt").read_text()


@functools.cache
def memory_limit(limit):
    """Returns `limit` as a limit of addresses; sanitizers, which reserve terabytes, get none."""
    program = LOCKSTEP.read_bytes()
    sanitized = b"__asan_init" in program or b"__tsan_init" in program
    return resource.RLIM_INFINITY if sanitized else limit


def needs_host_transport(test):
    """Skips a test of a feature that only the host transport has."""
    return unittest.skipUnless(has_host_transport(), "this build has plain Gloo's collectives, which "
                               "add in an order of their own, take memory of their own and end the "
                               "process at a message of another size (LOCKSTEP_HOST_TRANSPORT=OFF)")(test)


# A model that trains in a second, on a text that the test writes.
SMALL = """
model {{ num_layers: 1 hidden_size: 32 num_attention_heads: 2 seq_length: 32 }}
optimizer {{ lr: 0.01 lr_decay_style: "constant" }}
data {{ path: "{text}" }}
train {{ micro_batch_size: 2 global_batch_size: 8 train_iters: 12 eval_iters: 2 eval_interval: 6 }}
"""


# Makes the batch divisible by three ranks.
BATCH_OF_3 = ["--set", "train.global_batch_size=6"]


def clean_environment(**extra):
    """Returns the environment without a launcher's variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM", "OMPI", "PMIX",
             "LOCKSTEP_RUN_ID", "LOCKSTEP_SECRET")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    given = {k: str(v) for k, v in extra.items() if v is not None}
    return kept | {"OMP_NUM_THREADS": "1"} | given


@functools.cache
def megatron_python():
    """Returns a Python with Megatron Core and libtorch, or None."""
    for candidate in (os.environ.get("LOCKSTEP_MEGATRON_PYTHON"),
                      SOURCE / ".venv-megatron/bin/python"):
        if candidate and pathlib.Path(candidate).exists() and subprocess.run(
                [candidate, "-c", "import torch, megatron.core.datasets.helpers_cpp"],
                capture_output=True, check=False).returncode == 0:
            return str(candidate)
    return None


_reserved = []


def free_port():
    """Returns a loopback port that nobody listens at; the system gives it to nobody else during
    this test. A program that sets SO_REUSEADDR, as every store does, can listen at it, because the
    socket that reserves it does not listen."""
    holder = socket.socket()
    _reserved.append(holder)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder.getsockname()[1]


def run(*arguments, timeout=240, **environment):
    return subprocess.run([str(a) for a in arguments], capture_output=True, timeout=timeout,
                          env=clean_environment(**environment), cwd=SOURCE, check=False)


def torchrun(ranks, *arguments, timeout=240):
    return run(TORCHRUN, "--standalone", "--no-python", "--nproc-per-node", ranks, *arguments,
               timeout=timeout)


def launch(ranks, *arguments, timeout=240, **environment):
    """Like torchrun(), without the seconds that torchrun takes to load PyTorch. The result has the
    `statuses` of all ranks; its returncode is the one of them that is farthest from 0."""
    port = free_port()
    processes = [subprocess.Popen(
        [str(a) for a in arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=SOURCE,
        env=clean_environment(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=ranks,
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment))
        for rank in range(ranks)]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    statuses = [process.returncode for process in processes]
    result = subprocess.CompletedProcess(arguments, max(statuses, key=abs),
                                         *map(b"".join, zip(*outputs)))
    result.statuses = statuses
    return result


def metrics(folder):
    """Returns (iterations, validations) of a metrics.jsonl."""
    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
    return ([l for l in lines if "lm_loss" in l], [l for l in lines if "validation_loss" in l])


def byte_tokenizer(folder):
    """Writes a tokenizer.json whose 256 ids are bytes, and returns its name for data.tokenizer."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"model": {
        "type": "BPE", "byte_fallback": True, "merges": [],
        "vocab": {f"<0x{byte:02X}>": byte for byte in range(256)}}}))
    return f"hf:{path}"


def end(process):
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


class EndToEnd(unittest.TestCase):
    """Each test has a folder with a small configuration."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        text = self.folder / "text"
        text.write_text("".join(f"{i} squared is {i * i}. " for i in range(900)))
        self.config = self.folder / "small.textproto"
        self.config.write_text(SMALL.format(text=text))

    def wait_for_iterations(self, output):
        """Returns once a run has written its first iterations."""
        deadline = time.monotonic() + 60
        while not (output / "metrics.jsonl").exists() or len(metrics(output)[0]) < 3:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)

    def assert_failed(self, result, status, *parts):
        """The program, or every rank of launch(), ended with that status and said these parts."""
        error = result.stderr.decode()
        for found in getattr(result, "statuses", [result.returncode]):
            self.assertEqual(found, status, error)
        for part in parts:
            self.assertIn(part, error)


class Ranks(EndToEnd):
    """Ranks that are started by hand, without a launcher that would end the others."""

    def start(self, ranks, *arguments, of_rank=None, folder_of_rank=None, leave_out=(), port=None,
              **environment):
        """Starts `lockstep train` as each of `ranks` ranks except those in `leave_out`. `of_rank`
        gives additional arguments of single ranks, `folder_of_rank` their working directories,
        `environment` variables (None: not set) in addition to the launcher's."""
        port = port or free_port()
        processes = []
        for rank in range(ranks):
            if rank in leave_out:
                continue
            launcher = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank,
                        "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            processes.append(subprocess.Popen(
                [LOCKSTEP, "train", self.config, *arguments, *(of_rank or {}).get(rank, [])],
                env=clean_environment(**(launcher | environment)), stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, cwd=(folder_of_rank or {}).get(rank, SOURCE)))
            self.addCleanup(end, processes[-1])
        return processes
