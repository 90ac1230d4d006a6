"""lockstep plan time: the contract, sums of the parts, machines, what is refused."""

import json
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, run

TINY = SOURCE / "configs/tiny.textproto"
A100 = SOURCE / "configs/machines/dgx_a100.textproto"
HALF = ("--set", "train.precision=bf16")
KEYS = ["step_ms", "tflops_per_device", "utilisation", "compute_ms", "optimizer_ms", "bubble_ms",
        "exposed_communication_ms", "peak_bytes", "classes"]


class PlanTime(EndToEnd):
    def time(self, *arguments, machine=A100):
        result = run(LOCKSTEP, "plan", "time", TINY, *arguments, "--machine", machine, "--json")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        return json.loads(result.stdout)

    def test_the_contract(self):
        layout = (*HALF, "--set", "parallel.pipeline_model_parallel_size=2", "--set",
                  "parallel.tensor_model_parallel_size=2", "--world-size", 8)
        answer = self.time(*layout)
        self.assertEqual(list(answer), KEYS)
        parts = [answer[name] for name in KEYS[3:7]]
        self.assertTrue(all(part > 0 for part in parts), parts)
        self.assertAlmostEqual(sum(parts), answer["step_ms"], delta=1e-6 * answer["step_ms"])
        self.assertEqual(sum(one["ranks"] for one in answer["classes"]), 8)
        for one in answer["classes"]:
            whole = (one["compute_ms"] + one["optimizer_ms"] + one["bubble_ms"] +
                     sum(one["exposed_communication_ms"].values()))
            self.assertAlmostEqual(whole, answer["step_ms"], delta=1e-6 * answer["step_ms"])
            self.assertIn("tp", one["exposed_communication_ms"])
        report = json.loads(run(LOCKSTEP, "plan", TINY, *layout, "--json").stdout)
        self.assertEqual(answer["peak_bytes"],
                         [stage["recorded_peak_bytes"] for stage in report["memory"]])
        rate = report["flops_of_step"] / 8 / answer["step_ms"] / 1e9
        self.assertAlmostEqual(answer["tflops_per_device"], rate, delta=1e-6 * rate)
        self.assertAlmostEqual(answer["utilisation"], rate / 312, delta=1e-6)

    def machine(self, **changes):
        text = A100.read_text()
        for part, other in changes.values():
            self.assertIn(part, text)
            text = text.replace(part, other)
        path = self.folder / "machine.textproto"
        path.write_text(text)
        return path

    def test_a_machine_twice_as_fast_takes_half_the_time(self):
        layout = (*HALF, "--world-size", 2)
        fast = self.machine(
            half=("half_tflops: 312", "half_tflops: 624"), wide=("tflops: 19.5", "tflops: 39"),
            memory=("memory_gb_per_s: 2039", "memory_gb_per_s: 4078"),
            inside=("gb_per_s: 300", "gb_per_s: 600"), late=("latency_us: 1", "latency_us: 0.5"),
            between=("latency_us: 2", "latency_us: 1"))
        once, twice = self.time(*layout)["step_ms"], self.time(*layout, machine=fast)["step_ms"]
        self.assertAlmostEqual(once / twice, 2, delta=1e-3)

    def test_utilisation_is_of_the_peak_in_fp8(self):
        for precision, fp8, machine, peak in (("bf16", "none", "dgx_h100", 989),
                                              ("bf16", "hybrid", "dgx_h100", 1979),
                                              ("fp32", "hybrid", "dgx_h100", 1979),
                                              ("fp32", "hybrid", "dgx_a100", 312)):
            with self.subTest(precision=precision, fp8=fp8, machine=machine):
                answer = self.time("--world-size", 1, "--set", f"train.precision={precision}",
                                   "--set", f"train.fp8={fp8}", machine=machine)
                self.assertAlmostEqual(answer["utilisation"] * peak, answer["tflops_per_device"],
                                       delta=1e-6 * peak)

    def test_hosts_apart_take_longer(self):
        layout = (*HALF, "--set", "parallel.tensor_model_parallel_size=2", "--world-size", 2)
        apart = self.machine(hosts=("ranks_per_host: 8", "ranks_per_host: 1"))
        exposed = "exposed_communication_ms"
        self.assertGreater(self.time(*layout, machine=apart)[exposed], self.time(*layout)[exposed])

    def test_what_is_refused(self):
        for arguments, status, told in (
                (("--world-size", 2), 2, "--machine is required"),
                (("--world-size", 2, "--machine", self.folder / "none"), 2,
                 "is neither a file nor one of the machines that come with "
                 "lockstep: dgx_a100, dgx_h100, "
                 "h100_measured"),
                (("--world-size", 2, "--machine",
                  self.machine(link=("gb_per_s: 25 ", "gb_per_s: 0 "))), 2,
                 "between_hosts.gb_per_s: found 0, allowed: a number > 0"),
                (("--world-size", 3, "--machine", A100), 2, "train.global_batch_size")):
            with self.subTest(told):
                self.assert_failed(run(LOCKSTEP, "plan", "time", TINY, *arguments), status, told)

    def test_a_host_that_was_measured(self):
        path = self.folder / "host.textproto"
        result = run(LOCKSTEP, "doctor", "--calibrate", path, "--ranks", 2, "--json", timeout=900)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        told = json.loads(result.stdout)
        self.assertEqual(told["machine"], str(path))
        self.assertRegex(told["name"], r"^2 CPU ranks of \d+ threads$")
        self.assertIn(b"measuring aten::mm", result.stderr)
        one, two = (self.time("--world-size", ranks, machine=path) for ranks in (1, 2))
        # Two ranks halve the batch, and reduce gradients.
        self.assertGreater(one["compute_ms"], 1.5 * two["compute_ms"])
        self.assertEqual(one["exposed_communication_ms"], 0)
        self.assertGreater(two["exposed_communication_ms"], 0)
        self.assert_failed(run(LOCKSTEP, "plan", "time", TINY, "--world-size", 4, "--machine", path,
                               "--set", "train.global_batch_size=32"),
                           2, "between_hosts is missing")

    def test_measurements_that_cannot_be_made(self):
        for arguments, told in ((("--ranks", 2), "--calibrate"),
                                (("--calibrate", self.folder / "m", "--ranks", 0), "--ranks"),
                                (("--calibrate", self.folder / "m", "--ranks", 100000),
                                 "ranks of this host: found 100000, allowed: 1 to")):
            with self.subTest(told):
                self.assert_failed(run(LOCKSTEP, "doctor", *arguments), 2, told)
        self.assertFalse((self.folder / "m").exists())
        kept = self.folder / "kept"
        kept.write_text("as before")
        self.assert_failed(run(LOCKSTEP, "doctor", "--calibrate", kept, "--ranks", 100000), 2)
        self.assertEqual(kept.read_text(), "as before")
        result = run(LOCKSTEP, "doctor", "--calibrate", self.folder)
        self.assert_failed(result, 1, "found no regular file in its place")
        self.assertNotIn(b"measuring", result.stderr)
        self.assert_failed(run(LOCKSTEP, "doctor", "--calibrate", self.folder / "none/m"), 1,
                           str(self.folder / "none"))

    def test_the_machines_that_come_along_can_be_read(self):
        for path in sorted((SOURCE / "configs/machines").glob("*.textproto")):
            by_path = self.time(*HALF, "--world-size", 1, machine=path)
            self.assertGreater(by_path["step_ms"], 0)
            self.assertEqual(self.time(*HALF, "--world-size", 1, machine=path.stem), by_path)


if __name__ == "__main__":
    unittest.main()
