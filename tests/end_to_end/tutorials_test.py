"""The programs of docs/tutorials: their output on every layout, and what they refuse."""

import re
import shutil
import unittest

from installed import InstalledProjects, losses_of
from support import LOCKSTEP, SOURCE, launch

SAVED_AT, STEPS = 20, 40  # of own_model
RANKS, MICROBATCHES = 4, 8  # of the schedules that own_schedule compares


def losses_by_torch():
    """Trains the model of own_schedule in one process with PyTorch alone."""
    import torch
    torch.set_default_dtype(torch.double)

    def values(count, start, shape):
        return (0.3 * torch.sin(torch.arange(count) * 1.7 + start)).view(shape)

    layers = [(values(64, ord(number), (8, 8)).requires_grad_(),
               values(8, ord(number), (8,)).requires_grad_()) for number in "0123"]
    optimizer = torch.optim.AdamW(
        [{"params": [weight for weight, _ in layers], "weight_decay": 0.01},
         {"params": [bias for _, bias in layers], "weight_decay": 0}], lr=0.01)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        total = 0
        for number in range(step * 8, step * 8 + 8):
            i = torch.arange(16 * 8) + 0.37 * number
            inputs = hidden = torch.sin(i * i * 0.61).view(16, 8)
            for weight, bias in layers:
                hidden = hidden + torch.tanh(torch.nn.functional.linear(hidden, weight, bias))
            total = total + (hidden.sum(1) - 2 * inputs.sum(1)).square().sum() / (8 * 16)
        total.backward()
        torch.nn.utils.clip_grad_norm_([param for layer in layers for param in layer], 1)
        optimizer.step()
        losses.append(total.item())
    return losses


class Tutorials(InstalledProjects):
    def test_a_model_of_ones_own_on_every_layout(self):
        program = self.build(SOURCE / "examples/own_model", self.install()) / "own_model"
        folders = [self.folder / "saved on one rank", self.folder / "saved on four"]

        def losses(ranks, *arguments):
            return losses_of(self.on_ranks(ranks, program, *arguments))

        expected = losses(1, 1, 1, "save", folders[0])
        self.assertEqual(len(expected), STEPS)
        self.assertGreater(expected[0], 3)
        self.assertLess(expected[-1], 0.1)
        for layout in ((2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4)):
            with self.subTest(layout):
                self.assert_same(losses(*layout), expected)
        self.assert_same(losses(4, 2, 2, "save", folders[1]), expected)
        one, four = folders
        for folder, *layout in ((one, 4, 2, 2), (four, 1, 1, 1), (four, 4, 1, 2)):
            with self.subTest(layout):
                self.assert_same(losses(*layout, "load", folder), expected[SAVED_AT:])
        self.assertIn("all good", self.command(LOCKSTEP, "checkpoint", "verify", folders[1]))
        self.refuses(program, folders[1])

    def refuses(self, program, folder):
        self.assert_failed(launch(1, program, 1, 1, "load", self.folder / "nothing here"), 2,
                           "own_model: ", "nothing here")
        self.assert_failed(launch(3, program, 1, 3), 2, "PIPELINE: allowed: 1, 2, 4")
        self.assert_failed(launch(3, program, 3, 1), 2, "block0.qkv.weight", "the 3 ranks of tp")
        self.assert_failed(launch(3, program, 1, 1), 2, "data-parallel ranks: allowed: 1, 2, 4")
        damaged = self.folder / "damaged"
        shutil.copytree(folder, damaged)
        shard = damaged / f"step_{SAVED_AT}" / "rank_00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:-8])
        self.assert_failed(launch(2, program, 1, 2, "load", damaged), 2, "rank_00003.safetensors")

    def test_a_schedule_of_ones_own_is_checked_simulated_and_run(self):
        program = self.build(SOURCE / "examples/own_schedule", self.install()) / "own_schedule"
        picture = self.folder / "eager 1F1B.svg"
        outputs = [self.on_ranks(ranks, program, *more)
                   for ranks, more in ((1, []), (2, []), (4, [picture]))]
        expected = losses_by_torch()
        for output in outputs:
            self.assert_same(losses_of(output), [expected[0], expected[-1]] * 2)
        rows = re.findall(r"^(\S.*\S) +transfer (\d)  time (\d+)  idle (\S+)  live (\d+)$",
                          outputs[0], re.M)
        busy, fill = 3 * MICROBATCHES, RANKS - 1
        found = {(name, int(transfer)): (int(time), float(idle), int(live))
                 for name, transfer, time, idle, live in rows}
        self.assertEqual(len(found), 4)
        for name, transfer, live in (("1F1B", 0, RANKS), ("eager 1F1B", 0, 2 * fill + 1),
                                     ("eager 1F1B", 1, 2 * fill + 1)):
            time = busy + fill * (3 + 2 * transfer)  # as long as nobody waits for messages
            self.assertEqual(found[name, transfer], (time, round(1 - busy / time, 3), live))
        self.assertGreater(found["1F1B", 1][0], found["eager 1F1B", 1][0])
        self.assertRegex(outputs[0], r"refused: the schedule deadlocks: rank 0 waits at position 7")
        self.assertEqual(picture.read_text(),
                         (SOURCE / "docs/images/eager-1f1b.svg").read_text())
        self.assert_failed(launch(3, program), 2, "ranks: allowed: 1, 2, 4")


if __name__ == "__main__":
    unittest.main()
