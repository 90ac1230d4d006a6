"""Loss spikes, as `lockstep train` reports them: its output when it skips an update, and when it
goes back to a checkpoint."""

import re
import unittest

from support import LOCKSTEP, EndToEnd, metrics, run, torchrun

LENGTH, SAMPLES = 32, 160
WILD = 90


class Spikes(EndToEnd):
    def setUp(self):
        super().setUp()
        calm = bytearray((b"abcdefg" * (LENGTH * SAMPLES // 7 + 1))[:LENGTH * SAMPLES + 1])
        (self.folder / "calm").write_bytes(calm)
        for i in range(1, LENGTH + 1):
            calm[WILD * LENGTH + i] = 128 + 7 * i * i % 100
        (self.folder / "wild").write_bytes(calm)
        result = self.train("calm", "base", "train.train_iters=40")
        self.assertEqual(result.returncode, 0, result.stderr.decode())

    def command(self, text, output, *fields):
        assignments = [f"data.path={self.folder / text}", "data.split=1,0", "train.eval_iters=0",
                       "train.spike_window=6", "train.spike_zscore=5", *fields]
        return [LOCKSTEP, "train", self.config, "--output", self.folder / output,
                *(word for field in assignments for word in ("--set", field))]

    def train(self, *arguments):
        return run(*self.command(*arguments))

    def wild(self, output, *fields):
        return ("wild", output, f"checkpoint.load={self.folder / 'base/checkpoint'}",
                "checkpoint.finetune=true", "optimizer.lr=0", *fields)

    def lines(self, output):
        return metrics(self.folder / output)[0]

    def test_a_skipped_update_is_written_and_told(self):
        result = self.train(*self.wild("skip", "train.on_spike=skip", "train.train_iters=40"))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        found = [line for line in self.lines("skip") if "spike" in line]
        self.assertGreaterEqual(len(found), 1)
        for line in found:
            self.assertEqual((line["spike"], line["skipped"]), ("loss", True))
            self.assertIn(f"iteration {line['iteration']:>2}/40 ", result.stderr.decode())
        self.assertEqual(result.stderr.decode().count("SKIPPED: the loss is a spike"), len(found))
        for line in self.lines("skip"):
            self.assertEqual(line["skipped"], "spike" in line)

    def test_a_run_goes_back_and_leaves_the_samples_out(self):
        plain = self.train(*self.wild("plain", "train.train_iters=100"))
        self.assertEqual(plain.returncode, 0, plain.stderr.decode())
        batches = [line["lm_loss"] for line in self.lines("plain")]
        wild = [loss > 5 * min(batches) for loss in batches]
        first = next(i for i in range(6, 90) if wild[i] and sum(wild[i - 6:i + 7]) == 1)
        fields = ("train.on_spike=rewind", f"train.train_iters={first + 2}",
                  "checkpoint.save_interval=3")
        for ranks in (1, 2):
            output = f"rewind_{ranks}"
            result = torchrun(ranks, *self.command(*self.wild(output, *fields)))
            error = result.stderr.decode()
            self.assertEqual(result.returncode, 0, error)
            back = first // 3 * 3
            told = re.findall(r"spike: rewound to .*/step_(\d+), iteration (\d+); the samples",
                              error)
            self.assertEqual(told, [(str(back), str(back))], error)
            lines = self.lines(output)
            self.assertEqual([line["iteration"] for line in lines], list(range(1, first + 3)))
            # The spike was in batch `first`; the batches from step_N up to this one are left out.
            expected = batches[:back] + batches[first + 1:first + 1 + first + 2 - back]
            for line, loss in zip(lines, expected):
                self.assertLess(abs(line["lm_loss"] - loss), 1e-4 * loss)
            self.assertFalse(any(line["skipped"] for line in lines))

    def test_a_run_that_goes_back_to_another_runs_checkpoint_keeps_its_metrics(self):
        resumed = (f"checkpoint.load={self.folder / 'base/checkpoint'}", "optimizer.lr=0")
        plain = self.train("wild", "plain", *resumed, "train.train_iters=80")
        self.assertEqual(plain.returncode, 0, plain.stderr.decode())
        batches = [line["lm_loss"] for line in self.lines("plain")]
        first = next(i for i in range(6, 39) if batches[i] > 5 * min(batches))
        result = self.train("wild", "back", *resumed, "train.on_spike=rewind",
                            "checkpoint.save_interval=1000", f"train.train_iters={40 + first + 2}")
        error = result.stderr.decode()
        self.assertIn(result.returncode, (0, 4), error)  # 4: there is another spike
        self.assertIn(f"spike: rewound to {self.folder / 'base/checkpoint/step_40'}, ", error)
        self.assertEqual(list((self.folder / "back").glob("metrics.previous*")), [])
        lines = self.lines("back")
        self.assertEqual([line["iteration"] for line in lines],
                         list(range(41, 41 + len(lines))))
        self.assertLess(abs(lines[0]["lm_loss"] - batches[first + 1]), 1e-4 * batches[first + 1])

    def test_it_needs_checkpoints(self):
        self.assert_failed(self.train("wild", "none", "train.on_spike=rewind"), 2,
                           "train.on_spike = rewind: found checkpoint.save_interval that is unset")


if __name__ == "__main__":
    unittest.main()
