"""Each call that reads a file fails in turn. A failed call ends the program with status 1 and the
name of the file. A call that is interrupted or gives fewer bytes changes nothing. A file that ends
before its size is an error, too, never a shorter file. docs/reliability.md has the counts."""

import base64
import collections
import json
import pathlib
import shutil
import unittest

from faults import calls, faults
from support import BUILD, LOCKSTEP, EndToEnd, run

READ_FILES = BUILD / "tests/read_files"
CALLS = ("open", "stat", "read", "list", "mmap", "lock")
TRIED = collections.Counter()
BORNE = collections.Counter()


def gpt2_alphabet():
    printed = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{byte: chr(byte) for byte in printed},
            **{byte: chr(256 + i) for i, byte in enumerate(others)}}


class ReadFaults(EndToEnd):
    def prepare(self):
        """Prepares the input for each run of a command."""

    def outcome(self, command, **environment):
        self.prepare()
        result = run(*command, **environment)
        self.assertIn(result.returncode, (0, 1, 2), (command, environment, result.stderr))
        return result

    def one(self, phase, command, path, rule, expected):
        """`expected`: the command's result without faults; None if it must fail."""
        action = rule.split(":")[1]
        result = self.outcome(command, **faults(f"{rule}:{path}"))
        if result.returncode == 0:
            good = expected is not None and self.result_of(result) == expected
        else:
            good = action not in ("EINTR", "short") and result.returncode == self.status and \
                path in result.stderr.decode()
        TRIED[phase, action] += 1
        BORNE[phase, action] += good
        if not good:
            error = result.stderr.decode().strip() or "another result"
            self.broken.append(f"{rule}:{path}: status {result.returncode}, {error}")

    def result_of(self, result):
        return result.stdout

    def each_call(self, phase, command, *paths, status=1, recovers=False):
        """`recovers`: the data can be had in another way, so an error may change nothing."""
        self.status = status
        self.broken = []
        log = self.folder / "calls"
        expected = self.outcome(command, **faults(count=log))
        self.assertEqual(expected.returncode, 0, expected.stderr)
        expected = self.result_of(expected)
        for path in paths:
            found = calls(log, path)
            self.assertGreater(sum(found.values()), 0, f"{command} does not touch {path}")
            for operation in CALLS:
                for n in range(1, found[operation] + 1):
                    where = f"{n}:{path}"
                    error = expected if recovers else None
                    self.one(phase, command, path, f"{operation}:EIO:{n}", error)
                    self.one(phase, command, path, f"{operation}:EINTR:{n}", expected)
                    if operation != "read":
                        continue
                    self.one(phase, command, path, f"read:short:{n}", expected)
                    # The call that sees the end of the file behaves as usual.
                    self.one(phase, command, path, f"read:end:{n}", expected)
            if found["read"]:
                self.one(phase, command, path, "read:short:1+", expected)
        log.unlink()
        self.assertEqual(self.broken, [], "\n".join([phase, *self.broken]))

    def dataset(self, name="set"):
        text = self.folder / f"{name} text"
        text.write_text("".join(f"{i} cubed is {i ** 3}. " for i in range(300)))
        prefix = self.folder / name
        result = run(LOCKSTEP, "data", "build", "--input", text, text, "--tokenizer", "byte",
                     "--output", prefix)
        self.assertEqual(result.returncode, 0, result.stderr)
        return prefix

    def checkpoint(self):
        output = self.folder / "run"
        result = run(LOCKSTEP, "train", self.config, "--output", output,
                     "--set", "train.train_iters=4", "--set", "train.eval_iters=0",
                     "--set", "checkpoint.save_interval=2")
        self.assertEqual(result.returncode, 0, result.stderr)
        return output

    def test_configuration(self):
        self.each_call("configuration", (LOCKSTEP, "plan", "memory", self.config, "--json"),
                       str(self.config), status=2)

    def test_text(self):
        self.each_call("text", (READ_FILES, "text", self.folder / "text"),
                       str(self.folder / "text"))

    def test_data_set(self):
        prefix = self.dataset()
        self.each_call("data set", (LOCKSTEP, "data", "inspect", prefix, "--json"),
                       f"{prefix}.idx", f"{prefix}.bin")

    def test_samples_and_their_index(self):
        prefix = self.dataset()
        cache = self.folder / "cache"
        command = (READ_FILES, "samples", prefix)
        self.each_call("data set", command, f"{prefix}.idx", f"{prefix}.bin")
        self.each_call("index cache, found", command, str(cache), recovers=True)
        self.prepare = lambda: shutil.rmtree(cache, ignore_errors=True)
        self.each_call("index cache, built", command, str(cache), recovers=True)

    def test_data_build(self):
        text, prefix = self.folder / "text", self.folder / "built"
        command = (LOCKSTEP, "data", "build", "--input", text, "--tokenizer", "byte",
                   "--output", prefix)

        def prepare():
            for suffix in (".idx", ".bin"):
                pathlib.Path(f"{prefix}{suffix}").unlink(missing_ok=True)
        self.prepare = prepare
        self.result_of = lambda result: (pathlib.Path(f"{prefix}.bin").read_bytes(),
                                         pathlib.Path(f"{prefix}.idx").read_bytes())
        self.each_call("data build, input", command, str(text))

    def test_tokenizers(self):
        alphabet = gpt2_alphabet()
        published, ranks = self.folder / "published", self.folder / "ranks"
        published.mkdir()
        names = {alphabet[byte]: byte for byte in range(256)}
        (published / "encoder.json").write_text(json.dumps(names | {"is": 256}))
        (published / "vocab.bpe").write_text("#version: 0.2\ni s\n")
        ranks.mkdir()
        (ranks / "gpt2.tiktoken").write_text("".join(
            f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)))
        folders = [(f"gpt2:{published}", published / "encoder.json", published / "vocab.bpe"),
                   (f"gpt2:{ranks}", ranks / "gpt2.tiktoken")]
        prefix = self.folder / "built"
        self.result_of = lambda result: pathlib.Path(f"{prefix}.bin").read_bytes()
        for tokenizer, *paths in folders:
            self.each_call("tokenizer", (LOCKSTEP, "data", "build", "--input", self.folder / "text",
                                         "--tokenizer", tokenizer, "--output", prefix),
                           *map(str, paths))

    def test_checkpoint(self):
        folder = self.checkpoint() / "checkpoint"
        step = folder / "step_4"
        paths = [str(folder), *(str(path) for path in step.iterdir())]
        for command in ((READ_FILES, "checkpoint", folder),
                        (LOCKSTEP, "checkpoint", "verify", folder),
                        (LOCKSTEP, "checkpoint", "inspect", folder)):
            read = [path for path in paths if "inspect" not in command or "rank_" not in path]
            self.each_call("checkpoint", command, *read)

    def test_folder_lock(self):
        folder = self.folder / "saves"
        # On leaving, the calls only decide whether the file goes.
        self.each_call("folder lock", (READ_FILES, "lock", folder), f"{folder}/lock", recovers=True)

    def test_metrics_of_a_run_that_goes_on(self):
        folder = self.folder / "out"
        folder.mkdir()
        path = folder / "metrics.jsonl"
        lines = "".join(f'{{"iteration":{i},"lm_loss":{i}.5}}\n' for i in range(1, 9))

        def prepare():
            path.write_text(lines + '{"iteration":9,"lm')
        self.prepare = prepare
        self.result_of = lambda result: path.read_text()
        command = (READ_FILES, "metrics", folder, 6)
        self.each_call("metrics", command, str(path))
        # Whatever fails, the lines of the earlier iterations are kept.
        kept = lines[:lines.index('{"iteration":7')]
        log = self.folder / "calls"
        self.outcome(command, **faults(count=log))
        both = f"{folder}/metrics."
        for operation, count in calls(log, both).items():
            for n in range(1, count + 1):
                for action in ("EIO", "kill", "kill-after"):
                    prepare()
                    run(*command, **faults(f"{operation}:{action}:{n}:{both}"))
                    good = path.exists() and path.read_text().startswith(kept)
                    TRIED["metrics, what is left", action] += 1
                    BORNE["metrics, what is left", action] += good
                    self.assertTrue(good, (operation, action, n))


def tearDownModule():
    for (phase, action), count in sorted(TRIED.items()):
        print(f"{phase}: {action}: {BORNE[phase, action]} of {count}")


if __name__ == "__main__":
    unittest.main()
