"""Training as a user runs it: one process, torchrun, signals, failures."""

import math
import signal
import subprocess
import time
import unittest

from support import (BATCH_OF_3, LOCKSTEP, EndToEnd, Ranks, clean_environment, end, metrics, run,
                     torchrun)


class Train(EndToEnd):
    def train(self, ranks, *arguments):
        output = self.folder / f"ranks{ranks}"
        command = [LOCKSTEP, "train", self.config, "--output", output, *arguments]
        result = run(*command) if ranks == 1 else torchrun(ranks, *command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return output, result

    def test_two_ranks_write_what_the_contract_says(self):
        output, result = self.train(2, "--set", "train.sample_tokens=20")
        iterations, validations = metrics(output)
        self.assertEqual([line["iteration"] for line in iterations], list(range(1, 13)))
        self.assertEqual(set(iterations[0]), {
            "iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "num_tokens",
            "iteration_ms", "tokens_per_second", "skipped"})
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
            iterations, validations = metrics(output)
            results.append(([line["lm_loss"] for line in iterations] +
                            [line["validation_loss"] for line in validations],
                            result.stdout, generated.stdout))
        for value, expected in zip(results[1][0], results[0][0], strict=True):
            self.assertAlmostEqual(value, expected, delta=1e-12 * expected)
        self.assertEqual(results[1][1:], results[0][1:])

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

    def test_a_second_run_keeps_the_metrics_of_the_first(self):
        output, _ = self.train(1)
        before = (output / "metrics.jsonl").read_bytes()
        self.train(1, "--set", "train.train_iters=2")
        self.assertEqual((output / "metrics.previous.jsonl").read_bytes(), before)
        self.assertEqual(len(metrics(output)[0]), 2)

    def start_endless(self, *arguments):
        process = subprocess.Popen(
            [LOCKSTEP, "train", self.config, "--set", "train.train_iters=1000000", *arguments],
            env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(end, process)
        return process

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
