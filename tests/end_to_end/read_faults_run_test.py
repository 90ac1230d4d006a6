"""Files that cannot be read, or that change, while a run goes: the program names them and ends, on
every rank, and nothing that was there is lost."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import unittest

from faults import calls, faults
from support import LOCKSTEP, Ranks, clean_environment, end, metrics, run

QUICK = ("--set", "train.train_iters=2", "--set", "train.eval_iters=0")


class ReadFaultsOfRuns(Ranks):
    def train(self, output, *settings, **environment):
        return run(LOCKSTEP, "train", self.config, *QUICK, "--output", output, *settings,
                   **environment)

    def dataset(self):
        prefix = self.folder / "set"
        result = run(LOCKSTEP, "data", "build", "--input", self.folder / "text", "--tokenizer",
                     "byte", "--output", prefix)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return prefix

    def checkpoint(self, *settings):
        output = self.folder / "run"
        result = self.train(output, "--set", "checkpoint.save_interval=1", *settings)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return output

    def fail_each_call(self, command, path, operations=("open", "stat", "read")):
        """Each call on `path`; those that fail, of those that there are."""
        log = self.folder / "calls"
        result = run(*command, **faults(count=log))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        found = calls(log, str(path))
        log.unlink()
        tried = 0
        for operation in operations:
            for n in range(1, found[operation] + 1):
                result = run(*command, **faults(f"{operation}:EIO:{n}:{path}"))
                self.assert_failed(result, 1, str(path), "Input/output error")
                tried += 1
        print(f"{command[1]}, {path.name}: EIO: {tried} of {tried}")
        return tried

    def test_a_text_of_training(self):
        text = self.folder / "text"
        tried = self.fail_each_call((LOCKSTEP, "train", self.config, *QUICK), text)
        self.assertGreaterEqual(tried, 5)

    def test_a_text_of_evaluate(self):
        output = self.checkpoint()
        text = self.folder / "input"
        shutil.copy(self.folder / "text", text)
        self.fail_each_call((LOCKSTEP, "evaluate", output / "checkpoint", "--input", text), text)

    def test_one_rank_ends_all(self):
        text, prefix = self.folder / "text", self.dataset()
        step = self.checkpoint() / "checkpoint" / "step_2"
        data = ("--set", f"data.path={prefix}", "--set", "train.train_iters=50")
        load = ("--set", f"checkpoint.load={step}", "--set", "train.train_iters=4")
        shard = step / "rank_00000.safetensors"
        tries = (("open:EIO:1", text, ()), ("read:EIO:1", text, ()),
                 ("open:EIO:1", f"{prefix}.idx", data), ("read:EIO:1", f"{prefix}.bin", data),
                 ("read:EIO:60+", f"{prefix}.bin", data),
                 ("open:EIO:1", step / "manifest.textproto", load), ("open:EIO:1", shard, load),
                 ("read:EIO:1", shard, load))
        for rule, path, settings in tries:
            processes = self.start(2, *QUICK, "--set", "parallel.distributed_timeout_seconds=30",
                                   *settings, **faults(f"{rule}:{path}", rank=1))
            for process in processes:
                error = process.communicate(timeout=60)[1].decode()
                self.assertEqual(process.returncode, 1, (rule, path, error))
                self.assertIn(f"'{path}' cannot be read", error)
                self.assertIn("rank 1", error)
        print(f"one of two ranks: EIO: {len(tries)} of {len(tries)}")

    def test_metrics_that_cannot_be_read_stay(self):
        output = self.checkpoint()
        path = output / "metrics.jsonl"
        before = path.read_bytes()
        for rule in ("open:EMFILE:1", "read:EIO:1", "stat:EIO:1"):
            result = self.train(output, "--set", f"checkpoint.load={output / 'checkpoint'}",
                                "--set", "train.train_iters=4", **faults(f"{rule}:{path}"))
            self.assert_failed(result, 1, f"'{path}' cannot be read")
            self.assertEqual(path.read_bytes(), before, rule)

    def test_a_checkpoint_that_cannot_be_read_is_not_skipped(self):
        folder = self.checkpoint() / "checkpoint"
        names = (folder, folder / "latest", folder / "step_2" / "manifest.textproto")
        for path in names:
            result = self.train(self.folder / "next", "--set", f"checkpoint.load={folder}",
                                "--set", "checkpoint.load_if_present=true",
                                **faults(f"stat:EIO:1:{path}"))
            self.assert_failed(result, 1, f"'{path}' cannot be read: Input/output error")
        self.assertFalse((self.folder / "next" / "metrics.jsonl").exists())

    def test_import(self):
        output = self.checkpoint("--set", "model.position_embedding_type=rope")
        model = self.folder / "model"
        result = run(LOCKSTEP, "checkpoint", "export", "--hf", model, output / "checkpoint")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        command = (LOCKSTEP, "checkpoint", "import", "--hf", model, self.folder / "imported")
        for name in ("config.json", "model.safetensors"):
            self.fail_each_call(command, model / name)
        config = json.loads((model / "config.json").read_text())
        for key, rows in (("vocab_size", 2 ** 40), ("intermediate_size", 2 ** 41)):
            (model / "config.json").write_text(json.dumps(config | {key: 2 ** 40}))
            self.assert_failed(run(*command), 1, str(model / "model.safetensors"), "found shape [",
                               f"allowed: [{rows}, 32]")
        text = json.dumps(config | {"max_position_embeddings": 2 ** 40})
        (model / "config.json").write_text(text)
        self.assert_failed(run(*command), 1, str(model / "config.json"), f"{2 ** 40} positions")

    def test_what_has_no_end_is_no_text(self):
        huge = self.folder / "huge"
        with open(huge, "wb") as file:
            file.truncate(1 << 43)  # it takes no room
        for path, reason in (("/dev/zero", "found neither a regular file nor a pipe"),
                             (huge, f"{(1 << 43) + 1} bytes do not fit into the memory")):
            result = run(LOCKSTEP, "train", self.config, *QUICK, "--set", f"data.path={path}")
            self.assert_failed(result, 1, f"data.path: '{path}' cannot be read: {reason}")
        result = run(LOCKSTEP, "data", "build", "--input", "/dev/zero", "--tokenizer", "byte",
                     "--output", self.folder / "set")
        self.assert_failed(result, 1, "'/dev/zero' cannot be read: found neither")

    def start_endless(self, *settings):
        output = self.folder / "endless"
        process = subprocess.Popen(
            [LOCKSTEP, "train", self.config, "--output", output, "--set",
             "train.train_iters=1000000", "--set", "train.eval_iters=0", *settings],
            env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(end, process)
        self.wait_for_iterations(output)
        return process, output

    def test_a_data_set_that_shrinks(self):
        prefix = self.dataset()
        index = pathlib.Path(f"{prefix}.idx")
        process, output = self.start_endless("--set", f"data.path={prefix}")
        os.truncate(index, 40)  # is in memory
        before = len(metrics(output)[0])
        while len(metrics(output)[0]) < before + 20:
            self.assertIsNone(process.poll())
        os.truncate(f"{prefix}.bin", 100)
        error = process.communicate(timeout=60)[1].decode()
        self.assertEqual(process.returncode, 1, error)
        self.assertIn(f"'{prefix}.bin' cannot be read at byte ", error)
        self.assertIn("it has become shorter", error)

    def test_a_cache_on_a_file_system_for_reading(self):
        prefix = self.dataset()
        cache = self.folder / "index cache"
        result = run(LOCKSTEP, "train", self.config, *QUICK, "--set", f"data.path={prefix}",
                     "--set", f"data.cache_path={cache}", **faults(f"mkdir:EROFS:1+:{cache}"))
        self.assert_failed(result, 1, f"'{cache}/set", "Read-only file system")

    def test_verify_beside_a_run_that_removes(self):
        folder = self.checkpoint() / "checkpoint"
        first, newest = folder / "step_1", folder / "step_2"
        shutil.rmtree(first)
        for path in (newest / "manifest.textproto", newest / "rank_00000.safetensors"):
            process = subprocess.Popen(
                [LOCKSTEP, "checkpoint", "verify", folder], stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env=clean_environment(**faults(f"open:stop:1:{path}")))
            self.addCleanup(end, process)
            os.waitpid(process.pid, os.WUNTRACED)
            # What a run with checkpoint.keep = 1 does meanwhile.
            later = folder / "step_3"
            shutil.copytree(newest, later)
            shutil.rmtree(newest)
            process.send_signal(signal.SIGCONT)
            told, error = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, error.decode())
            self.assertIn(str(later), told.decode())
            later.rename(newest)


if __name__ == "__main__":
    unittest.main()
