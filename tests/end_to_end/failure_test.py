"""Ranks that must not form a group: real processes, started by hand, without a launcher."""

import contextlib
import pathlib
import re
import signal
import socket
import time
import unittest

from support import BATCH_OF_3, Ranks, free_port

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def listening(process):
    """Returns the local addresses at which a process listens, as written in /proc."""
    own, addresses = set(), []
    for entry in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            own.add(str(entry.readlink()))
    for table in ("tcp", "tcp6"):
        lines = pathlib.Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()
        for fields in (line.split() for line in lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                addresses.append(fields[1].split(":")[0])
    return addresses


class Rendezvous(Ranks):
    def assert_all_end(self, processes, status, *parts):
        for process in processes:
            error = process.communicate(timeout=30)[1].decode()
            self.assertEqual(process.returncode, status, error)
            for part in parts:
                self.assertIn(part, error)

    def test_another_precision_is_refused_on_all(self):
        processes = self.start(3, *BATCH_OF_3, of_rank={2: ["--set", "train.precision=fp64"]})
        self.assert_all_end(processes, 2, 'train.precision: rank 0 has "fp32", rank 2 has '
                            '"fp64"; allowed: the same on all ranks')

    def test_a_rank_that_never_comes_is_named(self):
        started = time.monotonic()
        processes = self.start(4, "--set", "parallel.distributed_timeout_seconds=2",
                               leave_out={1, 3})
        self.assert_all_end(processes, 1,
                            "ranks 1, 3 did not arrive within 2.0 s: 2 of 4 ranks have arrived\n")
        self.assertLess(time.monotonic() - started, 20)

    def test_without_rank_0_the_store_is_named(self):
        processes = self.start(2, "--set", "parallel.distributed_timeout_seconds=1", leave_out={0})
        error = processes[0].communicate(timeout=30)[1].decode()
        self.assertEqual(processes[0].returncode, 1, error)
        self.assertRegex(error, r"(?m)^lockstep: rank 1 cannot reach the store at "
                         r"127\.0\.0\.1:\d+: rank 0 did not serve it within 1\.0 s "
                         r"\(Connection refused\)$")

    def test_a_rank_claimed_twice_is_refused_on_all(self):
        port = free_port()
        processes = self.start(3, *BATCH_OF_3, port=port, leave_out={2})
        processes += self.start(3, *BATCH_OF_3, port=port, leave_out={0, 2})
        text = rf"rank 1 is claimed twice, by the processes \S+:(\d+) and \S+:(\d+)"
        for process in processes:
            error = process.communicate(timeout=30)[1].decode()
            self.assertEqual(process.returncode, 1, error)
            found = re.search(text, error)
            self.assertTrue(found, error)
            self.assertEqual({int(found[1]), int(found[2])}, {p.pid for p in processes[1:]})

    def test_a_port_in_use_is_named(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            processes = self.start(2, "--set", "parallel.distributed_timeout_seconds=1", port=port)
            errors = [p.communicate(timeout=30)[1].decode() for p in processes]
        self.assertEqual([p.returncode for p in processes], [1, 1], errors)
        self.assertIn(f"127.0.0.1:{port}: cannot listen: Address already in use", errors[0])
        self.assertIn(f"rank 1 cannot reach the store at 127.0.0.1:{port}", errors[1])

    def test_another_run_is_refused_and_the_run_goes_on(self):
        port = free_port()
        first = self.start(2, port=port, leave_out={1}, LOCKSTEP_RUN_ID="today")
        other = self.start(2, port=port, leave_out={0}, LOCKSTEP_RUN_ID="yesterday")
        self.assert_all_end(other, 1, "run id: rank 0, which serves it, has 'today', rank 1 has "
                               "'yesterday'")
        first += self.start(2, port=port, leave_out={0}, LOCKSTEP_RUN_ID="today")
        self.assert_all_end(first, 0)

    def test_a_foreign_client_does_not_disturb(self):
        port = free_port()
        processes = self.start(2, port=port, leave_out={1})
        deadline = time.monotonic() + 30
        strangers = []
        for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)) * 4):
            while True:
                try:
                    strangers.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                    break
                except OSError:
                    self.assertLess(time.monotonic(), deadline)
                    time.sleep(0.05)
            strangers[-1].sendall(garbage)
        processes += self.start(2, port=port, leave_out={0})
        self.assert_all_end(processes, 0)
        for stranger in strangers:
            stranger.close()

    def test_a_launcher_need_not_count_the_ranks_of_a_host(self):
        processes = self.start(2, LOCAL_WORLD_SIZE=None)
        self.assert_all_end(processes, 0)

    def test_nothing_listens_off_loopback(self):
        output = self.folder / "listening"
        processes = self.start(3, "--output", output, "--set", "train.train_iters=1000000",
                               *BATCH_OF_3, LOCAL_RANK=None, LOCAL_WORLD_SIZE=None)
        self.wait_for_iterations(output)
        addresses = [listening(process) for process in processes]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        self.assert_all_end(processes, 3)
        for of_process in addresses:
            self.assertTrue(of_process)
            self.assertLessEqual(set(of_process), LOOPBACK)


if __name__ == "__main__":
    unittest.main()
