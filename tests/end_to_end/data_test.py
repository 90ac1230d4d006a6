"""lockstep data, and training on the data sets that it builds."""

import json
import os
import pathlib
import pty
import resource
import signal
import struct
import subprocess
import time
import unittest
import zlib

from support import (LOCKSTEP, SMALL, SOURCE, EndToEnd, clean_environment, launch, memory_limit,
                     metrics, run)

GPT2 = SOURCE / "data/gpt2"


def read_dataset(prefix):
    """Returns (dtype code, documents as lists of ids) of a set with one sequence per document."""
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
        limit = memory_limit(big.stat().st_size)
        result = subprocess.run(
            [LOCKSTEP, "data", "build", "--input", big, "--tokenizer", "byte", "--output",
             self.folder / "set"], capture_output=True, env=clean_environment(), check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual((self.folder / "set.bin").stat().st_size, 2 * big.stat().st_size)

    def test_a_terminal_shows_a_bar(self):
        text = self.write("long", b"All work and no play. " * 4_000_000)
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            [LOCKSTEP, "data", "build", "--input", text, "--tokenizer", "byte", "--output",
             self.folder / "set"], env=clean_environment(), stderr=follower)
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the program has ended
                break
            shown += part
        os.close(leader)
        self.assertEqual(process.wait(), 0)
        self.assertRegex(shown, rb"\[#+\.*\] +[0-9]+ % \| 0 documents")
        self.assertIn(b"1 document | 88.0 of 88.0 MB | 88000000 tokens", shown)

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

    def test_a_name_that_is_no_text(self):
        prefix = os.fsdecode(b"set\xff")
        self.build(self.write("a", b"text"), output=prefix)
        self.assertEqual(self.inspect(self.folder / prefix)["prefix"], f"{self.folder}/set\ufffd")

    def test_errors_name_the_object(self):
        text = self.write("a", b"text")
        empty = self.write("empty", b"")
        missing = self.folder / "missing"
        self.assert_failed(self.build(text, missing), 1, f"'{missing}' cannot be read: No such")
        self.assert_failed(self.build(self.folder), 1, "Is a directory")
        self.assert_failed(self.build(empty), 1, "empty' is empty")
        self.assert_failed(self.build(text, output="none/set"), 1, "none/set.bin' cannot be "
                                                                   "created")
        self.assert_failed(self.build(text, tokenizer="word"), 2,
                           "--tokenizer: found 'word', allowed: byte, gpt2:FOLDER")
        self.assert_failed(self.build(text, tokenizer=f"gpt2:{missing}"), 1,
                           f"'{missing}/")
        self.assert_failed(run(LOCKSTEP, "data", "build", "--input", text), 2, "required")
        self.assert_failed(run(LOCKSTEP, "data", "build", "--input", text, "--tokenizer", "byte",
                               "--output", ""), 2, "--output: found '', allowed: a path")
        self.assert_failed(run(LOCKSTEP, "data", "make"), 2,
                           "allowed: build, inspect, merge")
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
        overrides = ([f"data.path={path}"] if path else []) + list(overrides)
        result = run(LOCKSTEP, "train", self.config, "--output", output,
                     *(x for o in overrides for x in ("--set", o)))
        return result, output

    def curve(self, output):
        iterations, validations = metrics(output)
        return ([line["lm_loss"] for line in iterations]
                + [line["validation_loss"] for line in validations])

    def write_config(self, paths, *fields):
        data = " ".join([f'path: "{path}"' for path in paths] + list(fields))
        text = SMALL.replace('data {{ path: "{text}" }}', f"data {{{{ {data} }}}}")
        self.config.write_text(text.format())

    def test_beside_a_text_a_data_set_is_text(self):
        text = self.write("a", b"".join(b"%d plus %d. " % (i, i) for i in range(700)))
        self.build(text)
        curves = []
        for path in (text, self.folder / "set"):
            self.write_config([path, self.folder / "text"])
            result, output = self.train(None)
            self.assertEqual(result.returncode, 0, result.stderr)
            curves.append(self.curve(output))
        self.assertEqual(curves[0], curves[1])
        self.assertGreater(len(curves[0]), 10)
        for part in ("set.idx", "set.bin"):
            self.write_config([self.folder / part])
            self.assert_failed(self.train(None)[0], 2, f"/{part}', a file of the data set '")

    def test_neither_ranks_nor_reading_ahead_change_the_samples(self):
        documents = [self.write(f"{i}.txt", (f"{i} times {i + 1} is {i * (i + 1)}. " * 9).encode())
                     for i in range(60)]
        self.build(*documents, self.folder / "text", flags=("--append-eod",))
        vocabulary = "model.vocab_size=257"
        result, output = self.train(self.folder / "set", vocabulary, "data.prefetch=0")
        self.assertEqual(result.returncode, 0, result.stderr)
        expected = self.curve(output)
        self.assertGreater(len(expected), 10)
        self.assertLess(expected[11], expected[0])
        self.assertEqual(len(list((self.folder / "cache").glob("set-*.samples"))), 1)
        result, output = self.train(self.folder / "set", vocabulary, "data.prefetch=5",
                                    f"data.cache_path={self.folder}/elsewhere")
        self.assertEqual(self.curve(output), expected, result.stderr)
        self.assertEqual(len(list((self.folder / "elsewhere").glob("set-*.samples"))), 1)
        output = self.folder / "two"
        result = launch(2, LOCKSTEP, "train", self.config, "--output", output, "--set",
                        f"data.path={self.folder / 'set'}", "--set", vocabulary)
        self.assertEqual(result.returncode, 0, result.stderr)
        for found, loss in zip(self.curve(output), expected, strict=True):
            self.assertAlmostEqual(found, loss, delta=2e-5 * loss)

    def test_blends(self):
        for name, word in (("a", b"one "), ("b", b"two ")):
            self.build(self.write(name, word * 4000), output=f"set_{name}")
        prefixes = [self.folder / "set_a", self.folder / "set_b"]
        curves = []
        for blend in ("0.5,0.5", "0.9,0.1"):
            self.write_config(prefixes, f'blend: "{blend}"')
            result, output = self.train(None)
            self.assertEqual(result.returncode, 0, result.stderr)
            curves.append(self.curve(output))
        self.assertEqual(len(curves[0]), len(curves[1]))
        self.assertNotEqual(curves[0], curves[1])
        result, _ = self.train(None, "data.blend=1,2,3")
        self.assert_failed(result, 2, "data.blend: found '1,2,3', allowed: a weight > 0 for each of")
        result, _ = self.train(None, "data.split=1,0")
        self.assert_failed(result, 2, f"data.split: the validation part of '{prefixes[0]}' has no token "
                           "for a sample, which takes more tokens than model.seq_length (32); allowed")
        self.write_config([prefixes[0], self.folder / "text"], 'blend: "1,1"')
        result, _ = self.train(None)
        self.assert_failed(result, 2, "data.blend: found '1,1', allowed where all of data.path are data "
                           "sets in Megatron's format")

    def test_the_batch_grows(self):
        result, output = self.train(self.folder / "text", "train.rampup_batch_size=2 2 20")
        self.assertEqual(result.returncode, 0, result.stderr)
        consumed = [line["consumed_samples"] for line in metrics(output)[0]]
        self.assertEqual(consumed, [2, 4, 6, 8, 12, 16, 22, 30, 38, 46, 54, 62])
        self.assertEqual([line["num_tokens"] for line in metrics(output)[0]],
                         [32 * (b - a) for a, b in zip([0] + consumed, consumed)])
        result, _ = self.train(self.folder / "text", "train.rampup_batch_size=2 4 20")
        self.assert_failed(result, 2, "train.rampup_batch_size: found '2 4 20', allowed: a START")
        result, _ = self.train(self.folder / "text", "train.rampup_batch_size=2,2,20")
        self.assert_failed(result, 2, "train.rampup_batch_size: found '2,2,20', allowed: START")

    def test_the_schedules_end_with_the_samples_of_the_run(self):
        self.config.write_text(self.config.read_text().replace("global_batch_size: 8", ""))
        for batches, consumed in (
                (["train.rampup_batch_size=2 2 20", "train.global_batch_size=8"],
                 [2, 4, 6, 8, 12, 16, 22, 30, 38, 46, 54, 62]),
                (["train.step_batch_size_schedule=0:8 24:2"],
                 [8, 16, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42])):
            result, output = self.train(self.folder / "text", *batches, "train.eval_iters=0",
                                        "optimizer.lr_decay_style=linear")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertNotIn(b"optimizer.lr_decay_iters", result.stderr)
            lines = metrics(output)[0]
            self.assertEqual([line["consumed_samples"] for line in lines], consumed)
            for line, before in zip(lines, [0] + consumed):
                self.assertAlmostEqual(line["learning_rate"], 0.01 * (1 - before / consumed[-1]),
                                       delta=1e-15)

    def test_iterations_that_count_other_batches_are_told(self):
        self.config.write_text(self.config.read_text().replace("global_batch_size: 8", ""))
        # 12 batches of 2 are the first three of 8.
        result, output = self.train(self.folder / "text", "train.step_batch_size_schedule=0:8 24:2",
                                    "optimizer.lr_decay_style=linear", "train.eval_iters=0",
                                    "optimizer.lr_decay_iters=12")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(b"optimizer.lr_decay_iters is 12 and train.train_iters 12: after iteration 3 "
                      b"the learning rate stays at optimizer.min_lr (0)\n", result.stderr)
        self.assertIn(b"optimizer.lr_decay_iters = 12 counts batches of 2: with "
                      b"train.step_batch_size_schedule the decay takes 3 iterations\n",
                      result.stderr)
        rates = [line["learning_rate"] for line in metrics(output)[0]]
        self.assertEqual(rates[3:], [0] * 9)
        self.assertAlmostEqual(rates[2], 0.01 / 3, delta=1e-15)

    def test_the_batch_changes_at_given_samples(self):
        text, schedule = self.folder / "text", "train.step_batch_size_schedule=0:2 6:4 14:8"
        result, _ = self.train(text, schedule)
        self.assert_failed(result, 2, "found '0:2 6:4 14:8', allowed without train.global_batch")
        self.config.write_text(self.config.read_text().replace("global_batch_size: 8", ""))
        folder = self.folder / "checkpoint"
        consumed = []
        for fields in (("train.train_iters=5",), (f"checkpoint.load={folder}",)):
            result, output = self.train(text, schedule, *fields, f"checkpoint.save={folder}")
            self.assertEqual(result.returncode, 0, result.stderr)
            consumed += [line["consumed_samples"] for line in metrics(output)[0]]
        self.assertEqual(consumed, [2, 4, 6, 10, 14, 22, 30, 38, 46, 54, 62, 70])
        # The configuration in the checkpoint is a valid one, too.
        result = run(LOCKSTEP, "evaluate", folder, "--input", text)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_a_resumed_run_goes_on_with_the_next_sample(self):
        for name in "ab":
            self.build(self.write(name, b"".join(b"%s%d " % (name.encode(), i * i)
                                                 for i in range(150))), output=f"set_{name}")
        # An epoch of the first set ends during the run.
        self.write_config([self.folder / "set_a", self.folder / "set_b"], 'blend: "3,1"')
        fields = ["train.rampup_batch_size=2 2 20", "train.eval_iters=0", "train.deterministic=true"]
        result, whole = self.train(None, *fields)
        self.assertEqual(result.returncode, 0, result.stderr)
        for iterations, load in ((5, ()), (9, ("part/checkpoint",)), (12, ("part/checkpoint",))):
            overrides = [*fields, f"train.train_iters={iterations}", f"data.prefetch={iterations % 4}",
                         *(f"checkpoint.load={self.folder / path}" for path in load)]
            result = run(LOCKSTEP, "train", self.config, "--output", self.folder / "part",
                         *(x for o in overrides for x in ("--set", o)))
            self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.curve(self.folder / "part"), self.curve(whole))

    def test_an_id_outside_the_vocabulary_ends_the_run(self):
        self.build(self.write("a", bytes(range(256)) * 30), flags=("--append-eod",))
        for prefetch in (0, 3):
            result, _ = self.train(self.folder / "set", f"data.prefetch={prefetch}",
                                   "model.vocab_size=256", "data.split=1,0", "train.eval_iters=0",
                                   "train.train_iters=40")
            self.assert_failed(result, 1, "set.bin': token 7680: found id 256, allowed: 0 to 255")

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
