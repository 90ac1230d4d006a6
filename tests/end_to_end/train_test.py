"""Training as a user runs it: one process, torchrun, signals, failures."""

import json
import math
import shutil
import signal
import subprocess
import time
import unittest

from faults import calls, faults
from support import (BATCH_OF_3, LOCKSTEP, EndToEnd, Ranks, byte_tokenizer, clean_environment, end,
                     launch, metrics, run, torchrun)


class Train(EndToEnd):
    def train(self, ranks, *arguments, launcher=launch):
        output = self.folder / f"ranks{ranks}"
        command = [LOCKSTEP, "train", self.config, "--output", output, *arguments]
        result = run(*command) if ranks == 1 else launcher(ranks, *command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return output, result

    def test_two_ranks_write_what_the_contract_says(self):
        output, result = self.train(2, "--set", "train.sample_tokens=20", launcher=torchrun)
        iterations, validations = metrics(output)
        self.assertEqual([line["iteration"] for line in iterations], list(range(1, 13)))
        self.assertEqual(set(iterations[0]), {
            "iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "num_tokens",
            "iteration_ms", "tokens_per_second", "skipped", "time_ms", "model_tflops_per_device",
            "memory_bytes", "peak_memory_bytes", "learning_rates"})
        self.assertEqual(list(iterations[0])[:9], [
            "iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "num_tokens",
            "iteration_ms", "tokens_per_second", "skipped"])
        for line in iterations:
            self.assertAlmostEqual(sum(line["time_ms"].values()) / line["iteration_ms"], 1)
            self.assertEqual("slowest_rank" in line, line["iteration"] == 10)
        self.assertAlmostEqual(iterations[0]["lm_loss"], math.log(256), delta=0.1)
        self.assertLess(iterations[-1]["lm_loss"], iterations[0]["lm_loss"] - 1)
        self.assertEqual(iterations[-1]["consumed_samples"], 96)
        self.assertEqual(iterations[-1]["num_tokens"], 8 * 32)
        self.assertEqual([line["iteration"] for line in validations], [6, 12])
        for line in validations:
            self.assertAlmostEqual(line["perplexity"], math.exp(line["validation_loss"]), places=9)
        # Results on standard output, progress on standard error.
        self.assertEqual(len(result.stdout), len("\n") + 20 + len("\n"))
        error = result.stderr.decode()
        self.assertIn("iteration  1/12 | loss 5.", error)
        self.assertIn("on 2 data-parallel ranks (cpu)", error)
        self.assertNotIn("\r", error)

    def test_the_number_of_ranks_does_not_matter(self):
        curves = []
        for ranks in (1, 2, 4):
            output, _ = self.train(ranks, "--set", "train.precision=fp64")
            iterations, validations = metrics(output)
            curves.append([line["lm_loss"] for line in iterations] +
                          [line["grad_norm"] for line in iterations] +
                          [line["validation_loss"] for line in validations])
        for curve in curves[1:]:
            for value, expected in zip(curve, curves[0], strict=True):
                self.assertAlmostEqual(value, expected, delta=1e-12 * expected)

    def test_the_distributed_optimizer_trains_and_saves_the_same(self):
        results = []
        for sharded in ("false", "true"):
            output, result = self.train(
                4 if sharded == "true" else 2, "--set", "train.precision=fp64",
                "--set", f"ddp.use_distributed_optimizer={sharded}",
                "--set", f"ddp.overlap_param_gather={sharded}",
                "--set", f"parallel.num_distributed_optimizer_instances={2 if sharded == 'true' else 1}",
                "--set", "train.sample_tokens=40")
            generated = run(LOCKSTEP, "generate", output / "checkpoint", "--prompt", "7 squared",
                            "--max-tokens", "30")
            self.assertEqual(generated.returncode, 0, generated.stderr.decode())
            iterations, validations = metrics(output)
            results.append(([line["lm_loss"] for line in iterations] +
                            [line["validation_loss"] for line in validations],
                            result.stdout, generated.stdout))
        for value, expected in zip(results[1][0], results[0][0], strict=True):
            self.assertAlmostEqual(value, expected, delta=1e-12 * expected)
        self.assertEqual(results[1][1:], results[0][1:])

    def sample(self, *settings, ranks=1):
        """Checks the final sample of a run; returns how often it read its saved weights."""
        arguments = [word for setting in ("train.sample_tokens=30", "train.sample_prompt=7 squared",
                                          *settings) for word in ("--set", setting)]
        count = self.folder / "calls"
        count.write_text("")
        output = self.folder / "sampled"
        shutil.rmtree(output, ignore_errors=True)
        command = [LOCKSTEP, "train", self.config, "--output", output, *arguments]
        environment = faults(count=count)
        result = (run(*command, **environment) if ranks == 1
                  else launch(ranks, *command, **environment))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        generated = run(LOCKSTEP, "generate", output / "checkpoint", "--prompt", "7 squared",
                        "--max-tokens", "30")
        self.assertEqual(generated.returncode, 0, generated.stderr.decode())
        self.assertEqual(result.stdout, generated.stdout, settings)
        return calls(count, ".safetensors")["read"]

    def test_the_sample_is_the_text_that_generate_writes(self):
        two_ranks = "parallel.tensor_model_parallel_size=2"
        self.assertGreater(self.sample("train.precision=bf16"), 0)
        self.assertGreater(self.sample(two_ranks, ranks=2), 0)
        self.assertGreater(self.sample("train.fp8=hybrid"), 0)
        # A rank with the whole model in the precision of `generate` need not load another one.
        self.assertEqual(self.sample(), 0)
        self.assertEqual(self.sample("train.precision=fp64"), 0)
        self.assertEqual(self.sample("ddp.use_distributed_optimizer=true",
                                     "ddp.overlap_param_gather=true", ranks=2), 0)

    def test_without_a_folder_the_sample_is_of_the_trained_model(self):
        output, _ = self.train(1)
        texts = []
        for iterations in (0, 6):
            result = run(LOCKSTEP, "train", self.config, *(word for setting in (
                f"checkpoint.load={output / 'checkpoint'}", "checkpoint.finetune=true",
                "train.precision=bf16", f"train.train_iters={iterations}", "optimizer.lr=0.05",
                "train.sample_tokens=30", "train.sample_prompt=7 squared")
                for word in ("--set", setting)))
            self.assertEqual(result.returncode, 0, result.stderr)
            texts.append(result.stdout)
        self.assertNotEqual(texts[0], texts[1])

    def test_the_sample_ends_with_its_document(self):
        lines = self.folder / "short.jsonl"
        lines.write_text("".join(json.dumps({"text": str(i % 7)}) + "\n" for i in range(6000)))
        build = run(LOCKSTEP, "data", "build", "--input", lines, "--tokenizer", "byte",
                    "--append-eod", "--output", self.folder / "short")
        self.assertEqual(build.returncode, 0, build.stderr)
        self.sample(f"data.path={self.folder / 'short'}", "model.vocab_size=257")
        _, result = self.train(1, "--set", f"data.path={self.folder / 'short'}", "--set",
                               "model.vocab_size=257", "--set", "train.sample_tokens=30")
        self.assertLess(len(result.stdout), 20)

    def test_a_sample_that_cannot_be_written_is_refused_before_the_first_iteration(self):
        for tokenizer, status, part in (
                ("hf:/nowhere/tokenizer.json", 1, "/nowhere/tokenizer.json"),
                (byte_tokenizer(self.folder), 2, "train.sample_prompt: found the id 122 with data.")):
            output = self.folder / "run"
            result = run(LOCKSTEP, "train", self.config, "--output", output, "--set", "data.mock=true",
                         "--set", "model.vocab_size=100", "--set", "train.sample_tokens=3", "--set",
                         "train.sample_prompt=Oz", "--set", f"data.tokenizer={tokenizer}")
            self.assert_failed(result, status, part)
            self.assertFalse((output / "metrics.jsonl").exists())

    def test_generate_continues_from_the_saved_weights(self):
        output, _ = self.train(1)
        command = [LOCKSTEP, "generate", output / "checkpoint", "--prompt", "7 squared",
                   "--max-tokens", "30"]
        first, again = run(*command), run(*command)
        other = run(*command, "--seed", "2")
        self.assertEqual(first.returncode, 0, first.stderr.decode())
        self.assertTrue(first.stdout.startswith(b"7 squared"))
        self.assertEqual(len(first.stdout), len("7 squared") + 30 + 1)
        self.assertEqual(first.stdout, again.stdout)
        self.assertNotEqual(first.stdout, other.stdout)

    def test_a_run_that_has_done_all_its_iterations_says_so(self):
        output, result = self.train(1)
        self.assertIn("on 1 data-parallel rank (cpu)", result.stderr.decode())
        before = (output / "metrics.jsonl").read_bytes()
        _, result = self.train(1, "--set", f"checkpoint.load={output / 'checkpoint'}")
        self.assertIn("nothing is left to train: train.train_iters is 12", result.stderr.decode())
        self.assertEqual((output / "metrics.jsonl").read_bytes(), before)

    def test_a_second_run_keeps_the_metrics_of_the_first(self):
        output, _ = self.train(1)
        before = (output / "metrics.jsonl").read_bytes()
        self.train(1, "--set", "train.train_iters=2")
        self.assertEqual((output / "metrics.previous.jsonl").read_bytes(), before)
        self.assertEqual(len(metrics(output)[0]), 2)
        second = (output / "metrics.jsonl").read_bytes()
        _, result = self.train(1, "--set", "train.train_iters=3")
        self.assertIn(f"the metrics of an earlier run are in '{output}/metrics.previous.2.jsonl'",
                      result.stderr.decode())
        self.assertEqual((output / "metrics.previous.jsonl").read_bytes(), before)
        self.assertEqual((output / "metrics.previous.2.jsonl").read_bytes(), second)

    def losses(self, output, name="metrics.jsonl"):
        lines = map(json.loads, (output / name).read_text().splitlines())
        return [(line["iteration"], line["lm_loss"]) for line in lines if "lm_loss" in line]

    def begin_another_run(self, output, iterations):
        """Starts a new run in a run's folder and kills it before it saves. Returns its lines."""
        aside = len(list(output.glob("metrics.previous*")))
        process = self.start_endless("--output", output, "--set", "train.seed=7", "--set",
                                     "train.eval_iters=0")
        while len(list(output.glob("metrics.previous*"))) == aside or \
                not (output / "metrics.jsonl").exists() or len(metrics(output)[0]) < iterations:
            self.assertIsNone(process.poll())
        process.kill()
        process.wait()
        lines = (output / "metrics.jsonl").read_bytes()
        return lines[:lines.rfind(b"\n") + 1]

    def go_on(self, output, iterations):
        return self.train(1, "--set", f"checkpoint.load={output / 'checkpoint'}", "--set",
                          f"train.train_iters={iterations}")[1].stderr.decode()

    def losses(self, output, name="metrics.jsonl"):
        lines = map(json.loads, (output / name).read_text().splitlines())
        return [(line["iteration"], line["lm_loss"]) for line in lines if "lm_loss" in line]

    def test_lines_of_two_runs_never_stand_in_one_file(self):
        output, _ = self.train(1, "--set", "train.train_iters=6")
        first = self.losses(output)
        # The other run ends before or after the iteration from which the first run resumes.
        for number, iterations in ((2, 3), (4, 30)):
            lines = self.begin_another_run(output, iterations)
            before = self.losses(output, f"metrics.previous{f'.{number - 1}' * (number > 2)}.jsonl")
            aside = output / f"metrics.previous.{number}.jsonl"
            self.assertFalse(aside.exists())
            told = self.go_on(output, len(first) + 2)
            self.assertIn(f"'{output}/metrics.jsonl' was from another run and is now '{aside}'",
                          told)
            self.assertTrue(aside.read_bytes().startswith(lines))
            found = self.losses(output)
            self.assertEqual(found[:len(first)], first, told)
            self.assertEqual(found[:len(before)], before)
            self.assertEqual([i for i, _ in found], list(range(1, len(first) + 3)))
            first = found
        # Nothing is reported or moved aside if the file belongs to this run.
        self.assertNotIn("metrics", self.go_on(output, len(first) + 2).replace(str(output), ""))
        self.assertEqual(len(list(output.glob("metrics*"))), 5)
        self.assertEqual(self.losses(output)[:len(first)], first)

    def test_a_run_that_finds_its_lines_nowhere_says_so(self):
        output, _ = self.train(1, "--set", "train.train_iters=6")
        (output / "metrics.jsonl").unlink()
        foreign = '{"iteration":6,"lm_loss":2.5}\n'
        (output / "metrics.jsonl").write_text(foreign)
        aside = output / "metrics.previous.jsonl"
        self.assertIn(f"'{output}/metrics.jsonl' was from another run and is now '{aside}'; the "
                      "lines up to iteration 6 are missing", self.go_on(output, 8))
        self.assertEqual(aside.read_text(), foreign)
        self.assertEqual([i for i, _ in self.losses(output)], [7, 8])

    def start_endless(self, *arguments, before=None):
        process = subprocess.Popen(
            [LOCKSTEP, "train", self.config, "--set", "train.train_iters=1000000", *arguments],
            env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=before)
        self.addCleanup(end, process)
        return process

    def test_a_signal_that_was_ignored_stays_ignored(self):
        output = self.folder / "ignores"
        process = self.start_endless(
            "--output", output, before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        self.wait_for_iterations(output)
        process.send_signal(signal.SIGINT)
        done = len(metrics(output)[0])
        while len(metrics(output)[0]) < done + 3:
            self.assertIsNone(process.poll())
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=60)[1].decode()
        self.assertEqual(process.returncode, 3, error)
        self.assertIn("SIGTERM: stopped", error)

    def test_a_signal_ends_after_the_running_iteration(self):
        for sent in ((signal.SIGTERM,), (signal.SIGINT,), (signal.SIGINT, signal.SIGTERM)):
            output = self.folder / "-".join(one.name for one in sent)
            process = self.start_endless("--output", output)
            self.wait_for_iterations(output)
            for one in sent:
                process.send_signal(one)
            error = process.communicate(timeout=60)[1].decode()
            self.assertEqual(process.returncode, 3, error)
            iterations, validations = metrics(output)
            self.assertRegex(error, f"SIG(INT|TERM): stopped after iteration {len(iterations)}\n")
            if len(sent) == 1:
                self.assertIn(f"{sent[0].name}: stopped", error)
            self.assertEqual(validations[-1]["iteration"], len(iterations))
            self.assertTrue((output / "checkpoint" / f"step_{len(iterations)}").is_dir())

    def test_a_signal_ends_the_sample(self):
        for sent in (signal.SIGTERM, signal.SIGINT):
            output = self.folder / sent.name
            process = self.start_endless("--output", output, "--set", "train.train_iters=1",
                                         "--set", "train.sample_tokens=1000000000")
            deadline = time.monotonic() + 60
            while process.poll() is None:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.1)
                if (output / "loss.svg").exists():  # written when everything is saved
                    process.send_signal(sent)
            error = process.communicate()[1].decode()
            self.assertEqual(process.returncode, 3, error)
            self.assertIn("stopped by a signal after training had ended\n", error)
            self.assertTrue((output / "checkpoint" / "step_1").is_dir())

    def test_a_stopped_run_that_saves_nowhere_says_so(self):
        process = self.start_endless("--set", "train.log_interval=1")
        while b"iteration " not in process.stderr.readline():
            self.assertIsNone(process.poll())
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=60)[1].decode()
        self.assertEqual(process.returncode, 3, error)
        self.assertIn("; nothing is saved without checkpoint.save or --output", error)


class Together(Ranks):
    def test_configurations_that_differ_end_all_ranks_by_name(self):
        processes = self.start(3, *BATCH_OF_3, of_rank={1: ["--set", "optimizer.lr=0.5"]})
        for process in processes:
            error = process.communicate(timeout=60)[1].decode()
            self.assertEqual(process.returncode, 2, error)
            self.assertIn("optimizer.lr: rank 0 has 0.01, rank 1 has 0.5", error)

    def test_any_ranks_signal_stops_all(self):
        output = self.folder / "stopped"
        processes = self.start(3, "--output", output, "--set", "train.train_iters=1000000",
                               *BATCH_OF_3)
        self.wait_for_iterations(output)
        processes[2].send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=60)[1].decode() for process in processes]
        self.assertEqual([process.returncode for process in processes], [3, 3, 3], errors)
        last = len(metrics(output)[0])
        self.assertIn(f"SIGINT: stopped after iteration {last}\n", errors[0])
        self.assertTrue((output / "checkpoint" / f"step_{last}").is_dir())

    def test_a_second_signal_ends_a_rank_that_waits_for_another(self):
        output = self.folder / "waiting"
        processes = self.start(2, "--output", output, "--set", "train.train_iters=1000000")
        self.wait_for_iterations(output)
        processes[1].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        processes[0].send_signal(signal.SIGINT)
        time.sleep(1.5)
        self.assertIsNone(processes[0].poll())
        processes[0].send_signal(signal.SIGINT)
        self.assertEqual(processes[0].wait(timeout=20), -signal.SIGINT)

    def test_when_a_rank_dies_the_others_end(self):
        output = self.folder / "died"
        processes = self.start(3, "--output", output, "--set", "train.train_iters=1000000",
                               *BATCH_OF_3,
                               "--set", "parallel.distributed_timeout_seconds=20")
        self.wait_for_iterations(output)
        processes[2].kill()
        for process in processes[:2]:
            error = process.communicate(timeout=40)[1].decode()
            self.assertEqual(process.returncode, 1, error)
            self.assertRegex(error, "lockstep: rank [01]: .* over group (dp-cp|world) ")


if __name__ == "__main__":
    unittest.main()
