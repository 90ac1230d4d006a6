"""Compares data sets and samples with Megatron Core's own. Needs megatron-core 0.16.1, which
`scripts/setup megatron` installs."""

import json
import pathlib
import random
import subprocess
import tempfile
import unittest
import zlib

from support import BUILD, LOCKSTEP, clean_environment, megatron_python, run

PEER = pathlib.Path(__file__).with_name("megatron_peer.py")
PRINT_SAMPLES = BUILD / "tests/print_samples"
LIMITS = {"uint8": (0, 255), "int8": (-128, 127), "int16": (-2**15, 2**15 - 1),
          "int32": (-2**31, 2**31 - 1), "int64": (-2**53, 2**53), "uint16": (0, 2**16 - 1)}


def random_sets(rng):
    """Returns for each type the documents of a data set, as lists of sequences."""
    sets = {}
    for dtype, (low, high) in LIMITS.items():
        sets[dtype] = [[[rng.randint(low, high) for _ in range(rng.randint(1, 40))]
                        for _ in range(rng.randint(1, 3))] for _ in range(20)]
        sets[dtype].append([[low, high, 0]])
    return sets


def one_sequence_documents(rng, lengths):
    return [[rng.choices(range(60000), k=length)] for length in lengths]


@unittest.skipUnless(megatron_python(), "scripts/setup megatron installs Megatron Core")
class MegatronData(unittest.TestCase):
    """Megatron is started once, because that takes long. It writes data sets, reads ours and gives
    its samples."""

    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        rng = random.Random(1)
        cls.sets = random_sets(rng)
        writes = [cls.write_request(dtype, dtype, documents)
                  for dtype, documents in cls.sets.items()]
        cls.orders = []  # requests, and whether the samples are all in our first epoch
        for i, (documents, split, seq_length, seed) in enumerate(
                [(60, "949,51,0", 16, 1234), (9, "100,0,0", 7, 1), (200, "80,20,0", 33, 2**31)]):
            lengths = [rng.randint(1, 120) for _ in range(documents)]
            writes.append(cls.write_request(f"set{i}", "uint16",
                                            one_sequence_documents(rng, lengths)))
            per_epoch = sum(lengths) * 3 // 4 // seq_length
            for num_samples, first_epoch in ((per_epoch // 2, True), (3 * per_epoch, False)):
                cls.orders.append((cls.samples_request([f"set{i}"], None, split, seq_length, seed,
                                                       num_samples), first_epoch))
        writes += [cls.write_request(f"part{i}", "int32", one_sequence_documents(rng, [50] * 80))
                   for i in range(3)]
        cls.blend = cls.samples_request([f"part{i}" for i in range(3)], [0.3, 0.5, 0.2],
                                        "900,100,0", 20, 7, 300)
        cls.lines = [rng.choice(["", "a", "wörld €\n", "x" * 300]) * rng.randint(0, 4)
                     for _ in range(500)]
        writes.append({"call": "write_documents", "prefix": cls.prefix("lines"), "dtype": "uint16",
                       "documents": [[*text.encode(), 256] if text else [] for text in cls.lines]})
        writes.append({"call": "merge", "prefix": cls.prefix("merged"), "dtype": "int32",
                       "parts": [cls.prefix(name) for name in ("part0", "int32", "part2")]})
        cls.texts = [bytes(range(256)), "wörld €\n".encode(), b"a"]
        cls.build_ours()
        cls.marked = [rng.choices(range(5), k=rng.randint(2, 30)) for _ in range(200)]
        requests = [*writes, {"call": "read", "prefix": cls.prefix("ours")}, cls.blend,
                    {"call": "marks", "samples": cls.marked, "end_of_document": 2},
                    *(request for request, _ in cls.orders)]
        answers = cls.ask(requests)[len(writes):]
        cls.read_answer, cls.blend_answer, cls.marks_answer, *cls.order_answers = answers

    @classmethod
    def prefix(cls, name):
        return str(cls.folder / name)

    @classmethod
    def write_request(cls, name, dtype, documents):
        return {"call": "write", "prefix": cls.prefix(name), "dtype": dtype,
                "documents": documents}

    @classmethod
    def samples_request(cls, names, weights, split, seq_length, seed, num_samples):
        return {"call": "samples", "prefixes": [cls.prefix(name) for name in names],
                "weights": weights, "split": split, "seq_length": seq_length, "seed": seed,
                "num_samples": num_samples}

    @classmethod
    def build_ours(cls):
        for i, text in enumerate(cls.texts):
            (cls.folder / str(i)).write_bytes(text)
        run(LOCKSTEP, "data", "build", "--input", *(cls.folder / str(i) for i in range(3)),
            "--tokenizer", "byte", "--append-eod", "--output", cls.prefix("ours"))

    @classmethod
    def ask(cls, requests):
        answers = cls.folder / "answers.json"
        result = subprocess.run(
            [megatron_python(), PEER, answers], input=json.dumps(requests), text=True,
            capture_output=True, timeout=600, check=False,
            env=clean_environment(CUDA_VISIBLE_DEVICES=""))
        if result.returncode != 0:
            raise RuntimeError(result.stderr[-2000:])
        return json.loads(answers.read_text())

    def ours(self, request, blend=""):
        result = run(PRINT_SAMPLES, request["seq_length"], request["seed"], request["num_samples"],
                     request["num_samples"], request["split"], blend, *request["prefixes"])
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_data_sets_of_megatron_are_read(self):
        for dtype, documents in self.sets.items():
            result = run(LOCKSTEP, "data", "inspect", self.prefix(dtype), "--json")
            self.assertEqual(result.returncode, 0, result.stderr)
            summary = json.loads(result.stdout)
            sequences = [sequence for document in documents for sequence in document]
            expected = {"documents": 21, "sequences": len(sequences), "dtype": dtype,
                        "tokens": sum(map(len, sequences)),
                        "min_length": min(map(len, sequences)),
                        "max_length": max(map(len, sequences)),
                        "min_id": min(map(min, sequences)), "max_id": max(map(max, sequences))}
            crc = zlib.crc32(pathlib.Path(self.prefix(dtype) + ".bin").read_bytes())
            self.assertEqual(summary, summary | expected | {"crc32": f"{crc:08x}"})

    def test_megatron_reads_data_sets_of_ours(self):
        self.assertEqual(self.read_answer,
                         {"sequences": [list(text) + [256] for text in self.texts],
                          "documents": [0, 1, 2, 3], "dtype": "uint16"})

    def assert_same_files(self, ours, theirs):
        for end in (".bin", ".idx"):
            self.assertEqual(pathlib.Path(self.prefix(ours) + end).read_bytes(),
                             pathlib.Path(self.prefix(theirs) + end).read_bytes(), end)

    def test_json_lines_are_built_as_megatron_does(self):
        path = self.folder / "lines.jsonl"
        path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n"
                                for i, text in enumerate(self.lines)))
        for workers in (1, 2):
            result = run(LOCKSTEP, "data", "build", "--input", path, "--tokenizer", "byte",
                         "--append-eod", "--workers", workers, "--output", self.prefix("our_lines"))
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assert_same_files("our_lines", "lines")

    def test_sets_are_merged_as_megatron_does(self):
        result = run(LOCKSTEP, "data", "merge", "--input",
                     *(self.prefix(name) for name in ("part0", "int32", "part2")), "--output",
                     self.prefix("our_merged"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_same_files("our_merged", "merged")

    def test_g107_g115_samples_and_indices_are_megatrons(self):
        for (request, first_epoch), answer in zip(self.orders, self.order_answers, strict=True):
            found = self.ours(request)
            for name in ("documents", "starts", "order"):
                self.assertEqual(found["indices"][name], answer[name], name)
            self.assertEqual(found["samples"] == answer["samples"], first_epoch)

    def test_documents_in_samples_are_megatrons(self):
        result = subprocess.run([PRINT_SAMPLES, "marks", "2"], input=json.dumps(self.marked),
                                text=True, capture_output=True, check=True)
        for ours, theirs in zip(json.loads(result.stdout), self.marks_answer, strict=True):
            self.assertEqual(ours["positions"], theirs["positions"])
            self.assertEqual(ours["loss"], theirs["loss"])
            number = [i for i, length in enumerate(ours["documents"]) for _ in range(length)]
            hidden = [[key > query or number[key] != number[query] for key in range(len(number))]
                      for query in range(len(number))]
            self.assertEqual(hidden, theirs["hidden"])

    def test_g110_blends_are_megatrons(self):
        self.assertEqual(self.ours(self.blend, "0.3,0.5,0.2")["samples"],
                         self.blend_answer["samples"])


if __name__ == "__main__":
    unittest.main()
