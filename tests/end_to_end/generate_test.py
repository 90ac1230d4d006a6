"""Text from a model, and log-likelihoods of texts: `lockstep generate` and `lockstep score`."""

import json
import os
import subprocess
import sys
import unittest

from support import (LOCKSTEP, SOURCE, EndToEnd, byte_tokenizer, clean_environment, free_port,
                     launch, run)

# A stand-in for lm-evaluation-harness: it asks twice and prints the answers.
HARNESS = {
    "lm_eval/__init__.py": """
from types import SimpleNamespace
def simple_evaluate(model, tasks):
    texts = [("3 squared ", "is 9."), ("", "caf\\u00e9"), ("a\\u2028\\u2029\\u0085", "b")]
    asked = [SimpleNamespace(args=pair) for pair in texts]
    return {"results": {"tasks": tasks, "answers": model.loglikelihood(asked)}}
""",
    "lm_eval/api/__init__.py": "",
    "lm_eval/api/model.py": "class LM:\n    pass\n",
}


class Generate(EndToEnd):
    def setUp(self):
        super().setUp()
        self.checkpoint = self.folder / "checkpoint"
        result = run(LOCKSTEP, "train", self.config, "--output", self.folder, "--set",
                     f"checkpoint.save={self.checkpoint}", "--set", "model.vocab_size=257")
        self.assertEqual(result.returncode, 0, result.stderr.decode())

    def check(self, *command):
        result = run(LOCKSTEP, *command)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout.decode(errors="replace")

    def generate(self, *options, tokens=50):
        return self.check("generate", self.checkpoint, "--max-tokens", tokens, *options)

    def test_each_of_several_prompts_gets_the_text_that_it_gets_alone(self):
        prompts = ["3 squared", "{}", "[7, 8]", "a much longer prompt that fills the window of it"]
        alone = [self.generate("--prompt", prompt) for prompt in prompts]
        options = [word for prompt in prompts for word in ("--prompt", prompt)]
        self.assertEqual(self.generate(*options), "".join(alone))
        lines = self.folder / "prompts"
        lines.write_text("\n".join(prompts) + "\n")
        self.assertEqual(self.generate("--input", lines), "".join(alone))
        found = json.loads(self.generate("--input", lines, "--json"))
        self.assertEqual([one["prompt"] + one["text"] + "\n" for one in found], alone)
        self.assertEqual(json.loads(self.generate("--prompt", "{}", "--json"))[0], found[1])
        lines.write_bytes("\r\n".join(prompts).encode() + b"\r\n")
        self.assertEqual(self.generate("--input", lines), "".join(alone))

    def test_a_line_without_a_prompt_is_named(self):
        lines = self.folder / "prompts"
        for text in (b"a\n\nb\n", b"a\r\n\r\nb\r\n"):
            lines.write_bytes(text)
            result = run(LOCKSTEP, "generate", self.checkpoint, "--prompt", "x", "--input", lines)
            self.assert_failed(result, 1, "prompts': line 2: found no token in '', allowed: ")
            self.assertEqual(result.stdout, b"")
        result = run(LOCKSTEP, "generate", self.checkpoint, "--prompt", "")
        self.assert_failed(result, 2, "--prompt: found no token in '', allowed: at least one")

    def test_a_prompt_with_an_id_that_the_model_lacks_is_named(self):
        small = self.folder / "small"
        result = run(LOCKSTEP, "train", self.config, "--output", small, "--set", "data.mock=true",
                     "--set", "model.vocab_size=100", "--set", "train.train_iters=1", "--set",
                     f"data.tokenizer={byte_tokenizer(self.folder)}")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        what = "found the id 122 in 'Oz', allowed: 0 to 99 (model.vocab_size - 1)"
        command = (LOCKSTEP, "generate", small / "checkpoint", "--max-tokens", "2")
        self.assert_failed(run(*command, "--prompt", "Oz"), 2, f"--prompt: {what}")
        lines = self.folder / "prompts"
        lines.write_text("O\nOz\n")
        self.assert_failed(run(*command, "--input", lines), 1, f"prompts': line 2: {what}")

    def test_a_token_that_the_tokenizer_lacks_never_comes(self):
        larger = self.folder / "larger"
        result = run(LOCKSTEP, "train", self.config, "--output", larger, "--set",
                     f"checkpoint.save={larger}/checkpoint", "--set", "model.vocab_size=2000",
                     "--set", "train.train_iters=1", "--set", "train.sample_tokens=20")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        text = self.check("generate", larger / "checkpoint", "--prompt", "a", "--max-tokens", 100,
                          "--temperature", 5, "--top-k", 0)
        self.assertGreater(len(text), 60)

    def test_a_stop_string_ends_the_text_before_it(self):
        whole = self.generate("--prompt", "3 squared", "--temperature", "0")
        text = whole[len("3 squared"):-1]
        for stop in (text[5:8], text[:1], "not in the text"):
            for more in ((), ("--stop", "neither")):
                found = self.generate("--prompt", "3 squared", "--temperature", "0", "--stop", stop,
                                      *more)
                self.assertEqual(found, "3 squared" + text.split(stop)[0] + "\n")

    def test_ranks_of_a_launcher_write_what_one_writes(self):
        options = ("--prompt", "3 squared", "--prompt", "7", "--temperature", "0")
        ranks = launch(2, LOCKSTEP, "generate", self.checkpoint, "--max-tokens", "50", *options,
                       "--tensor", "2")
        self.assertEqual(ranks.returncode, 0, ranks.stderr.decode())
        self.assertEqual(ranks.stdout.decode(errors="replace"), self.generate(*options))
        alone = launch(2, LOCKSTEP, "generate", self.checkpoint, "--max-tokens", "5", *options)
        self.assertEqual((alone.returncode, alone.stdout), (2, b""))
        self.assertIn(b"--tensor, --pipeline, --expert: found a product of 1, allowed: 2, the "
                      b"number of ranks started", alone.stderr)
        result = run(LOCKSTEP, "generate", self.checkpoint, *options, "--pipeline", "2")
        self.assert_failed(result, 2, "--tensor, --pipeline, --expert: found a product of 2, "
                           "allowed: 1, the number of ranks started")

    def test_one_of_several_ranks_reads_the_prompts_of_a_pipe(self):
        generate = ("generate", self.checkpoint, "--max-tokens", "20", "--tensor", "2")
        prompts = b"".join(b"%d squared is \n" % i for i in range(40))
        lines = self.folder / "prompts"
        lines.write_bytes(prompts)
        expected = launch(2, LOCKSTEP, *generate, "--input", lines)
        self.assertEqual(expected.returncode, 0, expected.stderr.decode())
        self.assertEqual(expected.stdout.count(b" squared is "), 40)
        piped = subprocess.run([LOCKSTEP, "launch", "-n", "2", "--starter", "own", "--", *generate,
                                "--input", "/dev/stdin"], input=prompts, capture_output=True,
                               check=False, env=clean_environment())
        self.assertEqual(piped.returncode, 0, piped.stderr.decode())
        self.assertEqual(piped.stdout, expected.stdout)
        gone = launch(2, LOCKSTEP, *generate, "--input", self.folder / "gone")
        self.assert_failed(gone, 1)
        self.assertGreaterEqual(gone.stderr.decode().count("gone' cannot be read"), 2)
        lines.write_bytes(b"")
        empty = launch(2, LOCKSTEP, *generate, "--input", lines)
        self.assert_failed(empty, 2, "--prompt: found none")

    def as_ranks_that_differ(self, of_rank_0, *options):
        """Runs `generate` on two ranks, with further options, a shell's words, on rank 0."""
        script = f'test "$RANK" = 1 || set -- "$@" {of_rank_0}; exec "$0" "$@"'
        return launch(2, "sh", "-c", script, LOCKSTEP, "generate", *options, "--tensor", "2")

    def test_ranks_with_other_options_are_refused(self):
        for given, part in (
                ("--seed 7", "--seed: rank 0 has 7, rank 1 has 1; allowed: the same on all"),
                ("--temperature 0.5", "--temperature: rank 0 has 0.5, rank 1 has 0.8;"),
                ("--prompt b", '--prompt: rank 0 has ["a","b"], rank 1 has ["a"];'),
                ("--stop .", '--stop: rank 0 has ["."], rank 1 has [];'),
                ("--ignore-eos", "--ignore-eos: rank 0 has given, rank 1 has not given;")):
            with self.subTest(given):
                result = self.as_ranks_that_differ(given, self.checkpoint, "--prompt", "a")
                self.assert_failed(result, 2, part)
                self.assertEqual(result.stdout, b"")

    def test_ranks_wait_as_long_as_those_of_the_run_or_as_timeout_says(self):
        # The ranks compare the timeouts that they use. The default is longer on a GPU.
        for saved, used in ((700, "700"), (5, "60|600")):
            folder = self.folder / str(saved)
            result = run(LOCKSTEP, "train", self.config, "--output", folder, "--set",
                         f"parallel.distributed_timeout_seconds={saved}", "--set",
                         "train.train_iters=1")
            self.assertEqual(result.returncode, 0, result.stderr.decode())
            result = self.as_ranks_that_differ("--timeout 99", folder / "checkpoint", "--prompt",
                                               "a")
            self.assert_failed(result, 2)
            self.assertRegex(result.stderr.decode(), r"parallel\.distributed_timeout_seconds: rank "
                             rf"0 has 99, rank 1 has ({used});")
        alone = run(LOCKSTEP, "generate", self.checkpoint, "--prompt", "a", "--tensor", "2",
                    "--timeout", "1", RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2,
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
        self.assert_failed(alone, 1, "rank 1 did not arrive within 1.0 s")

    def test_what_makes_no_sense_is_refused(self):
        for options, part in ((("--stop", ""), "--stop: is empty"),
                              (("--top-p", "0"),
                               "--top-p: found '0', allowed: a number > 0 and <= 1"),
                              (("--top-p", "2"), "--top-p: found '2'"),
                              (("--top-p", "x"), "--top-p"),
                              (("--tensor", 2 ** 62, "--pipeline", 4),
                               f"ranks of --tensor, --pipeline and --expert: {2 ** 62} * 4 does "
                               "not fit into 64 bits")):
            result = run(LOCKSTEP, "generate", self.checkpoint, "--prompt", "a", *options)
            self.assert_failed(result, 2, part)
        self.assert_failed(run(LOCKSTEP, "generate", self.checkpoint), 2, "--prompt: found none")
        self.assert_failed(run(LOCKSTEP, "generate", self.checkpoint, "--input",
                               self.folder / "gone"), 1, "gone' cannot be read")

    def score(self, text):
        path = self.folder / "requests.jsonl"
        path.write_bytes(text)
        return run(LOCKSTEP, "score", self.checkpoint, "--input", path)

    def test_scores_are_added_to_each_line(self):
        requests = [{"id": i, "context": "3 squared", "continuation": text}
                    for i, text in enumerate((" is 9.", " is nothing", "\u00e9"))]
        result = self.score("".join(json.dumps(r) + "\n" for r in requests).encode())
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        found = [json.loads(line) for line in result.stdout.splitlines()]
        for request, answer in zip(requests, found, strict=True):
            self.assertEqual(list(answer), [*request, "logprob", "is_greedy"])
            self.assertEqual(request, {key: answer[key] for key in request})
            self.assertLess(answer["logprob"], 0)
        self.assertGreater(found[0]["logprob"], found[1]["logprob"])
        # Text that the model writes itself is greedy.
        text = self.generate("--prompt", "3 squared", "--temperature", "0", tokens=9)
        greedy = {"context": "3 squared", "continuation": text[len("3 squared"):-1]}
        result = self.score(json.dumps(greedy).encode())
        self.assertTrue(json.loads(result.stdout)["is_greedy"], result.stdout)
        piped = subprocess.run([LOCKSTEP, "score", self.checkpoint, "--input", "/dev/stdin"],
                               input=json.dumps(greedy).encode(), capture_output=True, check=False)
        self.assertEqual(piped.stdout, result.stdout, piped.stderr)

    def test_blank_lines_and_empty_continuations_stop_nothing(self):
        good = {"context": "a", "continuation": "b"}
        empty = {"context": "3 squared", "continuation": ""}
        long = {"context": "a", "continuation": ("3 squared is 9. " * 30).strip()}
        lines = ["", json.dumps(good), " \t\r", json.dumps(empty), json.dumps(long), ""]
        result = self.score("\n".join(lines).encode())
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        found = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual(len(found), 3)
        self.assertEqual(found[1], empty | {"logprob": 0.0, "is_greedy": True})
        alone = self.score(json.dumps(good).encode())
        self.assertAlmostEqual(found[0]["logprob"], json.loads(alone.stdout)["logprob"], places=4)
        # A window of 32 tokens predicts 32 tokens.
        end = {"context": long["continuation"][-33], "continuation": long["continuation"][-32:]}
        end = self.score(json.dumps(end).encode())
        self.assertAlmostEqual(found[2]["logprob"], json.loads(end.stdout)["logprob"], places=4)

    def test_a_bad_line_is_named_and_nothing_is_printed(self):
        good = b'{"context": "a", "continuation": "b"}\n'
        for line, part in ((b"{", "invalid JSON"), (b'{"context": "a"}', "'continuation' is missing"),
                           (b'{"context": "\xff", "continuation": "b"}', "invalid JSON")):
            result = self.score(good + line + b"\n" + good)
            self.assert_failed(result, 1, "requests.jsonl': line 2: ", part)
            self.assertEqual(result.stdout, b"")

    def test_lm_evaluation_harness_gets_its_answers(self):
        for name, text in HARNESS.items():
            path = self.folder / "harness" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        script = SOURCE / "examples/lm_evaluation/lockstep_lm.py"
        result = subprocess.run(
            [sys.executable, script, self.checkpoint, "arc_easy"], capture_output=True, check=False,
            env=os.environ | {"PYTHONPATH": str(self.folder / "harness"),
                              "LOCKSTEP": str(LOCKSTEP)})
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        found = json.loads(result.stdout)
        self.assertEqual(found["tasks"], ["arc_easy"])
        expected = self.score('{"context": "3 squared ", "continuation": "is 9."}\n'
                              '{"context": "", "continuation": "caf\u00e9"}\n'
                              '{"context": "a\u2028\u2029\u0085", "continuation": "b"}\n'
                              .encode())
        lines = [json.loads(line) for line in expected.stdout.split(b"\n") if line]
        self.assertEqual(found["answers"], [[line["logprob"], line["is_greedy"]] for line in lines])


if __name__ == "__main__":
    unittest.main()
