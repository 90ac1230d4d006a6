"""Every run ends, under torchrun and without a launcher: after success, an exception, SIGTERM and
SIGKILL. It has the right status, prints no complaints and leaves no process.

LOCKSTEP_SHUTDOWN_RUNS is the number of runs (default: one of each kind)."""

import itertools
import os
import pathlib
import re
import signal
import subprocess
import time
import unittest
import uuid

from support import LOCKSTEP, TORCHRUN, Ranks, clean_environment, end, metrics

RANKS = 3
ENDLESS = ["--set", "train.train_iters=1000000"]
# Messages of libtorch, libstdc++ and the shell about an unclean end.
COMPLAINTS = re.compile(r"terminate called|Aborted|core dumped|Segmentation|\[[WE]\d{4} .*\.cpp:")


def processes_of(marker):
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass  # it has ended, or is another user's
    return found


class Run:
    """One run of RANKS ranks. `launched`: the processes started here, the ranks or torchrun."""

    def __init__(self, test, arguments, under_torchrun):
        self.test = test
        self.marker = f"LOCKSTEP_TEST_RUN={uuid.uuid4()}"
        self.output = test.folder / self.marker[-12:]
        name, value = self.marker.split("=")
        arguments = ["--set", "train.global_batch_size=6", "--set",
                     "parallel.distributed_timeout_seconds=20", *arguments]
        if "--output" not in arguments:
            arguments += ["--output", self.output]
        if under_torchrun:
            command = [TORCHRUN, "--standalone", "--no-python", "--nproc-per-node", RANKS, LOCKSTEP,
                       "train", test.config, *arguments]
            self.launched = [subprocess.Popen(
                [str(part) for part in command], env=clean_environment(**{name: value}),
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)]
            test.addCleanup(end, self.launched[0])
        else:
            self.launched = test.start(RANKS, *arguments, **{name: value})

    def ranks(self):
        """Returns the process ids of the ranks under torchrun, in the order of their start."""
        return sorted(set(processes_of(self.marker)) - {self.launched[0].pid})

    def wait_for_training(self):
        deadline = time.monotonic() + 60
        while not (self.output / "metrics.jsonl").exists() or len(metrics(self.output)[0]) < 3:
            for process in self.launched:
                if process.poll() is not None:
                    self.test.fail(process.communicate()[1].decode())
            self.test.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def check_end(self, *statuses):
        """Every launched process ends soon, with its status (None: any)."""
        for process, status in zip(self.launched, statuses, strict=True):
            error = process.communicate(timeout=60)[1].decode()
            if status is not None:
                self.test.assertEqual(process.returncode, status, error)
            self.test.assertIsNone(COMPLAINTS.search(error), error)
        deadline = time.monotonic() + 5
        while stray := processes_of(self.marker):
            self.test.assertLess(time.monotonic(), deadline, f"left behind: {stray}")
            time.sleep(0.1)


class Shutdown(Ranks):
    def success(self, under_torchrun):
        run = Run(self, [], under_torchrun)
        run.check_end(*[0] * len(run.launched))

    def exception(self, under_torchrun):
        """Only rank 0 writes, and it cannot."""
        occupied = self.folder / "occupied"
        occupied.touch()
        run = Run(self, ["--output", occupied, *ENDLESS], under_torchrun)
        run.check_end(*[1] * len(run.launched))

    def sigterm_to_one(self, rank):
        run = Run(self, ENDLESS, False)
        run.wait_for_training()
        run.launched[rank].send_signal(signal.SIGTERM)
        run.check_end(*[3] * RANKS)

    def sigterm_to_all(self, under_torchrun):
        run = Run(self, ENDLESS, under_torchrun)
        run.wait_for_training()
        for process in run.launched:
            process.send_signal(signal.SIGTERM)
        # torchrun itself answers a signal with an exception after its ranks have ended.
        run.check_end(*[None if under_torchrun else 3] * len(run.launched))

    def sigkill_of_one(self, rank):
        run = Run(self, ENDLESS, False)
        run.wait_for_training()
        run.launched[rank].kill()
        run.check_end(*[-signal.SIGKILL if r == rank else 1 for r in range(RANKS)])

    def sigkill_of_one_under_torchrun(self, rank):
        run = Run(self, ENDLESS, True)
        run.wait_for_training()
        os.kill(run.ranks()[rank], signal.SIGKILL)
        run.check_end(1)

    def test_every_run_ends(self):
        kinds = [(self.success, False), (self.exception, False), (self.sigterm_to_one, 1),
                 (self.sigkill_of_one, 2), (self.success, True), (self.exception, True),
                 (self.sigterm_to_all, False), (self.sigkill_of_one, 0),
                 (self.sigterm_to_all, True), (self.sigkill_of_one_under_torchrun, 1)]
        runs = int(os.environ.get("LOCKSTEP_SHUTDOWN_RUNS", len(kinds)))
        for i, (kind, argument) in zip(range(runs), itertools.cycle(kinds)):
            with self.subTest(run=i, kind=kind.__name__, argument=argument):
                kind(argument)


if __name__ == "__main__":
    unittest.main()
