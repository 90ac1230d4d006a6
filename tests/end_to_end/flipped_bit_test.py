"""A bit flips in the memory of one rank of a running training: train.replica_check_interval names
the rank and the tensor, and no checkpoint has the wrong weight."""

import contextlib
import json
import re
import time
import unittest

from support import LOCKSTEP, Ranks, run

NAME = "decoder.layers.0.mlp.linear_fc1.weight"
# No step changes these weights, so a checkpoint has what the memory holds.
STILL = ("optimizer.lr=0", "optimizer.min_lr=0", "train.train_iters=1000000", "train.eval_iters=0",
         "train.global_batch_size=6", "checkpoint.save_interval=5", "checkpoint.keep=2",
         "parallel.distributed_timeout_seconds=60")


def checkpoints_of(output):
    """Returns the folders of the complete checkpoints of a run."""
    return [manifest.parent for manifest in (output / "checkpoint").glob("step_*/manifest.textproto")
            if manifest.parent.suffix != ".partial"]


def tensor_bytes(step, name):
    """Returns a tensor of a checkpoint in which the shard of some rank has it whole."""
    for path in sorted(step.glob("rank_*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entry = json.loads(data[8:8 + length]).get(name)
        if entry:
            first, last = entry["data_offsets"]
            return data[8 + length + first:8 + length + last]
    raise LookupError(f"no {name} in {step}")


def flip_in_memory(pid, pattern):
    """Flips a bit of the first byte of every occurrence of `pattern` in a process's memory; returns
    the number of occurrences."""
    count = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            area, permissions = line.split()[:2]
            if not permissions.startswith("rw") or "[v" in line:
                continue
            start, end = (int(word, 16) for word in area.split("-"))
            if end - start > 1 << 33:  # a sanitizer's own memory
                continue
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except OSError:
                continue
            for match in re.finditer(re.escape(pattern), data):
                memory.seek(start + match.start())
                memory.write(bytes([data[match.start()] ^ 4]))
                count += 1
    return count


class FlippedBit(Ranks):
    def train(self, output, *fields):
        settings = [word for field in (*STILL, *fields) for word in ("--set", field)]
        return self.start(3, "--output", output, *settings)

    def saved_weight(self, output):
        """Returns the bytes of the weight from a checkpoint of a run that goes on saving and
        removing old ones."""
        deadline = time.monotonic() + 120
        while True:
            for step in checkpoints_of(output):
                with contextlib.suppress(FileNotFoundError, LookupError):
                    return tensor_bytes(step, NAME)
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def test_it_is_named_and_not_saved(self):
        output = self.folder / "run"
        processes = self.train(output, "train.replica_check_interval=1")
        weight = self.saved_weight(output)
        self.assertGreater(flip_in_memory(processes[1].pid, weight[64:320]), 0)
        told = [process.communicate(timeout=120)[1].decode() for process in processes]
        for process, text in zip(processes, told):
            self.assertEqual(process.returncode, 1, text)
            self.assertRegex(text, f"copies of '{NAME}' differ: rank 1 differs from ranks 0, 2|"
                             f"changed without a write: rank 1: '{NAME}'")
        complete = checkpoints_of(output)
        self.assertTrue(complete)
        for step in complete:
            self.assertEqual(tensor_bytes(step, NAME), weight)
        verified = run(LOCKSTEP, "checkpoint", "verify", output / "checkpoint")
        self.assertEqual(verified.returncode, 0, verified.stderr)

    def test_without_the_check_the_run_goes_on(self):
        output = self.folder / "run"
        processes = self.train(output)
        weight = self.saved_weight(output)
        self.assertGreater(flip_in_memory(processes[1].pid, weight[64:320]), 0)
        time.sleep(2)
        self.assertEqual([process.poll() for process in processes], [None] * 3)


if __name__ == "__main__":
    unittest.main()
