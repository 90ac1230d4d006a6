"""Runs tasks of lm-evaluation-harness on the model of a checkpoint, through `lockstep score`:

    python lockstep_lm.py CHECKPOINT TASK...

LOCKSTEP names the program; the default is build/lockstep."""

import json
import os
import subprocess
import sys
import tempfile

import lm_eval
from lm_eval.api.model import LM


class Lockstep(LM):
    def __init__(self, checkpoint):
        super().__init__()
        self.command = [os.environ.get("LOCKSTEP", "build/lockstep"), "score", checkpoint,
                        "--input"]

    def loglikelihood(self, requests):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for request in requests:
                context, continuation = request.args
                print(json.dumps({"context": context, "continuation": continuation}), file=file)
            file.flush()
            result = subprocess.run([*self.command, file.name], check=True,
                                    stdout=subprocess.PIPE, encoding="utf-8")
        # Not splitlines(): it also splits at U+2028 and its like, which JSON strings may hold.
        answers = [json.loads(line) for line in result.stdout.split("\n") if line]
        return [(answer["logprob"], answer["is_greedy"]) for answer in answers]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError("whole documents: use lockstep evaluate")

    def generate_until(self, requests):
        raise NotImplementedError("text: use lockstep generate")


if __name__ == "__main__":
    results = lm_eval.simple_evaluate(model=Lockstep(sys.argv[1]), tasks=sys.argv[2:])
    print(json.dumps(results["results"], indent=2))
