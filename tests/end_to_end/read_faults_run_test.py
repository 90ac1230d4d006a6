"""Files that cannot be read, or that change, during a run: the program names them and ends on every
rank, and no existing data is lost."""

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
        """Fails each call on `path` in turn; returns their number."""
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
        self.assertGreater(tried, 0, path)
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
            error_of = [process.communicate(timeout=60)[1].decode() for process in processes]
            for process, error in zip(processes, error_of):
                self.assertEqual(process.returncode, 1, (rule, path, error))
                self.assertIn(f"'{path}' cannot be read", error)
                self.assertIn("rank 1", error)
                self.assertNotIn("diverge at operation", error)
            self.assertRegex(error_of[0], rf"(?m)^lockstep: rank 0: rank 1: .*'{path}' cannot be read")
            self.assertEqual(error_of[0].count(str(path)), 1)
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
            file.truncate(1 << 43)  # a sparse file
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
        os.truncate(index, 40)  # already in memory
        before = len(metrics(output)[0])
        while len(metrics(output)[0]) < before + 20:
            self.assertIsNone(process.poll())
        os.truncate(f"{prefix}.bin", 100)
        error = process.communicate(timeout=60)[1].decode()
        self.assertEqual(process.returncode, 1, error)
        self.assertIn(f"'{prefix}.bin' cannot be read at byte ", error)
        self.assertIn("it was truncated", error)

    def test_a_cache_on_a_file_system_for_reading(self):
        prefix = self.dataset()
        cache = self.folder / "index cache"
        result = run(LOCKSTEP, "train", self.config, *QUICK, "--set", f"data.path={prefix}",
                     "--set", f"data.cache_path={cache}", **faults(f"mkdir:EROFS:1+:{cache}"))
        self.assert_failed(result, 1, f"'{cache}/set", "Read-only file system")

    def readers(self, folder):
        """Returns the commands that read a checkpoint. All read its manifest; those of the second
        list read its shard, too."""
        text, out = self.folder / "text", self.folder / "exported"
        inspect = (LOCKSTEP, "checkpoint", "inspect", folder)
        loading = [(LOCKSTEP, "checkpoint", "verify", folder),
                   (LOCKSTEP, "evaluate", folder, "--input", text),
                   (LOCKSTEP, "generate", folder, "--prompt", "1", "--max-tokens", "2"),
                   (LOCKSTEP, "checkpoint", "export", "--hf", out, folder)]
        return [inspect, *loading], loading

    def remove_while_it_stands(self, process, folder):
        """Waits until `process` is stopped, replaces its checkpoint by a later one, as a run with
        checkpoint.keep = 1 does, and continues the process."""
        newest, later = folder / "step_2", folder / "step_3"
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        self.assertTrue(os.WIFSTOPPED(status))
        shutil.copytree(newest, later)
        shutil.rmtree(newest)
        self.addCleanup(shutil.rmtree, later, ignore_errors=True)
        process.send_signal(signal.SIGCONT)

    def read_beside_a_run(self, command, folder, rule):
        newest, later = folder / "step_2", folder / "step_3"
        process = subprocess.Popen(
            [str(a) for a in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=clean_environment(**faults(rule)))
        self.addCleanup(end, process)
        self.remove_while_it_stands(process, folder)
        told, error = process.communicate(timeout=60)
        later.rename(newest)
        self.assertEqual(process.returncode, 0, (command, rule, error.decode()))
        if command[2] in ("inspect", "verify"):
            self.assertIn(str(later), told.decode())

    def test_readers_beside_a_run_that_removes(self):
        folder = self.checkpoint("--set", "model.position_embedding_type=rope") / "checkpoint"
        shutil.rmtree(folder / "step_1")
        newest = folder / "step_2"
        manifest, shard = newest / "manifest.textproto", newest / "rank_00000.safetensors"
        reading, loading = self.readers(folder)
        tries = [(command, f"{call}:stop:1:{manifest}") for command in reading
                 for call in ("stat", "open")]
        tries += [(command, f"open:stop:1:{shard}") for command in loading]
        for command, rule in tries:
            with self.subTest(command=command[1:3], rule=rule):
                self.read_beside_a_run(command, folder, rule)
        print(f"checkpoint removed while it is read: {len(tries)} of {len(tries)}")

    def test_a_run_that_loads_beside_one_that_removes(self):
        folder = self.checkpoint("--set", "train.precision=fp64") / "checkpoint"
        shutil.rmtree(folder / "step_1")
        newest, later = folder / "step_2", folder / "step_3"
        going_on = ("--set", "train.precision=fp64", "--set", "train.train_iters=4", "--set",
                    f"checkpoint.load={folder}", "--set", "checkpoint.load_if_present=true")
        result = self.train(self.folder / "expected", *going_on)
        self.assertEqual(result.returncode, 0, result.stderr)
        expected = [line["lm_loss"] for line in metrics(self.folder / "expected")[0]]
        for ranks, stopped in ((1, 0), (2, 0), (2, 1)):
            for rule in (f"open:stop:1:{newest}/manifest.textproto",
                         f"open:stop:1:{newest}/rank_00000.safetensors"):
                with self.subTest(ranks=ranks, stopped=stopped, rule=rule):
                    output = self.folder / f"{ranks}{stopped}{len(rule)}"
                    processes = self.start(ranks, *QUICK, *going_on, "--output", output,
                                           **faults(rule, rank=stopped))
                    self.remove_while_it_stands(processes[stopped], folder)
                    errors = [p.communicate(timeout=60)[1].decode() for p in processes]
                    later.rename(newest)
                    self.assertEqual([p.returncode for p in processes], [0] * ranks, errors)
                    self.assertIn(f"loaded {later}, iteration 2", errors[0])
                    for found, wanted in zip(metrics(output)[0], expected, strict=True):
                        self.assertAlmostEqual(found["lm_loss"], wanted, delta=1e-12)

    def test_a_checkpoint_that_is_gone_for_good_is_named(self):
        folder = self.checkpoint() / "checkpoint"
        shutil.rmtree(folder / "step_1")
        step = folder / "step_2"
        evaluate = (LOCKSTEP, "evaluate", folder, "--input", self.folder / "text")
        train = (LOCKSTEP, "train", self.config, *QUICK, "--set", f"checkpoint.load={folder}",
                 "--set", "checkpoint.load_if_present=true")
        for command, told in (
                (evaluate, f"'{folder}' holds no complete step_N/"),
                (train, f"checkpoint.load: '{step}' was removed while it was read, and '{folder}' "
                 "holds no other complete checkpoint")):
            process = subprocess.Popen(
                [str(a) for a in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=clean_environment(**faults(f"open:stop:1:{step}/rank_00000.safetensors")))
            self.addCleanup(end, process)
            os.waitpid(process.pid, os.WUNTRACED)
            step.rename(self.folder / "hidden")
            process.send_signal(signal.SIGCONT)
            error = process.communicate(timeout=60)[1].decode()
            (self.folder / "hidden").rename(step)
            self.assertEqual(process.returncode, 1, error)
            self.assertIn(told, error)


if __name__ == "__main__":
    unittest.main()
