"""lockstep data, and training on what it builds."""

import json
import os
import pathlib
import resource
import signal
import struct
import subprocess
import time
import unittest
import zlib

from support import LOCKSTEP, SOURCE, EndToEnd, clean_environment, metrics, run

GPT2 = SOURCE / "data/gpt2"


def read_dataset(prefix):
    """(dtype code, documents as lists of ids) of a set with one sequence a document."""
    idx = pathlib.Path(f"{prefix}.idx").read_bytes()
    data = pathlib.Path(f"{prefix}.bin").read_bytes()
    magic, version, code, sequences, bounds = struct.unpack_from("<9sQBQQ", idx)
    assert (magic, version, bounds) == (b"MMIDIDX\0\0", 1, sequences + 1), idx[:34]
    lengths = struct.unpack_from(f"<{sequences}i", idx, 34)
    pointers = struct.unpack_from(f"<{sequences}q", idx, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{bounds}q", idx, 34 + 12 * sequences)
    assert documents == tuple(range(bounds)) and len(idx) == 34 + 12 * sequences + 8 * bounds
    letter = {8: "H", 4: "i"}[code]
    return code, [list(struct.unpack_from(f"<{length}{letter}", data, pointer))
                  for length, pointer in zip(lengths, pointers)]


class Data(EndToEnd):
    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content)
        return path

    def build(self, *inputs, output="set", tokenizer="byte", flags=()):
        return run(LOCKSTEP, "data", "build", "--input", *inputs, "--tokenizer", tokenizer,
                   "--output", self.folder / output, *flags)

    def inspect(self, prefix):
        result = run(LOCKSTEP, "data", "inspect", prefix, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_bytes(self):
        texts = ["hello\n".encode(), "wörld €".encode(), b"", bytes(range(256))]
        paths = [self.write(f"{i}.txt", text) for i, text in enumerate(texts)]
        for flags, end in (((), []), (("--append-eod",), [256])):
            result = self.build(*paths, flags=flags)
            self.assertEqual((result.returncode, result.stdout), (0, b""), result.stderr)
            self.assertIn(b"4 documents", result.stderr)
            code, documents = read_dataset(self.folder / "set")
            self.assertEqual(code, 8)
            self.assertEqual(documents, [list(text) + end for text in texts])
            tokens = sum(map(len, documents))
            summary = self.inspect(self.folder / "set")
            crc = zlib.crc32((self.folder / "set.bin").read_bytes())
            expected = {"documents": 4, "sequences": 4, "tokens": tokens, "dtype": "uint16",
                        "bytes": 2 * tokens, "min_length": len(end), "max_length": 256 + len(end),
                        "min_id": 0, "max_id": 256 if end else 255, "crc32": f"{crc:08x}"}
            self.assertEqual(summary, summary | expected)
        text = run(LOCKSTEP, "data", "inspect", self.folder / "set").stdout.decode()
        self.assertRegex(text, r"documents +4\n")
        self.assertEqual(len(list(self.folder.glob("set*"))), 2)

    def test_files_larger_than_the_memory(self):
        line = b"All work and no play makes Jack a dull boy. "
        big = self.folder / "big"
        with open(big, "wb") as file:
            for _ in range(64):
                file.write(line * 2**15)
        sanitized = b"__asan_init" in LOCKSTEP.read_bytes()  # they reserve terabytes
        limit = resource.RLIM_INFINITY if sanitized else big.stat().st_size
        result = subprocess.run(
            [LOCKSTEP, "data", "build", "--input", big, "--tokenizer", "byte", "--output",
             self.folder / "set"], capture_output=True, env=clean_environment(), check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual((self.folder / "set.bin").stat().st_size, 2 * big.stat().st_size)

    def test_a_build_that_is_killed_leaves_no_pair(self):
        fifo = self.folder / "fifo"
        os.mkfifo(fifo)
        process = subprocess.Popen(
            [LOCKSTEP, "data", "build", "--input", fifo, "--tokenizer", "byte", "--output",
             self.folder / "set"], env=clean_environment(), stderr=subprocess.DEVNULL)
        with open(fifo, "wb") as writer:
            writer.write(bytes(3 << 20))
            writer.flush()
            deadline = time.monotonic() + 60
            while not any(path.stat().st_size for path in self.folder.glob("set.bin*")):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
        for name in ("set.idx", "set.bin"):
            self.assertFalse((self.folder / name).exists())
        self.assert_failed(run(LOCKSTEP, "data", "inspect", self.folder / "set"), 1, "set.idx")

    def test_errors_name_the_object(self):
        text = self.write("a", b"text")
        empty = self.write("empty", b"")
        missing = self.folder / "missing"
        self.assert_failed(self.build(text, missing), 1, f"'{missing}' cannot be read: No such")
        self.assert_failed(self.build(self.folder), 1, "Is a directory")
        self.assert_failed(self.build(empty), 1, "empty' is empty")
        self.assert_failed(self.build(text, output="none/set"), 1, "none/set.bin' cannot be made")
        self.assert_failed(self.build(text, tokenizer="word"), 2,
                           "--tokenizer: found 'word', allowed: byte, gpt2:FOLDER")
        self.assert_failed(self.build(text, tokenizer=f"gpt2:{missing}"), 1,
                           f"'{missing}/")
        self.assert_failed(run(LOCKSTEP, "data", "build", "--input", text), 2, "required")
        self.assert_failed(run(LOCKSTEP, "data", "make"), 2, "allowed: build, inspect")
        self.assertEqual(list(self.folder.glob("set*")), [])
        self.build(text)
        idx = (self.folder / "set.idx").read_bytes()
        self.write("set.idx", idx[:40])
        self.assert_failed(run(LOCKSTEP, "data", "inspect", self.folder / "set"), 1,
                           "set.idx': byte 38: pointers of the sequences")
        self.write("set.idx", idx)
        self.write("set.bin", b"\0" * 7)
        self.assert_failed(run(LOCKSTEP, "data", "inspect", self.folder / "set"), 1,
                           "set.bin': found 7 bytes, allowed: 8")

    def train(self, path, *overrides):
        output = self.folder / f"run{len(list(self.folder.iterdir()))}"
        result = run(LOCKSTEP, "train", self.config, "--output", output, "--set",
                     f"data.path={path}", *(x for o in overrides for x in ("--set", o)))
        return result, output

    def test_training_on_a_data_set_equals_training_on_the_text(self):
        text = self.folder / "text"
        self.build(text)
        curves = []
        for path in (text, self.folder / "set"):
            result, output = self.train(path)
            self.assertEqual(result.returncode, 0, result.stderr)
            curves.append([[line.get("lm_loss"), line.get("validation_loss")]
                           for lines in metrics(output) for line in lines])
        self.assertEqual(curves[0], curves[1])
        self.assertGreater(len(curves[0]), 10)

    def test_a_vocabulary_with_the_end_of_a_document(self):
        self.build(self.folder / "text", flags=("--append-eod",))
        result, _ = self.train(self.folder / "set", "model.vocab_size=257", "train.train_iters=3")
        self.assertEqual(result.returncode, 0, result.stderr)

    @unittest.skipUnless(GPT2.exists(), "scripts/setup gpt2 fetches the vocabulary")
    def test_gpt2(self):
        text = self.write("hello", "Hello world, it's 東京".encode())
        result = self.build(text, tokenizer=f"gpt2:{GPT2}", flags=("--append-eod",))
        self.assertEqual(result.returncode, 0, result.stderr)
        expected = [15496, 995, 11, 340, 338, 10545, 251, 109, 12859, 105, 50256]
        self.assertEqual(read_dataset(self.folder / "set"), (8, [expected]))
        text = self.folder / "text"
        result, output = self.train(text, f"data.tokenizer=gpt2:{GPT2}", "model.vocab_size=50257",
                                    "train.train_iters=2", "train.sample_tokens=3")
        self.assertEqual(result.returncode, 0, result.stderr)
        result = run(LOCKSTEP, "generate", output / "checkpoint", "--prompt", "3 squared",
                     "--max-tokens", 2)
        self.assertTrue(result.stdout.startswith(b"3 squared"), result.stderr)


if __name__ == "__main__":
    unittest.main()
