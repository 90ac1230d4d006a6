"""The command line: help, unusable arguments, doctor, the configuration."""

import itertools
import json
import resource
import shutil
import subprocess
import unittest

from support import (LOCKSTEP, SOURCE, EndToEnd, clean_environment, launch, metrics, run,
                     torchrun)


class CommandLine(EndToEnd):
    def train(self, *arguments):
        return run(LOCKSTEP, "train", *arguments)

    def test_help_documents_every_field_with_its_unit(self):
        text = run(LOCKSTEP, "train", "--help").stdout.decode()
        schema = (SOURCE / "core/config/config.proto").read_text()
        fields = [line.split()[2] for line in schema.splitlines()
                  if line.strip().startswith(("optional int64", "optional double",
                                              "optional bool", "optional string", "repeated"))]
        self.assertGreater(len(fields), 60)
        for field in fields:
            self.assertIn(f".{field}\n", text)
        self.assertIn("--set", text)
        self.assertIn("in tokens", text)
        self.assertIn("(string, default \\n)", text)
        program = run(LOCKSTEP, "--help").stdout.decode()
        for command in ("train", "generate", "doctor"):
            self.assertIn(command, program)
        for command in ("generate", "doctor"):
            self.assertEqual(run(LOCKSTEP, command, "--help").returncode, 0)

    def test_help_tells_every_exit_status(self):
        text = " ".join(run(LOCKSTEP, "--help").stdout.decode().split())
        self.assertIn("0 done; 1 failed while running; 2 unusable arguments or configuration; "
                      "3 stopped early by SIGTERM or SIGINT, state saved; 4 stopped because the "
                      "training diverged", text)

    def closed(self, descriptors, *arguments):
        """Runs the program with some of the standard descriptors closed, as daemons do."""
        closing = " ".join(f"{d}{'<' if d == 0 else '>'}&-" for d in descriptors)
        return subprocess.run(["sh", "-c", f'exec "$@" {closing}', "sh", LOCKSTEP,
                               *map(str, arguments)], capture_output=True, cwd=SOURCE,
                              env=clean_environment(), check=False, timeout=240)

    def test_closed_descriptors_leave_the_files_of_a_run_alone(self):
        whole = self.folder / "whole"
        train = ("train", self.config, "--set", "train.sample_tokens=5", "--set",
                 "train.log_interval=1", "--output")
        self.assertEqual(self.closed((), *train, whole).returncode, 0)
        expected = [line["lm_loss"] for line in metrics(whole)[0]]
        for count in (1, 2, 3):
            for descriptors in itertools.combinations((0, 1, 2), count):
                with self.subTest(closed=descriptors):
                    output = self.folder / "".join(map(str, descriptors))
                    result = self.closed(descriptors, *train, output)
                    self.assertEqual(result.returncode, 0, result.stderr)
                    lines = (output / "metrics.jsonl").read_text().splitlines()
                    self.assertEqual(
                        [line["lm_loss"] for line in map(json.loads, lines) if "lm_loss" in line],
                        expected)
                    self.assertEqual(len(lines), len(expected) + 2)  # validations
                    verified = run(LOCKSTEP, "checkpoint", "verify", output / "checkpoint")
                    self.assertEqual(verified.returncode, 0, verified.stderr)
                    if 1 in descriptors and 2 not in descriptors:
                        self.assertIn("standard output is closed: the text of "
                                      "train.sample_tokens is not written",
                                      result.stderr.decode())

    def test_a_result_that_has_nowhere_to_go_is_an_error(self):
        for arguments in (("plan", "groups", "--world-size", 2),
                          ("train", self.config, "--print-config")):
            result = self.closed((1,), *arguments)
            self.assert_failed(result, 1,
                               "standard output cannot be written: Bad file descriptor")

    def test_print_config_can_be_read_back(self):
        first = self.train(self.config, "--set", "train.seed=7", "--set", "train.seed=8",
                           "--print-config")
        self.assertEqual(first.returncode, 0)
        self.assertIn(b"seed: 8", first.stdout)
        self.assertIn(b"adam_beta2: 0.999", first.stdout)
        again = self.folder / "again.textproto"
        again.write_bytes(first.stdout)
        self.assertEqual(self.train(again, "--print-config").stdout, first.stdout)

    def test_a_task_is_named_once(self):
        self.assert_failed(self.train(self.config, "--task", "sft", "--task", "pretrain"), 2,
                           "--task: found twice, allowed: once")

    def test_the_later_of_task_and_set_wins(self):
        template = ("--set", "data.chat_template=plain", "--print-config")
        for words, task in ((("--task", "sft", "--set", "train.task=pretrain"), b"pretrain"),
                            (("--set", "train.task=pretrain", "--task", "sft"), b"sft")):
            printed = self.train(self.config, *words, *template)
            self.assertIn(b'task: "' + task + b'"', printed.stdout, printed.stderr)

    def test_unusable_arguments_exit_2_and_are_named(self):
        set_field = lambda text: (self.config, "--set", text)
        cases = [
            ((), "CONFIG"),
            ((self.config, "--sett", "x"), "--sett"),
            ((self.config, "--outptu", "x"), "not expected: --outptu x; did you mean '--output'?"),
            ((self.config, "--zzzzzz"), "not expected: --zzzzzz; see `lockstep train --help`"),
            (set_field("model.num_layer=3"),
             "unknown field 'model.num_layer'; did you mean 'model.num_layers'?"),
            (set_field("model.num_layers=many"), "model.num_layers"),
            (set_field("model.num_layers=0"), "model.num_layers: found 0, allowed: >= 1"),
            (set_field("train.precision=fp8"), "train.precision"),
            (set_field("model.num_query_groups=3"), "model.num_query_groups"),
            (set_field("train.global_batch_size=7"), "train.global_batch_size: found 7"),
            (set_field("parallel.tensor_model_parallel_size=2"),
             "parallel.tensor_model_parallel_size (2)"),
            (set_field("parallel.expert_tensor_parallel_size=2"),
             "parallel.expert_tensor_parallel_size (2)"),
            (set_field("parallel.order=tp-xp"), "parallel.order = tp-xp"),
            ((self.config, "--print-config", "--set", "train.seed=1", "train.seed=2"),
             "not expected: train.seed=2"),
            ((self.config, "--output", ""), "--output: found '', allowed: a path"),
            (set_field("model.vocab_size=99"), "model.vocab_size: found 99"),
            ((self.folder / "none.textproto",),
             "none.textproto' cannot be read as a configuration: No such file"),
        ]
        for arguments, part in cases:
            with self.subTest(part):
                self.assert_failed(self.train(*arguments), 2, part)
        self.assert_failed(run(LOCKSTEP), 2)
        self.assert_failed(run(LOCKSTEP, "trian"), 2,
                           "unknown command 'trian'; did you mean 'train'?")
        self.assert_failed(run(LOCKSTEP, "plan", "frobnicate"), 2,
                           "unknown command 'frobnicate'; allowed: groups, buckets, ")
        self.assert_failed(run(LOCKSTEP, "generate", self.folder, "--prompt", ""), 1)
        self.assert_failed(run(LOCKSTEP, "train", self.config, RANK=1), 2, "WORLD_SIZE")

    def test_every_error_of_arguments_is_one_line_that_names_the_help(self):
        for arguments, told in (
                (("train",), "CONFIG is required; see `lockstep train --help`"),
                (("plan", "schedule", "--pipeline", "x"),
                 "--pipeline: found 'x', allowed: an integer of 64 bits; see `lockstep plan "
                 "schedule --help`"),
                (("plan", "groups", "--world-size"),
                 "--world-size: 1 required INT missing; see `lockstep plan groups --help`"),
                (("completion", "fish"),
                 "SHELL: found 'fish', allowed: bash, zsh; see `lockstep completion --help`"),
                (("launch", "-n", 0),
                 "--ranks: found '0', allowed: an integer >= 1 of 64 bits; see `lockstep launch "
                 "--help`"),
                (("plan", "groups", "--world-size", "010"),
                 "--world-size: found '010', allowed: an integer of 64 bits, without leading "
                 "zeros; see `lockstep plan groups --help`"),
                (("plan", "best", self.config, "--world-size", 2, "--machine", "dgx_h100",
                  "--memory", "nan"),
                 "--memory: found 'nan', allowed: a finite number > 0; see `lockstep plan best "
                 "--help`"),
                (("plan", "audit", self.config, "--world-size", 2, "--rank", "1,0,1"),
                 "--rank: found 1 twice, allowed: once"),
                (("data", "build", "--input", "a", "--tokenizer", "byte", "--output", "b",
                  "--workers", 10 ** 9),
                 "--workers: found '1000000000', allowed: an integer from 1 to 1024; see "
                 "`lockstep data build --help`"),
                (("checkpoint", "verify", ""),
                 "DIR: found '', allowed: a path; see `lockstep checkpoint verify --help`"),
                (("score", "here", "--input", ""),
                 "--input: found '', allowed: a path; see `lockstep score --help`"),
                ((), "A subcommand is required; see `lockstep --help`"),
                (("plan",), "A subcommand is required; see `lockstep plan --help`")):
            with self.subTest(arguments):
                result = run(LOCKSTEP, *arguments)
                self.assertEqual(result.returncode, 2)
                self.assertEqual(result.stderr.decode(), f"lockstep: {told}\n")

    def test_an_option_in_the_wrong_place_is_told_the_right_one(self):
        for arguments, told in (
                (("--json", "plan", "groups", "--world-size", 4),
                 "not expected: --json; --json belongs after `lockstep plan groups`"),
                (("--set=train.seed=1", "train", "tiny"),
                 "not expected: --set=train.seed=1; --set belongs after `lockstep train`"),
                (("--world-size", 4, "plan", "groups"),
                 "--world-size is required; not expected: --world-size 4; --world-size belongs "
                 "after `lockstep plan groups`"),
                (("train", "tiny", "--", "--set", "train.seed=2"),
                 "not expected: --set train.seed=2; --set belongs before `--`"),
                (("train", "tiny", "--set", "train.seed=1", "--", "--set", "train.seed=2"),
                 "not expected: --set train.seed=2; --set belongs before `--`")):
            with self.subTest(arguments):
                result = run(LOCKSTEP, *arguments)
                self.assertEqual(result.returncode, 2)
                self.assertEqual(result.stderr.decode(), f"lockstep: {told}\n")

    def test_values_that_are_refused_are_told_what_is_allowed(self):
        largest = 2**63 - 1
        for arguments, told in (
                (("train", self.config, "--print-config=maybe"),
                 "--print-config: found 'maybe', allowed: no value, true or false"),
                (("train", self.config, "--profile", ""),
                 "--profile: found '', allowed: FIRST:LAST"),
                (("generate", "here", "--seed", largest + 1),
                 f"--seed: found '{largest + 1}', allowed: an integer >= 0 and <= {largest}"),
                (("plan", "groups", "--world-size", 2, "--tensor", 2, "--tensor", 1),
                 "--tensor: found twice, allowed: once; see `lockstep plan groups --help`"),
                (("plan", "groups", *3 * ("--world-size", 2)),
                 "--world-size: found 3 times, allowed: once"),
                (("checkpoint", "export", "--hf", "a", "b", "--dtype", "fp16"),
                 "--dtype: found 'fp16', allowed: bf16, fp32; see `lockstep checkpoint export "
                 "--help`")):
            with self.subTest(arguments):
                self.assert_failed(run(LOCKSTEP, *arguments), 2, f"lockstep: {told}")
        text = " ".join(run(LOCKSTEP, "generate", "--help").stdout.decode().split())
        self.assertIn(f"from 0 to {largest}", text)

    def test_a_byte_order_mark_begins_no_field(self):
        text = self.config.read_bytes()
        plain = self.train(self.config, "--print-config").stdout
        self.config.write_bytes(b"\xef\xbb\xbf" + text)
        marked = self.train(self.config, "--print-config")
        self.assertEqual((marked.returncode, marked.stdout), (0, plain), marked.stderr)
        self.config.write_bytes(b"\xef\xbb\xbfx: 1\n")
        self.assert_failed(self.train(self.config), 2, f"{self.config}:1:2: unknown field 'x'")

    def test_what_runs_in_one_process_refuses_to_be_a_rank(self):
        for command in ("evaluate", "score"):
            words = (LOCKSTEP, command, self.folder, "--input", self.config)
            allowed = f"allowed: 1, because {command} runs in one process"
            result = launch(2, *words)
            self.assert_failed(result, 2, f"environment variable WORLD_SIZE: found 2, {allowed}")
            self.assertEqual(result.stdout, b"")
            self.assert_failed(run(*words, RANK=0), 2, "environment variable WORLD_SIZE: not set")
            slurm = {"SLURM_PROCID": 0, "SLURM_STEP_ID": 0, "SLURM_JOB_ID": 7, "SLURM_LOCALID": 0,
                     "SLURM_STEP_NUM_TASKS": 3, "SLURM_STEP_TASKS_PER_NODE": 3, "SLURM_NODEID": 0}
            self.assert_failed(run(*words, **slurm), 2, f"SLURM_STEP_NUM_TASKS: found 3, {allowed}")

    def test_libraries_in_the_current_directory_are_not_loaded(self):
        for name in ("libz.so.1", "libstdc++.so.6", "libtorch_cpu.so", "liblockstep_core.so"):
            (self.folder / name).write_text("no library")
        for arguments in (("--version",), ("train", self.config, "--print-config")):
            result = subprocess.run([LOCKSTEP, *arguments], cwd=self.folder, capture_output=True,
                                    check=False)
            self.assertEqual(result.returncode, 0, result.stderr)

    def test_what_goes_into_a_folder_needs_one(self):
        for arguments, told in (
                (("--set", "train.tensorboard=true"),
                 "train.tensorboard: --output is missing, which names the folder of the event"),
                (("--profile", "1:2"), "--profile: --output is missing")):
            with self.subTest(told):
                self.assert_failed(self.train(self.config, *arguments), 2, told)

    def test_options_may_stand_before_the_configuration(self):
        result = self.train("--set", "train.seed=7", self.config, "--print-config")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn(b"seed: 7", result.stdout)

    def test_an_unknown_option_is_named_though_another_is_missing(self):
        self.assert_failed(run(LOCKSTEP, "plan", "groups", "--worldsize", 8), 2,
                           "--world-size is required; not expected: ", "--worldsize",
                           "; did you mean '--world-size'?")
        self.assert_failed(run(LOCKSTEP, "plan", "memory", "--jsn"), 2, "not expected: --jsn")

    def test_numbers_of_generate(self):
        for option, found, allowed in (
                ("--max-tokens", 10**20, "an integer >= 0"), ("--seed", "-1", "an integer >= 0"),
                ("--temperature", "nan", "a finite number >= 0"),
                ("--timeout", "0", "a number of seconds from 0.001 to 3153600000 (100 years)")):
            with self.subTest((option, found)):
                result = run(LOCKSTEP, "generate", self.folder, "--prompt", "a", option, found)
                self.assert_failed(result, 2, f"{option}: found '{found}', allowed: {allowed}")
                self.assertEqual(result.stdout, b"")

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "wb") as full:
            result = subprocess.run([LOCKSTEP, "train", self.config, "--print-config"], stdout=full,
                                    stderr=subprocess.PIPE, env=clean_environment(), check=False)
        self.assert_failed(result, 1, "standard output cannot be written: No space left on device")
        with open("/dev/full", "wb") as full:
            result = subprocess.run([LOCKSTEP, "--help"], stdout=full, stderr=subprocess.PIPE,
                                    env=clean_environment(), check=False)
        self.assert_failed(result, 1, "standard output cannot be written: No space left on device")

    def test_a_limit_of_file_sizes_is_an_error(self):
        prefix = self.folder / "limited"
        result = subprocess.run(
            [LOCKSTEP, "data", "build", "--input", SOURCE / "README.md", "--tokenizer", "byte",
             "--output", prefix], capture_output=True, env=clean_environment(), check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
        self.assert_failed(result, 1, str(prefix), "cannot be written")
        self.assertEqual(list(self.folder.glob("limited*")), [])

    def test_syntax_errors_have_line_and_column(self):
        broken = self.folder / "broken.textproto"
        broken.write_text("model {\n  num_layers: 2\n  hidden_sise: 3\n}\n")
        self.assert_failed(self.train(broken), 2, "broken.textproto:3:", "hidden_sise")

    def test_missing_files_exit_1_and_are_named(self):
        self.assert_failed(self.train(self.config, "--set", "data.path=/nowhere/text"), 1,
                           "/nowhere/text")
        self.assert_failed(run(LOCKSTEP, "generate", self.folder / "gone", "--prompt", "a"), 1,
                           "gone")
        self.assert_failed(run(LOCKSTEP, "generate", self.folder, "--prompt", "a"), 1,
                           "holds no complete step_N/")

    def test_errors_of_libtorch_come_without_its_frames(self):
        arguments = (LOCKSTEP, "train", self.config, "--set", f"model.vocab_size={10 ** 14}")
        result = run(*arguments)
        self.assert_failed(result, 1, "can't allocate memory")
        self.assertEqual(result.stderr.count(b"\n"), 1, result.stderr)
        self.assertIn(b"frame #0", run(*arguments, TORCH_SHOW_CPP_STACKTRACES=1).stderr)

    def test_an_error_under_a_launcher_names_the_rank(self):
        result = torchrun(2, LOCKSTEP, "train", self.config, "--set", "data.path=/nowhere/text")
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(result.stderr.decode(), "lockstep: rank [01]: .*/nowhere/text")

    def check_direct_memory(self, reported):
        off = run(LOCKSTEP, "doctor", "--json", LOCKSTEP_DIRECT_MEMORY=0)
        wrong = run(LOCKSTEP, "doctor", "--json", LOCKSTEP_DIRECT_MEMORY=2)
        self.assertEqual(off.returncode, 0)
        off = json.loads(off.stdout)["network"]["direct_memory"]
        if "LOCKSTEP_HOST_TRANSPORT=OFF" in reported:  # this build does not have the variable
            self.assertEqual(reported, "no (this build has no host transport, "
                             "LOCKSTEP_HOST_TRANSPORT=OFF); ranks of this host send messages")
            self.assertEqual((off, wrong.returncode), (reported, 0))
            return
        self.assertEqual(off, "no (LOCKSTEP_DIRECT_MEMORY is 0); ranks of this host send messages")
        self.assertEqual(wrong.returncode, 1)
        self.assertIn("found '2', allowed: 0 or 1", json.loads(wrong.stdout)["self_test"])

    def test_memory_comes_in_huge_pages_unless_the_user_decides(self):
        program = self.folder / "lockstep"
        shutil.copy(LOCKSTEP, program)
        told = self.folder / "libexec/lockstep"
        told.parent.mkdir()
        told.write_text("#!/bin/sh\nprintf %s \"$GLIBC_TUNABLES\"\n")
        told.chmod(0o755)
        for given, expected in ((None, "glibc.malloc.hugetlb=1"),
                                ("", "glibc.malloc.hugetlb=1"),
                                ("glibc.malloc.check=0",
                                 "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
                                ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0")):
            with self.subTest(given):
                environment = {} if given is None else {"GLIBC_TUNABLES": given}
                result = run(program, "doctor", **environment)
                self.assertEqual(result.stdout.decode(), expected, result.stderr)

    def test_doctor(self):
        result = run(LOCKSTEP, "doctor", "--json")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        report = json.loads(result.stdout)
        self.assertTrue(report["ok"])
        self.assertEqual(report["versions"]["libtorch"], "2.11.0")
        self.assertEqual(set(report["versions"]), {"lockstep", "libtorch", "cuda", "nccl", "gloo",
                                                   "protobuf", "fmt"})
        self.assertTrue(report["network"]["gloo_address"])
        self.assertRegex(report["network"]["direct_memory"],
                         "^(ranks of this host read each other's memory$|no [(])")
        self.assertGreaterEqual(report["devices"]["cpu_cores"], 1)
        self.assertIn(b"self_test: two ranks reduced", run(LOCKSTEP, "doctor").stdout)
        self.check_direct_memory(report["network"]["direct_memory"])
        broken = run(LOCKSTEP, "doctor", "--json", RANK="x", WORLD_SIZE=2)
        self.assertEqual(broken.returncode, 1)
        self.assertIn("RANK", json.loads(broken.stdout)["launch"]["error"])
        no_text = run(LOCKSTEP, "doctor", "--json", MASTER_ADDR="\udcff", MASTER_PORT=29511, RANK=0,
                      WORLD_SIZE=2)
        self.assertIn("\ufffd", json.dumps(json.loads(no_text.stdout), ensure_ascii=False))


if __name__ == "__main__":
    unittest.main()
