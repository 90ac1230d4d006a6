"""Checkpoints as users have them: resume, other numbers of ranks, damage, evaluate, a full disk."""

import json
import math
import re
import resource
import shutil
import signal
import subprocess
import unittest

from support import (LOCKSTEP, EndToEnd, Ranks, clean_environment, end, launch, memory_limit,
                     metrics, run)


def losses(folder):
    return {line["iteration"]: line["lm_loss"] for line in metrics(folder)[0]}


class Checkpoints(EndToEnd):
    def train(self, name, *settings, ranks=1, status=0):
        output = self.folder / name
        command = [LOCKSTEP, "train", self.config, "--output", output]
        for setting in settings:
            command += ["--set", setting]
        result = run(*command) if ranks == 1 else launch(ranks, *command)
        self.assertEqual(result.returncode, status, result.stderr.decode())
        return output, result

    def check(self, *arguments, status=0):
        result = run(LOCKSTEP, *arguments)
        self.assertEqual(result.returncode, status, result.stderr.decode())
        return result

    def test_a_run_in_two_parts_is_the_run_in_one(self):
        for ranks, settings in (
                (1, ()), (2, ("ddp.use_distributed_optimizer=true", "checkpoint.async_save=true"))):
            whole, _ = self.train(f"whole {ranks}", *settings, ranks=ranks)
            name = f"parts {ranks}"
            load = f"checkpoint.load={self.folder / name / 'checkpoint'}"
            common = (*settings, load, "checkpoint.load_if_present=true",
                      "optimizer.lr_decay_iters=12")
            self.train(name, *common, "train.train_iters=7", ranks=ranks)
            parts, result = self.train(name, *common, ranks=ranks)
            self.assertIn("iteration 7", result.stderr.decode())
            self.assertEqual([line["iteration"] for line in metrics(parts)[0]],
                             list(range(1, 13)))
            self.assertEqual(losses(parts), losses(whole))
            self.assertEqual(metrics(parts)[1][-1]["validation_loss"],
                             metrics(whole)[1][-1]["validation_loss"])
            # Nothing is left to train: nothing changes.
            before = (parts / "metrics.jsonl").read_bytes()
            self.train(name, *common, ranks=ranks)
            self.assertEqual((parts / "metrics.jsonl").read_bytes(), before)

    def test_another_layout_goes_on(self):
        first, _ = self.train("first", "checkpoint.save_interval=6", "train.precision=fp64")
        load = f"checkpoint.load={first / 'checkpoint' / 'step_6'}"
        second, _ = self.train("second", load, "train.precision=fp64",
                               "ddp.use_distributed_optimizer=true", ranks=4)
        expected = losses(first)
        found = losses(second)
        self.assertEqual(list(found), list(range(7, 13)))
        for iteration, loss in found.items():
            self.assertAlmostEqual(loss, expected[iteration], delta=1e-12 * loss)

    def test_later_and_torn_lines_of_the_metrics_come_again(self):
        output, _ = self.train("out", "checkpoint.save_interval=5", "train.train_iters=8",
                               "optimizer.lr_decay_iters=12")
        expected = losses(output)
        shutil.rmtree(output / "checkpoint" / "step_8")
        with open(output / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"iteration":9,"lm_lo')
        self.train("out", f"checkpoint.load={output / 'checkpoint'}", "train.train_iters=8",
                   "optimizer.lr_decay_iters=12")
        self.assertEqual([line["iteration"] for line in metrics(output)[0]], list(range(1, 9)))
        self.assertEqual(losses(output), expected)

    def test_keep_interval_and_folder(self):
        save = self.folder / "elsewhere"
        self.train("out", f"checkpoint.save={save}", "checkpoint.save_interval=2",
                   "checkpoint.keep=3")
        self.assertEqual(sorted(p.name for p in save.iterdir()),
                         ["latest", "step_10", "step_12", "step_8"])

    def start_endless(self, output):
        """Starts a run; returns it once it trains, and the command that resumes it."""
        command = [LOCKSTEP, "train", self.config, "--output", output,
                   "--set", f"checkpoint.load={output / 'checkpoint'}",
                   "--set", "checkpoint.load_if_present=true"]
        process = subprocess.Popen([*command, "--set", "train.train_iters=100000"],
                                   env=clean_environment(), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)
        self.addCleanup(end, process)
        self.wait_for_iterations(output)
        return process, command

    def test_two_runs_do_not_share_a_folder(self):
        output = self.folder / "out"
        first, command = self.start_endless(output)
        before = metrics(output)[0]
        self.assert_failed(run(*command), 1, f"folder '{output / 'checkpoint'}' is taken",
                           str(first.pid))
        self.assertEqual(metrics(output)[0][:len(before)], before)
        self.assertIsNone(first.poll())
        first.kill()
        first.wait()
        self.assertEqual(run(*command).returncode, 0)

    def test_sigterm_saves_and_the_next_run_goes_on(self):
        output = self.folder / "out"
        process, command = self.start_endless(output)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=60), 3)
        stopped = len(metrics(output)[0])
        self.check("checkpoint", "verify", output / "checkpoint")
        result = run(*command, "--set", f"train.train_iters={stopped + 2}")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(list(losses(output)), list(range(1, stopped + 3)))

    def test_what_is_not_there(self):
        for path in ("nowhere", "."):
            result = run(LOCKSTEP, "train", self.config,
                         "--set", f"checkpoint.load={self.folder / path}")
            self.assert_failed(result, 1, "checkpoint.load: ", "holds no complete checkpoint")
        refused = self.folder / "refused"
        for output in (refused, refused / "", self.folder / "deep" / "refused"):
            self.assert_failed(run(LOCKSTEP, "train", self.config, "--output", output, "--set",
                                   f"checkpoint.load={self.folder / 'nowhere'}"), 1, "nowhere")
            self.assertFalse(refused.exists())
            self.assertFalse((self.folder / "deep").exists())
        for command in (("checkpoint", "verify"), ("checkpoint", "inspect"), ("generate",)):
            more = ("--prompt", "x") if command == ("generate",) else ()
            result = run(LOCKSTEP, *command, self.folder / "nowhere", *more)
            self.assert_failed(result, 1, "nowhere")
        result = run(LOCKSTEP, "train", self.config, "--set", "checkpoint.save_interval=2")
        self.assert_failed(result, 2, "checkpoint.save_interval: found 2")

    def test_inspect_and_verify(self):
        output, _ = self.train("out", "ddp.use_distributed_optimizer=true", ranks=2)
        folder = output / "checkpoint"
        found = json.loads(self.check("checkpoint", "inspect", folder, "--json").stdout)
        self.assertEqual(found["iteration"], 12)
        self.assertEqual(found["consumed_samples"], 96)
        self.assertEqual(found["layout"]["world_size"], 2)
        self.assertTrue(found["layout"]["distributed_optimizer"])
        shapes = {(t["name"], t["state"]): t["shape"] for t in found["tensors"]}
        self.assertEqual(shapes["embedding.word_embeddings.weight", ""], [256, 32])
        self.assertIn(("embedding.word_embeddings.weight", "exp_avg_sq"), shapes)
        self.assertIn("12", self.check("checkpoint", "inspect", folder).stdout.decode())
        found = json.loads(self.check("checkpoint", "verify", folder, "--json").stdout)
        self.assertEqual((found["ok"], found["damage"]), (True, []))
        (folder / "step_20.partial").mkdir()
        self.check("checkpoint", "verify", folder)

    def test_inspect_lists_tensors_in_the_order_of_the_model(self):
        output, _ = self.train("out", "model.num_layers=11", "model.add_bias_linear=true",
                               "model.untie_embeddings_and_output_weights=true",
                               "train.train_iters=1", "ddp.use_distributed_optimizer=true", ranks=2)
        found = json.loads(self.check("checkpoint", "inspect", output / "checkpoint",
                                      "--json").stdout)
        names = [tensor["name"] for tensor in found["tensors"]]
        parts = [re.sub(r"(decoder\.layers\.\d+).*", r"\1", name) for name in names]
        self.assertEqual(list(dict.fromkeys(parts)),
                         ["embedding.word_embeddings.weight",
                          *(f"decoder.layers.{i}" for i in range(11)),
                          "decoder.final_layernorm.weight", "output_layer.weight"])
        text = self.check("checkpoint", "inspect", output / "checkpoint").stdout.decode()
        keys = [f"optimizer.{tensor['state']}.{tensor['name']}" if tensor["state"]
                else tensor["name"] for tensor in found["tensors"]]
        self.assertEqual([line.split()[0] for line in text.splitlines() if "piece" in line], keys)

    def test_damage_is_found_and_named_by_whoever_reads_it(self):
        output, _ = self.train("out")
        folder = output / "checkpoint"
        shard = folder / "step_12" / "rank_00000.safetensors"
        whole = shard.read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 4
        shard.write_bytes(damaged)
        result = self.check("checkpoint", "verify", folder, "--json", status=1)
        found = json.loads(result.stdout)
        self.assertFalse(found["ok"])
        self.assertEqual(found["damage"][0]["file"], str(shard))
        # The block has many tensors, and its checksum cannot tell which one is damaged.
        self.assertRegex(result.stderr.decode(), r"tensor '[\w.]+': bytes 0 to \d+ do not match the "
                         r"checksum in the manifest \(\d+ other tensors in these bytes, too\)")
        commands = (("generate", folder, "--prompt", "7"),
                    ("evaluate", folder, "--input", self.folder / "text"),
                    ("train", self.config, "--set", f"checkpoint.load={folder}"))
        for command in commands:
            self.assert_failed(run(LOCKSTEP, *command), 1, str(shard), "tensor '", "bytes ")
        shard.write_bytes(whole[:-1])
        for command in (("checkpoint", "verify", folder), ("checkpoint", "inspect", folder),
                        *commands):
            self.assert_failed(run(LOCKSTEP, *command), 1, str(shard), f"allowed: {len(whole)}")
        shard.unlink()
        for command in ("verify", "inspect"):
            self.assert_failed(run(LOCKSTEP, "checkpoint", command, folder), 1, str(shard))
        manifest = shard.parent / "manifest.textproto"
        manifest.write_bytes(manifest.read_bytes().replace(b"iteration: 12", b"iteration: 13"))
        for command in (("checkpoint", "verify", folder), *commands):
            self.assert_failed(run(LOCKSTEP, *command), 1, str(manifest), "checksum")
        found = json.loads(self.check("checkpoint", "verify", folder, "--json", status=1).stdout)
        self.assertEqual((found["path"], found["ok"], found["iteration"], found["files"]),
                         (str(shard.parent), False, None, 0))
        self.assertEqual(found["damage"], [{"file": str(manifest), "tensor": "", "offset": 0,
                                            "message": found["damage"][0]["message"]}])
        self.assertIn("checksum", found["damage"][0]["message"])

    def test_a_doubtful_newest_checkpoint_is_noted_by_whoever_uses_it(self):
        """A bit of the first name in `latest` has flipped, so the checkpoint before it counts."""
        output, _ = self.train("out", "checkpoint.save_interval=6", "checkpoint.keep=2")
        folder = output / "checkpoint"
        requests = self.folder / "requests.jsonl"
        requests.write_text('{"context": "a", "continuation": "b"}\n')
        commands = [("checkpoint", "inspect", folder), ("checkpoint", "verify", folder),
                    ("checkpoint", "export", folder, "--hf", self.folder / "exported"),
                    ("evaluate", folder, "--input", self.folder / "text"),
                    ("generate", folder, "--prompt", "a", "--max-tokens", 1),
                    ("score", folder, "--input", requests)]
        latest = folder / "latest"
        for text, note in ((latest.read_text(), b""),
                           (latest.read_text().replace("step_12", "step_13", 1),
                            f"lockstep: '{latest}' begins with 'step_13', which is not there, so "
                            "step_6 counts as the newest; step_12 is complete too, but not listed. "
                            "If the file is damaged, remove it: then the highest step counts\n"
                            .encode())):
            latest.write_text(text)
            for command in commands:
                with self.subTest(command[:2], note=note):
                    result = run(LOCKSTEP, *command)
                    self.assertEqual(result.returncode, 0, result.stderr)
                    self.assertEqual(result.stderr, note)

    def test_evaluate_is_the_validation_of_the_run(self):
        text = (self.folder / "text").read_bytes()
        cut = len(text) * 9 // 10
        validation = self.folder / "validation"
        validation.write_bytes(text[cut:])
        output, _ = self.train("out", "train.eval_iters=100000", "train.precision=fp64")
        found = json.loads(self.check("evaluate", output / "checkpoint", "--input", validation,
                                      "--json").stdout)
        expected = metrics(output)[1][-1]["validation_loss"]
        self.assertEqual(set(found), {"loss", "perplexity", "tokens"})
        self.assertAlmostEqual(found["loss"], expected, delta=1e-12)
        self.assertAlmostEqual(found["perplexity"], math.exp(found["loss"]), places=9)
        self.assertEqual(found["tokens"], (len(text) - cut - 1) // 32 * 32)
        validation.write_bytes(b"x" * 32)
        self.assert_failed(run(LOCKSTEP, "evaluate", output / "checkpoint", "--input", validation),
                           1, "has 32 tokens, allowed: more than model.seq_length (32)")
        for path in (self.folder / "gone", self.folder):
            result = run(LOCKSTEP, "evaluate", output / "checkpoint", "--input", path)
            self.assert_failed(result, 1, f"--input: '{path}' cannot be read")

    def test_evaluate_holds_few_logits_of_a_large_vocabulary_at_a_time(self):
        # All logits of the 16,384 tokens that go through the model together take 10 GB.
        output, _ = self.train("out", "model.vocab_size=151936", "model.hidden_size=8",
                               "model.ffn_hidden_size=8", "train.train_iters=1",
                               "train.eval_iters=0")
        limit = memory_limit(3 * 2**30)
        result = subprocess.run(
            [LOCKSTEP, "evaluate", output / "checkpoint", "--input", self.folder / "text",
             "--json"], capture_output=True, env=clean_environment(), check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        found = json.loads(result.stdout)
        self.assertGreater(found["tokens"], 16384)
        self.assertAlmostEqual(found["loss"], math.log(151936), delta=0.5)

    def test_evaluate_says_that_it_ignores_documents(self):
        for number, fields in enumerate(((), ("data.eod_mask_loss",),
                                         ("data.reset_position_ids", "data.reset_attention_mask"))):
            output, _ = self.train(str(number), "model.vocab_size=257", "train.train_iters=2",
                                   *(f"{field}=true" for field in fields))
            told = self.check("evaluate", output / "checkpoint", "--input", self.folder / "text",
                              "--json")
            self.assertEqual(set(json.loads(told.stdout)), {"loss", "perplexity", "tokens"})
            note = (f"lockstep: the checkpoint's run set {', '.join(fields)}, but evaluate ignores "
                    "where documents end: ")
            self.assertEqual(told.stderr.decode().startswith(note), bool(fields), told.stderr)
            self.assertEqual(told.stderr.count(b"\n"), min(len(fields), 1), told.stderr)

    def test_a_full_disk_leaves_the_last_checkpoint(self):
        output, _ = self.train("out", "train.train_iters=4", "optimizer.lr_decay_iters=12")
        limit = 20_000  # bytes per file, less than a checkpoint needs
        command = [LOCKSTEP, "train", self.config, "--output", output, "--set",
                   f"checkpoint.load={output / 'checkpoint'}", "--set",
                   "checkpoint.save_interval=4"]

        def lower():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        result = subprocess.run(command, capture_output=True, env=clean_environment(), timeout=120,
                                preexec_fn=lower, check=False)
        self.assert_failed(result, 1, "no checkpoint after iteration 8, training continues: ",
                           "step_12.partial/rank_00000.safetensors' cannot be written: File too")
        self.assertEqual(list(losses(output)), list(range(1, 13)))
        self.assertEqual(sorted(p.name for p in (output / "checkpoint").iterdir()),
                         ["latest", "step_4"])
        self.check("checkpoint", "verify", output / "checkpoint")


class OtherFolders(Ranks):
    """Ranks with working directories of their own: the same path means another folder."""

    def test_ranks_that_see_different_checkpoints_end_with_their_numbers(self):
        folders = [self.folder / name for name in ("a", "b")]
        for folder in folders:
            folder.mkdir()
        for rank, found in ((0, "none"), (1, "another one")):
            trained = subprocess.run(
                [LOCKSTEP, "train", self.config, "--output", "out", "--set", f"train.seed={rank}"],
                cwd=folders[rank], env=clean_environment(), capture_output=True, check=False)
            self.assertEqual(trained.returncode, 0, trained.stderr)
            processes = self.start(2, "--set", "checkpoint.load=out/checkpoint",
                                   folder_of_rank=dict(enumerate(folders)))
            for process in processes:
                error = process.communicate(timeout=60)[1].decode()
                self.assertEqual(process.returncode, 1, error)
                self.assertIn("checkpoint 'out/checkpoint/step_12': rank 0 found it; rank 1 found "
                              f"{found}; allowed: a path under which all ranks see the same", error)


if __name__ == "__main__":
    unittest.main()
