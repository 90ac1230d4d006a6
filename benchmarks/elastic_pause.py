"""How long a run pauses after it has lost a rank, compared with the time to send its bytes.
python benchmarks/elastic_pause.py BUILD [--losses 5] [--spares 0] [--sizes HIDDENxLAYERS ...]
    [--limit 2] [--link RATE]

Two data-parallel ranks keep copies in memory (train.elastic = dp, checkpoint.in_memory_replicas =
1). One is killed by SIGKILL, again and again. A new process takes its place or, with --spares, one
of that many spares; there must be a spare for each loss. The pause is the time from the kill to the
next finished iteration, less the time of an iteration.

The bytes: the new rank gets the whole state, and then each rank sends a copy of its half to the
other. Their time is measured by sending as many bytes over a loopback connection between two
processes into memory that was never touched before. With --link, for instance 1gbit, the loopback
has that rate, in a network namespace, which needs root. Both directions share the rate, so the
bytes are then the whole state twice. Run it in the root of the tree; `scripts/setup text` fetches
the text."""

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from rounds import show

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 300
CLONE_NEWNET = 0x40000000
SETTINGS = ["model.num_attention_heads=8", "model.seq_length=32", "train.micro_batch_size=1",
            "train.global_batch_size=2", "train.train_iters=1000000", "train.eval_iters=0",
            "train.log_interval=1", "train.sample_tokens=0", "train.elastic=dp",
            "checkpoint.in_memory_replicas=1"]


class Run:
    def __init__(self, build, settings, folder, spares):
        command = [build / "lockstep", "launch", "-n", 2, "--starter", "own", "--spares", spares,
                   "--max-restarts", 0 if spares else 99, "--", "train",
                   ROOT / "configs/tiny.textproto", "--output", folder]
        for field in settings:
            command += ["--set", field]
        self.metrics, self.told = folder / "metrics.jsonl", folder / "stderr"
        with self.told.open("wb") as error:
            self.process = subprocess.Popen([str(word) for word in command], stderr=error,
                                            stdout=subprocess.DEVNULL, cwd=ROOT,
                                            env=os.environ | {"OMP_NUM_THREADS": "1"})

    def wait(self, condition):
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(self.told.read_text()[-2000:])
            time.sleep(0.001)

    def lines(self):
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def wait_for_steps(self, count):
        wanted = self.lines() + count
        self.wait(lambda: self.lines() >= wanted)

    def seconds_of_step(self):
        self.wait_for_steps(6)
        lines = self.metrics.read_text().splitlines()[-5:]
        return statistics.median(json.loads(line)["iteration_ms"] for line in lines) / 1000

    def lose_a_rank(self, number):
        """Returns the seconds until the next finished iteration. Standard error tells: a line of
        metrics.jsonl may be of an iteration that is then repeated."""
        self.wait_for_steps(3)
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        told = self.told.stat().st_size
        os.kill(int(children.read_text().split()[number % 2]), signal.SIGKILL)
        begin = time.monotonic()
        finished = re.compile(rb"loaded the ranks' memory(.|\n)*\niteration +\d+/")
        self.wait(lambda: finished.search(self.told.read_bytes()[told:]))
        return time.monotonic() - begin

    def end(self):
        self.process.terminate()
        self.process.wait()


def receive(listener, size):
    with listener.accept()[0] as connection:
        memory, got = memoryview(mmap.mmap(-1, size)), 0
        while got < size:
            got += connection.recv_into(memory[got:])
        connection.send(b"!")


def seconds_of_bytes(size):
    listener = socket.create_server(("127.0.0.1", 0))
    receiver = multiprocessing.Process(target=receive, args=(listener, size))
    receiver.start()
    content = os.urandom(1 << 20)
    with socket.create_connection(listener.getsockname()) as connection:
        begin, left = time.monotonic(), size
        while left > 0:
            connection.sendall(content[:min(left, len(content))])
            left -= len(content)
        connection.recv(1)
        seconds = time.monotonic() - begin
    receiver.join()
    return seconds


def shape_loopback(rate):
    """For this process and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        sys.exit(f"--link: no network namespace: {os.strerror(ctypes.get_errno())}")
    for words in ("ip link set lo up", f"tc qdisc add dev lo root tbf rate {rate} burst 256kb "
                                       "latency 50ms"):
        subprocess.run(words.split(), check=True)
    os.environ["LOCKSTEP_DIRECT_MEMORY"] = "0"


def bytes_of_state(build, settings):
    """Weights and optimizer state, as the planner counts them."""
    words = [build / "lockstep", "plan", "memory", ROOT / "configs/tiny.textproto", "--json"]
    for field in settings:
        words += ["--set", field]
    result = subprocess.run([str(word) for word in words], check=True, cwd=ROOT,
                            capture_output=True)
    stage = json.loads(result.stdout)["stages"][0]
    return stage["parameter_bytes"] + stage["optimizer_bytes"]


def measure(options, size):
    hidden, layers = size.split("x")
    settings = [*SETTINGS, f"model.hidden_size={hidden}", f"model.num_layers={layers}"]
    state = bytes_of_state(options.build, settings)
    print(f"hidden size {hidden}, {layers} layers: a state of {state / 1e6:.1f} MB, "
          f"{options.losses} losses", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options.build, settings, pathlib.Path(folder), options.spares)
        try:
            step = run.seconds_of_step()
            pauses = [run.lose_a_rank(number) - step for number in range(options.losses)]
        finally:
            run.end()
    sent = 2 * state if options.link else state + state // 2
    of_bytes = [seconds_of_bytes(sent) for _ in range(options.losses)]
    show("an iteration, s", [step])
    show("the bytes, s", of_bytes)
    show("the pause, s", pauses)
    show("the pause / the bytes", [pause / statistics.median(of_bytes) for pause in pauses],
         options.limit)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--sizes", nargs="+", default=["128x4", "512x8", "1024x8"],
                        metavar="HIDDENxLAYERS")
    parser.add_argument("--limit", type=float, default=2)
    parser.add_argument("--link", metavar="RATE")
    options = parser.parse_args()
    options.build = options.build.resolve()
    if options.link:
        shape_loopback(options.link)
    for size in options.sizes:
        measure(options, size)


if __name__ == "__main__":
    main()
