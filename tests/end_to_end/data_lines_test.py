"""lockstep data build on JSON lines and compressed files, lockstep data merge, and training with
separate validation and test sets, or with none."""

import ctypes
import gzip
import json
import random
import resource
import subprocess
import unittest

from data_test import read_dataset
from support import LOCKSTEP, EndToEnd, clean_environment, launch, memory_limit, metrics, run


def zstd(text):
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compressBound.restype = library.ZSTD_compress.restype = ctypes.c_size_t
    room = library.ZSTD_compressBound(ctypes.c_size_t(len(text)))
    frame = ctypes.create_string_buffer(room)
    size = library.ZSTD_compress(frame, ctypes.c_size_t(room), text, ctypes.c_size_t(len(text)), 3)
    return frame.raw[:size]


def json_lines(texts):
    return "".join(json.dumps({"id": i, "text": text, "score": float("nan")}, ensure_ascii=i % 2 == 0)
                   + "\n" for i, text in enumerate(texts)).encode()


class DataLines(EndToEnd):
    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content)
        return path

    def build(self, *inputs, output="set", flags=()):
        return run(LOCKSTEP, "data", "build", "--input", *inputs, "--tokenizer", "byte", "--output",
                   self.folder / output, *flags)

    def test_texts_are_what_python_reads(self):
        rng = random.Random(2)
        alphabet = "abc \n\t\"\\/é東€😀\u2028\x00\x7f"
        texts = ["x" + "".join(rng.choices(alphabet, k=rng.randint(0, 60))) for _ in range(300)]
        lines = json_lines(texts)
        expected = [list(text.encode()) for text in texts]
        for name, content in (("a.jsonl", lines), ("b.jsonl", lines.replace(b"\n", b"\r\n")[:-2]),
                              ("a.jsonl.gz", gzip.compress(lines[:500]) + gzip.compress(lines[500:])),
                              ("a.jsonl.zst", zstd(lines[:500]) + zstd(lines[500:]))):
            result = self.build(self.write(name, content), flags=("--workers", 2))
            self.assertEqual((result.returncode, result.stdout), (0, b""), result.stderr)
            self.assertIn(b"300 documents", result.stderr)
            self.assertEqual(read_dataset(self.folder / "set"), (8, expected), name)
        result = self.build(self.write("whole.txt.zst", zstd(lines)))
        self.assertEqual(read_dataset(self.folder / "set"), (8, [list(lines)]), result.stderr)

    def test_a_line_larger_than_the_memory(self):
        part = b"All work and no play makes Jack a dull boy. " * 2**15
        path = self.folder / "big.jsonl.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(b'{"text": "')
            for _ in range(64):
                file.write(part)
            file.write(b'"}\n{"text": "b"}\n')
        limit = memory_limit(64 * len(part))
        result = subprocess.run(
            [LOCKSTEP, "data", "build", "--input", path, "--tokenizer", "byte", "--output",
             self.folder / "set"], capture_output=True, env=clean_environment(), check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual((self.folder / "set.bin").stat().st_size, 2 * (64 * len(part) + 1))

    def test_bad_lines(self):
        cases = [("no JSON", "line 2: byte 0: found 'n', allowed: an object"),
                 ('["text"]', "line 2: byte 0: found '[', allowed: an object"),
                 ('{"id": 3}', "line 2: found no key 'text'"),
                 ('{"text": 3}', "line 2: key 'text': found a number, allowed: a string"),
                 ('{"text": "\\ud800"}', "line 2: byte 16: found half of a surrogate pair"),
                 (b'{"text": "\xff"}', "line 2: byte 10: found the byte 0xFF, allowed: UTF-8"),
                 ('{"text": "a"', "line 2: byte 12: found the end of the line, allowed: a comma")]
        for bad, message in cases:
            bad = bad if isinstance(bad, bytes) else bad.encode()
            path = self.write("a.jsonl", json_lines(["one"]) + bad + b"\n" + json_lines(["two"]))
            self.assert_failed(self.build(path), 1, f"'{path}': {message}")
            self.assertEqual(list(self.folder.glob("set*")), [])
            result = self.build(path, output="skipped", flags=("--skip-bad",))
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(f"skipped 1 bad document:\n  '{path}': {message}", result.stderr.decode())
            self.assertEqual(read_dataset(self.folder / "skipped")[1], [[*b"one"], [*b"two"]])

    def test_torn_files(self):
        lines = json_lines(["one", "two", "three"])
        for name, content in (("a.jsonl.gz", gzip.compress(lines)), ("a.jsonl.zst", zstd(lines)),
                              ("a.txt.gz", gzip.compress(lines))):
            path = self.write(name, content[:-1])
            line = "" if "txt" in name else "line "
            self.assert_failed(self.build(path), 1, f"'{path}': {line}",
                               "the compressed data end too early, at byte")
            result = self.build(path, self.folder / "text", flags=("--skip-bad",))
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("skipped 1 bad document", result.stderr.decode())
        path = self.write("b.jsonl.gz", lines)
        self.assert_failed(self.build(path), 1, f"'{path}': line 1: the compressed data are damaged "
                           "at byte 2: incorrect header check")

    def test_keys_and_options(self):
        path = self.write("a.jsonl", b'{"text": "aa", "title": "A"}\n{"text": "b", "title": ""}\n')
        result = self.build(path, flags=("--json-keys", "text,title"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(read_dataset(self.folder / "set_text_document")[1], [[*b"aa"], [*b"b"]])
        self.assertFalse((self.folder / "set.idx").exists())
        self.build(path, flags=("--json-keys", "title", "--workers", "3"))
        summary = json.loads(run(LOCKSTEP, "data", "inspect", self.folder / "set", "--json").stdout)
        self.assertEqual((summary["documents"], summary["sequences"]), (2, 1))
        self.assert_failed(self.build(path, self.folder / "text", flags=("--json-keys", "a,b")), 2,
                           "--json-keys: found 'a,b', allowed: one key, because")
        json_file = self.write("b.json", b'{"text": "b"}\n')
        self.assert_failed(self.build(json_file, flags=("--json-keys", "text")), 2,
                           f"--json-keys: found 'text', and the input '{json_file}', which is read as")
        result = self.build(json_file)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"lockstep: '{json_file}' is read as one document", result.stderr.decode())
        self.assert_failed(self.build(path, flags=("--json-keys", "")), 2,
                           "--json-keys: found '', allowed: one or more keys")
        self.assert_failed(self.build(path, flags=("--workers", 0)), 2, "--workers", "found '0'")
        self.assert_failed(self.build(self.write("blank.jsonl", b"\n \n")), 1,
                           "blank.jsonl' has no text; allowed: files with text")

    def test_merge(self):
        for name in "ab":
            self.build(self.write(name, name.encode() * 3), output=f"set_{name}")
        result = run(LOCKSTEP, "data", "merge", "--input", self.folder / "set_a",
                     self.folder / "set_b", self.folder / "set_a", "--output", self.folder / "all")
        self.assertEqual((result.returncode, result.stdout), (0, b""), result.stderr)
        self.assertIn(b"3 sets | 3 documents | 3 sequences | 9 tokens", result.stderr)
        one = self.build(self.write("one", b"c"), output="one")
        self.assertIn(b"1 document | 1 of 1 B | 1 token | ", one.stderr)
        self.assertEqual(read_dataset(self.folder / "all"), (8, [[*b"aaa"], [*b"bbb"], [*b"aaa"]]))
        self.assert_failed(run(LOCKSTEP, "data", "merge", "--input", self.folder / "none",
                               "--output", self.folder / "all"), 1, "none.idx' cannot be read")
        self.assert_failed(run(LOCKSTEP, "data", "merge", "--input", self.folder / "all",
                               "--output", self.folder / "all"), 2, "--output: found")

    def train(self, *overrides, ranks=1):
        output = self.folder / f"run{len(list(self.folder.iterdir()))}"
        settings = [word for override in overrides for word in ("--set", override)]
        result = launch(ranks, LOCKSTEP, "train", self.config, "--output", output, *settings)
        return result, output

    def test_sets_of_their_own_for_validation_and_test(self):
        path = self.folder / "text"
        train, valid = self.write("train", path.read_bytes()), self.write("valid", b"1 and 2. " * 57)
        self.build(train, output="train_set")
        self.build(valid, output="valid_set")
        curves = []
        for paths in ((train, valid), (self.folder / "train_set", self.folder / "valid_set")):
            result, output = self.train(
                f"data.path={paths[0]}", f"data.valid_path={paths[1]}", f"data.test_path={paths[1]}")
            self.assertEqual(result.returncode, 0, result.stderr)
            iterations, validations = metrics(output)
            lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
            tests = [line for line in lines if "test_loss" in line]
            self.assertEqual([line["iteration"] for line in tests], [12])
            self.assertEqual(tests[0]["test_loss"], validations[-1]["validation_loss"])
            self.assertEqual(len(iterations), 12)
            self.assertIn(b"test loss", result.stderr)
            curves.append(validations)
            result = run(LOCKSTEP, "evaluate", output / "checkpoint", "--input", valid, "--json")
            self.assertAlmostEqual(json.loads(result.stdout)["loss"], tests[0]["test_loss"], places=5)
            self.assertEqual(run(LOCKSTEP, "plot", output).returncode, 0)
        for field, message in (("data.split=90,10", "data.split: found '90,10', allowed with"),
                               ("data.mock=true", "data.mock: found true, allowed: false beside")):
            self.assert_failed(self.train(f"data.valid_path={valid}", field)[0], 2, message)
        self.assert_failed(self.train(f"data.test_path={valid}")[0], 2,
                           "allowed beside data.valid_path, which is not set")
        self.assert_failed(self.train("data.valid_path=/nowhere/text")[0], 1,
                           "data.valid_path: '/nowhere/text' cannot be read")
        self.assert_failed(self.train(f"data.valid_path={self.write('short', b'short')}")[0], 2,
                           "data.valid_path: the validation text has no sample")

    def test_lines_without_a_task_for_them_are_refused(self):
        for field in ("path", "valid_path"):
            for name in ("lines.jsonl", "lines.jsonl.gz"):
                path = self.write(name, b"{}")
                self.assert_failed(
                    self.train(f"data.{field}={path}")[0], 2, f"data.{field}: found '{path}', "
                    "a file of JSON lines; allowed: the prefix of a data set that "
                    "`lockstep data build` makes of it, or conversations with train.task = sft")

    def test_made_up_samples_are_the_same_on_each_layout(self):
        curves = []
        for ranks, field in ((1, "data.path=/nowhere/text"), (2, "data.path=[]"),
                             (2, "parallel.tensor_model_parallel_size=2")):
            result, output = self.train("data.mock=true", field, ranks=ranks)
            self.assertEqual(result.returncode, 0, result.stderr)
            iterations, validations = metrics(output)
            curves.append([line["lm_loss"] for line in iterations]
                          + [line["validation_loss"] for line in validations])
        self.assertEqual(len(curves[0]), 14)
        self.assertLess(curves[0][11], curves[0][0])
        for other in curves[1:]:
            for found, loss in zip(other, curves[0], strict=True):
                self.assertAlmostEqual(found, loss, delta=2e-5 * loss)


if __name__ == "__main__":
    unittest.main()
