"""`lockstep launch`: its own starter, with small programs as ranks and with training, and its
choice of torchrun."""

import functools
import json
import os
import resource
import signal
import socket
import subprocess
import time
import unittest

from small_ranks import TOGETHER, SmallRanks, alive
from support import LOCKSTEP, SOURCE, EndToEnd, clean_environment, end, metrics, run

# Ends with status 3 at a signal, and writes the signal's number.
STOPS = """
def stop(number, frame):
    (folder / (rank + ".signal")).write_text(str(number))
    sys.exit(3)
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, stop)
(folder / (rank + ".ready")).touch()
time.sleep(60)
"""


class Launch(SmallRanks):
    def test_every_rank_has_torchruns_variables(self):
        result = self.launch(3, TORCHELASTIC_USE_AGENT_STORE="True", RANK=7, MASTER_PORT=1)
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        ports, runs = set(), set()
        for rank in range(3):
            environment = self.started(rank)["environment"]
            for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 3),
                                ("LOCAL_WORLD_SIZE", 3), ("MASTER_ADDR", "127.0.0.1")):
                self.assertEqual(environment[name], str(value))
            self.assertNotIn("TORCHELASTIC_USE_AGENT_STORE", environment)
            ports.add(int(environment["MASTER_PORT"]))
            runs.add((environment["TORCHELASTIC_RUN_ID"],
                      environment["TORCHELASTIC_RESTART_COUNT"]))
        self.assertEqual((len(ports), len(runs)), (1, 1))
        self.assertGreater(ports.pop(), 1023)

    def test_the_rendezvous_may_be_given(self):
        self.assertEqual(self.launch(2, options=["--rendezvous", "[::1]:29999"]).returncode, 0)
        environment = self.started(1)["environment"]
        self.assertEqual((environment["MASTER_ADDR"], environment["MASTER_PORT"]),
                         ("::1", "29999"))

    def test_cores_are_shared_out_unless_the_user_has_done_so(self):
        usable = os.sched_getaffinity(0)
        cores, one = len(usable), {min(usable)}
        for ranks, given, allowed, expected in (
                (1, None, usable, cores), (2, None, usable, max(1, cores // 2)),
                (cores + 1, None, usable, 1), (2, 5, usable, 5), (1, None, one, 1),
                (2, None, one, 1)):
            with self.subTest(ranks=ranks, given=given, allowed=allowed):
                environment = clean_environment(OMP_NUM_THREADS=given)
                if given is None:
                    del environment["OMP_NUM_THREADS"]
                subprocess.run(self.command(ranks), env=environment, check=True,
                               preexec_fn=functools.partial(os.sched_setaffinity, 0, allowed))
                self.assertEqual(self.started(0)["environment"]["OMP_NUM_THREADS"], str(expected))

    def test_arguments_reach_the_ranks_as_they_are(self):
        arguments = ["two words", "", "--", "[a,b]", "--ranks", "5", "-n", "line\nbreak", "'\"$HOME",
                     "train", "ü"]
        self.assertEqual(self.launch(2, *arguments).returncode, 0)
        for rank in range(2):
            self.assertEqual(self.started(rank)["arguments"], arguments)

    def test_a_rank_that_fails_is_named_and_ends_the_others(self):
        for rank, ranks, code, status, told in (
                (1, 3, "sys.exit(1)", 1, "exited with status 1"),
                (0, 2, "sys.exit(2)", 2, "exited with status 2"),
                (2, 3, "sys.exit(77)", 77, "exited with status 77"),
                (1, 2, "os.kill(os.getpid(), signal.SIGKILL)", 1,
                 "was killed by signal 9 (Killed)")):
            with self.subTest(code):
                for file in self.folder.glob("*.started"):
                    file.unlink()
                for other in range(ranks):
                    self.do(other, TOGETHER + (code if other == rank else "time.sleep(60)"))
                result = self.launch(ranks)
                process = self.started(rank)["process"]
                self.assertEqual(result.returncode, status)
                self.assertEqual(result.stderr.decode(),
                                 f"lockstep launch: rank {rank} (process {process}) {told}; ending "
                                 "the other ranks\n")
                for other in range(ranks):
                    self.assertFalse(alive(self.started(other)["process"]))

    def test_the_last_rank_that_fails_ends_nobody(self):
        self.do(0, "sys.exit(1)")
        result = self.launch(1)
        self.assertEqual(result.returncode, 1)
        self.assertTrue(result.stderr.endswith(b"exited with status 1\n"), result.stderr)

    def test_a_rank_that_does_not_end_is_killed(self):
        self.do(0, "while True: time.sleep(60)  # ignore")
        self.do(1, TOGETHER + "sys.exit(1)")
        self.assertEqual(self.launch(2).returncode, 1)
        self.assertFalse(alive(self.started(0)["process"]))

    def test_more_ranks_than_open_files_are_watched_too(self):
        self.do(0, "while True: time.sleep(60)  # ignore")
        self.do(1, TOGETHER + "sys.exit(1)")
        begin = time.monotonic()
        result = run("sh", "-c", 'ulimit -n 16; exec "$@"', "sh", *self.command(20))
        self.assertEqual(result.returncode, 1)
        self.assertLess(time.monotonic() - begin, 40)
        self.assertFalse(alive(self.started(0)["process"]))

    def test_ranks_may_open_as_many_files_as_the_system_allows(self):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        result = run("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", LOCKSTEP, "launch", "-n", 1,
                     "--program", "/bin/sh", "--", "-c", "ulimit -Sn")
        self.assertEqual(result.stdout.decode().strip(), str(most), result.stderr)

    def test_ranks_that_stop_are_waited_for(self):
        for code in (3, 4):
            self.do(0, f"time.sleep(0.5); (folder / 'saved').touch(); sys.exit({code})")
            self.do(1, f"sys.exit({code})")
            result = self.launch(2)
            self.assertEqual((result.returncode, result.stderr), (code, b""))
            (self.folder / "saved").unlink()

    def test_a_failure_counts_for_more_than_a_stop_before_it(self):
        self.do(0, "time.sleep(0.5); sys.exit(1)")
        self.do(1, "sys.exit(3)")
        self.assertEqual(self.launch(2).returncode, 1)

    def test_signals_reach_every_rank(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            for rank in range(2):
                self.do(rank, STOPS)
                (self.folder / f"{rank}.ready").unlink(missing_ok=True)
            process = self.begin(2)
            self.wait_for_files(2, "ready")
            process.send_signal(number)
            self.assertEqual(process.wait(timeout=60), 3)
            for rank in range(2):
                self.assertEqual((self.folder / f"{rank}.signal").read_text(), str(int(number)))

    def test_a_signal_that_was_ignored_stays_ignored(self):
        self.do(0, "time.sleep(0.5)")
        process = subprocess.Popen(["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *self.command(1)],
                                   env=clean_environment())
        self.addCleanup(end, process)
        self.wait_for_files(1, "started")
        process.send_signal(signal.SIGHUP)
        self.assertEqual(process.wait(timeout=60), 0)

    def test_no_rank_outlives_a_starter_that_is_killed(self):
        for rank in range(3):
            self.do(rank, "time.sleep(60)  # ignore")
        process = self.begin(3)
        self.wait_for_files(3, "started")
        process.kill()
        process.wait()
        for rank in range(3):
            self.wait_for(lambda rank=rank: not alive(self.started(rank)["process"]))

    def test_two_launches_at_once_have_ports_of_their_own(self):
        others = [self.folder / name for name in ("one", "other")]
        processes = []
        for folder in others:
            folder.mkdir()
            (folder / "0.do").write_text(
                "while not (folder / 'compared').exists(): time.sleep(0.01)")
            command = self.command(1)
            command[-1] = str(folder)
            processes.append(subprocess.Popen(command, env=clean_environment()))
            self.addCleanup(end, processes[-1])
        self.wait_for(lambda: all((folder / "0.started").exists() for folder in others))
        first, second = (json.loads((folder / "0.started").read_text())["environment"]
                         for folder in others)
        self.assertNotEqual(first["MASTER_PORT"], second["MASTER_PORT"])
        self.assertNotEqual(first["TORCHELASTIC_RUN_ID"], second["TORCHELASTIC_RUN_ID"])
        with socket.socket() as server:  # as rank 0 does
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", int(first["MASTER_PORT"])))
            server.listen()
        with socket.socket() as other, self.assertRaises(OSError):
            other.bind(("127.0.0.1", int(second["MASTER_PORT"])))
        for folder in others:
            (folder / "compared").touch()
        self.assertEqual([process.wait(timeout=60) for process in processes], [0, 0])

    def test_a_program_that_is_not_there(self):
        self.program = self.folder / "none"
        result = self.launch(1)
        self.assert_failed(result, 1, f"rank 0 cannot run {self.program}: No such file")
        self.program = self.folder / "text"
        self.assert_failed(self.launch(2), 1, f"rank 0 cannot run {self.program}: Permission ")

    def test_unusable_arguments_exit_2_and_are_named(self):
        for arguments, part in (
                ((), "--ranks is required"),
                (("-n", 2), "nothing to run, allowed: a command after --"),
                (("-n", 2, "--"), "nothing to run"),
                (("-n", 2, "train", "tiny"), "not expected"),
                (("-n", 0, "--", "train"), "--ranks: found '0', allowed: an integer >= 1"),
                (("-n", "two", "--", "train"), "--ranks: found 'two'"),
                (("-n", 2, "--starter", "mpi", "--", "train"),
                 "--starter: found 'mpi', allowed: auto, torchrun, own"),
                (("-n", 2, "--nodes", 2, "--", "train"),
                 "--node-rank: not given, allowed with --nodes 2: 0 to 1"),
                (("-n", 2, "--nodes", 2, "--node-rank", 2, "--", "train"),
                 "--node-rank: found 2, allowed with --nodes 2: 0 to 1"),
                (("-n", 2, "--nodes", 2, "--node-rank", 0, "--", "train"),
                 "--rendezvous: not given"),
                (("-n", 2, "--node-rank", 1, "--", "train"),
                 "--node-rank: found 1, allowed with one node: 0"),
                (("-n", 2, "--rendezvous", "host", "--", "train"),
                 "--rendezvous: found 'host', allowed: HOST:PORT"),
                (("-n", 2, "--rendezvous", "host:65536", "--", "train"),
                 "--rendezvous: found 'host:65536'"),
                (("-n", 2, "--starter", "own", "--nodes", 2, "--node-rank", 0, "--rendezvous",
                  "h:1", "--", "train"), "--starter own starts the ranks of one host"),
                (("-n", 2, "--max-restarts", -1, "--", "train"), "--max-restarts: found '-1'"),
                (("-n", 2, "--nodes", 2, "--node-rank", 0, "--rendezvous", "h:1",
                  "--max-restarts", 1, "--", "train"),
                 "--max-restarts: found 1, allowed with --nodes 2: 0")):
            with self.subTest(arguments):
                self.assert_failed(run(LOCKSTEP, "launch", *arguments), 2, part)

    def test_a_configuration_that_can_be_read_once_is_refused(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        for nodes in ((), ("--nodes", 2, "--node-rank", 0, "--rendezvous", "h:1")):
            self.assert_failed(run(LOCKSTEP, "launch", "-n", 1, *nodes, "--", "train", pipe), 2,
                               f"CONFIG: '{pipe}' can be read only once")


class Torchrun(EndToEnd):
    """Which torchrun is chosen, among those that PATH leads to."""

    def setUp(self):
        super().setUp()
        self.bin = self.folder / "bin"
        self.bin.mkdir()

    def torchrun(self, text):
        (self.bin / "torchrun").write_text(text)
        (self.bin / "torchrun").chmod(0o755)

    def launch(self, *arguments, **options):
        environment = clean_environment(PATH=self.bin)
        return subprocess.run([LOCKSTEP, "launch", *map(str, arguments)], capture_output=True,
                              text=True, env=environment, check=False, **options)

    def test_one_that_works_is_taken(self):
        self.torchrun("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        result = self.launch("-n", 2, "--", "train", "two words", "--help")
        self.assertEqual(result.stdout.splitlines(),
                         ["--standalone", "--no-python", "--nproc-per-node", "2",
                          str(LOCKSTEP.resolve()), "train", "two words", "--help"])
        (self.bin / "loop").symlink_to("/bin/true")
        result = self.launch("-n", 8, "--nodes", 4, "--node-rank", 3, "--rendezvous",
                             "node0:29500", "--program", "loop")
        self.assertEqual(result.stdout.splitlines(),
                         ["--nnodes", "4", "--node-rank", "3", "--master-addr", "node0",
                          "--master-port", "29500", "--no-python", "--nproc-per-node", "8", "loop"])

    def test_it_is_not_started_for_a_program_that_cannot_run(self):
        self.torchrun("#!/bin/sh\necho started\n")
        (self.bin / "text").write_text("no program")
        for program, reason in (("/nonexistent", "No such file or directory"),
                                ("nonexistent", "No such file or directory"),
                                ("text", "Permission denied"), (self.bin, "Permission denied")):
            with self.subTest(program):
                result = self.launch("-n", 2, "--program", program)
                self.assertEqual((result.returncode, result.stdout, result.stderr),
                                 (1, "", f"lockstep launch: rank 0 cannot run {program}: {reason}\n"))

    def test_one_that_works_is_taken_where_sigchld_is_ignored(self):
        self.torchrun("#!/bin/sh\necho $1\n")
        result = self.launch("-n", 2, "--program", "/bin/true", "--",
                             preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assertEqual((result.returncode, result.stdout), (0, "--standalone\n"), result.stderr)

    def test_one_that_does_not_work_is_passed_over(self):
        show = ["-n", 2, "--program", "/bin/sh", "--", "-c", "echo rank $RANK; exit 0"]
        without_torch = self.folder / "python3"
        without_torch.symlink_to("/bin/false")
        for text in (None, "#!/bin/sh\nexit 127\n", f"#!{self.folder}/gone/python3\n", "",
                     f"#!{without_torch}\n"):
            with self.subTest(text):
                if text is not None:
                    self.torchrun(text)
                result = self.launch(*show)
                self.assertEqual((result.returncode, sorted(result.stdout.splitlines())),
                                 (0, ["rank 0", "rank 1"]), result.stderr)
                refused = self.launch("--starter", "torchrun", *show)
                self.assertEqual(refused.returncode, 2)
                self.assertIn("--starter torchrun: no working torchrun was found: install it",
                              refused.stderr)
        refused = self.launch("--nodes", 2, "--node-rank", 0, "--rendezvous", "h:1", *show)
        self.assertEqual(refused.returncode, 2)
        self.assertIn("--nodes 2 needs torchrun", refused.stderr)


class Training(EndToEnd):
    def launch(self, ranks, *arguments, starter="own"):
        return run(LOCKSTEP, "launch", "-n", ranks, "--starter", starter, "--", "train", self.config,
                   *arguments)

    def losses(self, name):
        return [line["lm_loss"] for line in metrics(self.folder / name)[0]]

    def test_ranks_train_alike_under_either_starter_and_with_more_ranks_than_cores(self):
        ranks = 2 * len(os.sched_getaffinity(0))
        for name, count, starter in (("own", 2, "own"), ("torchrun", 2, "torchrun"),
                                     ("many", ranks, "own")):
            result = self.launch(count, "--set", "train.global_batch_size=" + str(8 * ranks),
                                 "--output", self.folder / name, starter=starter)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(f"on {count} data-parallel ranks", result.stderr.decode())
        self.assertEqual(len(self.losses("own")), 12)
        self.assertEqual(self.losses("own"), self.losses("torchrun"))
        self.assertAlmostEqual(self.losses("own")[-1], self.losses("many")[-1], places=4)

    def test_two_runs_at_once_do_not_meet(self):
        command = [LOCKSTEP, "launch", "-n", "2", "--starter", "own", "--", "train", self.config]
        processes = [subprocess.Popen([*map(str, command), "--output", str(self.folder / name)],
                                      env=clean_environment(), stderr=subprocess.PIPE)
                     for name in ("one", "other")]
        for process in processes:
            self.addCleanup(end, process)
        for process in processes:
            self.assertEqual(process.wait(timeout=240), 0, process.stderr.read())
        self.assertEqual(self.losses("one"), self.losses("other"))

    def test_a_run_that_is_stopped_has_saved_its_state(self):
        output = self.folder / "run"
        process = subprocess.Popen(
            [*map(str, (LOCKSTEP, "launch", "-n", 2, "--starter", "own", "--", "train", self.config,
                        "--output", output, "--set", "train.train_iters=100000"))],
            env=clean_environment(), stderr=subprocess.PIPE)
        self.addCleanup(end, process)
        self.wait_for_iterations(output)
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=120)[1].decode()
        self.assertEqual(process.returncode, 3, error)
        self.assertIn("SIGTERM: stopped after iteration", error)
        self.assertNotIn("lockstep launch:", error)
        self.assertEqual(run(LOCKSTEP, "checkpoint", "verify", output / "checkpoint").returncode, 0)

    def test_a_configuration_that_no_rank_can_use(self):
        result = self.launch(2, "--set", "model.num_layers=0")
        self.assert_failed(result, 2, "model.num_layers: found 0", "lockstep launch: rank ",
                           "exited with status 2")

    def test_the_script_of_the_source_tree(self):
        for arguments in (("2", "--", "plan"), ("-n", "many", "--", "plan"), ("-n", "2", "plan")):
            self.assertEqual(run(SOURCE / "scripts/launch", *arguments).returncode, 2)
        result = run(SOURCE / "scripts/launch", "-n", 2, "--", "plan", "groups", "--world-size", 2,
                     "--summary")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count(b"dp "), 2 * run(
            LOCKSTEP, "plan", "groups", "--world-size", 2, "--summary").stdout.count(b"dp "))


if __name__ == "__main__":
    unittest.main()
