"""lockstep doctor --calibrate as one rank on each of two hosts: it measures the link, too."""

import json
import subprocess
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, clean_environment, end, free_port, run

TINY = SOURCE / "configs/tiny.textproto"


class CalibratedHosts(EndToEnd):
    def calibrate(self, *of_rank, ranks=2, local_ranks=1):
        """Runs a rank with each list of arguments; returns statuses, outputs and errors."""
        port = free_port()
        processes = []
        for rank, arguments in enumerate(of_rank):
            environment = clean_environment(
                RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=0, LOCAL_WORLD_SIZE=local_ranks,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCKSTEP_DIRECT_MEMORY=0)
            processes.append(subprocess.Popen(
                [LOCKSTEP, "doctor", "--calibrate", *map(str, arguments)], env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.folder, text=True))
            self.addCleanup(end, processes[-1])
        told = [process.communicate(timeout=900) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, told)]

    def step_ms(self, ranks, machine):
        result = run(LOCKSTEP, "plan", "time", TINY, "--world-size", ranks, "--machine", machine,
                     "--json")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return json.loads(result.stdout)["step_ms"]

    def test_the_link_is_measured(self):
        arguments = ("machine.textproto", "--ranks", 1, "--json")
        first, second = self.calibrate(arguments, arguments)
        self.assertEqual((first[0], second), (0, (0, "", "")), first[2])
        self.assertEqual(json.loads(first[1])["machine"], "machine.textproto")
        self.assertIn("measuring collectives between hosts", first[2])
        machine = self.folder / "machine.textproto"
        text = machine.read_text()
        inside, between = text[text.index("inside_host"):].split("between_hosts")
        for link in (inside, between):
            for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
                         "send", "exchange"):
                self.assertEqual(link.count(f'name: "{name}"'), 1, link)
        # One rank on each host: all communication is between hosts.
        self.assertGreater(self.step_ms(2, machine), 0)
        one_host = self.folder / "one_host.textproto"
        one_host.write_text(text.replace("ranks_per_host: 1", "ranks_per_host: 2"))
        self.assertNotEqual(self.step_ms(2, one_host), self.step_ms(2, machine))

    def test_what_is_refused(self):
        (status, output, error), = self.calibrate(("machine", "--ranks", 1), ranks=4, local_ranks=2)
        self.assertEqual((status, output), (2, ""))
        self.assertIn("found 4 ranks, 2 of them on this host, allowed: one process, or two ranks on "
                      "two hosts", error)
        for first, second, status, told in (
                (("machine", "--ranks", 1), ("machine", "--ranks", 2), 2, "--ranks"),
                (("none/machine", "--ranks", 1), ("machine", "--ranks", 1), 1, "none"),
                (("machine", "--ranks", 9999), ("machine", "--ranks", 9999), 2,
                 "ranks of this host: found 9999, allowed: 1 to")):
            with self.subTest(told):
                results = self.calibrate(first, second)
                self.assertEqual(results[0][0], status, results)
                self.assertIn(told, results[0][2])
                self.assertIn(results[1][0], (1, 2))
                self.assertIn(told, results[1][2])
        self.assertFalse((self.folder / "machine").exists())


if __name__ == "__main__":
    unittest.main()
