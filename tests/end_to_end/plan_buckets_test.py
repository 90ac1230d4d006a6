"""lockstep plan buckets: every option, both output formats, what is refused."""

import json
import subprocess
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, clean_environment, run

LARGEST = 2**63 - 1


def plan(*arguments):
    return run(LOCKSTEP, "plan", "buckets", *arguments)


def comma(numbers):
    return ",".join(map(str, numbers))


def options(case):
    """Returns the options for a case of param_layout_golden.json."""
    arguments = ["--numel", comma(case["numels"]), "--data-parallel", case["data_parallel"]]
    if case["shared"]:
        arguments += ["--shared", comma(case["shared"])]
    if case["bucket_size"] is not None:
        arguments += ["--bucket-size", max(case["bucket_size"], 1)]
    if case["distributed_optimizer"]:
        arguments += ["--distributed-optimizer"]
    if case["high_bandwidth"]:
        arguments += ["--pad-for-high-bus-bandwidth"]
    return arguments


class PlanBuckets(EndToEnd):
    def layout(self, *arguments):
        result = plan("--json", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        return json.loads(result.stdout)

    def buckets(self, *arguments):
        return [(b["start"], b["end"], b["numel_unpadded"])
                for b in self.layout(*arguments)["buckets"]]

    def test_the_contract(self):
        result = plan("--numel", "97,103", "--data-parallel", 2, "--distributed-optimizer",
                      "--json")
        self.assertEqual(result.stdout.decode(), """\
{"numel":256,"numel_unpadded":225,\
"params":[{"index":1,"start":0,"end":103,"bucket":0},{"index":0,"start":128,"end":225,"bucket":0}],\
"buckets":[{"start":0,"end":256,"numel_unpadded":225,"params":[1,0]}],\
"shards":[{"bucket":0,"rank":0,"param":1,"param_start":0,"param_end":103,\
"buffer_start":0,"buffer_end":103},\
{"bucket":0,"rank":1,"param":0,"param_start":0,"param_end":97,\
"buffer_start":128,"buffer_end":225}]}
""")

    def test_equals_megatron_core(self):
        golden = json.loads((SOURCE / "tests/distributed/param_layout_golden.json").read_text())
        self.assertGreater(len(golden["cases"]), 100)
        for case in golden["cases"]:
            arguments = options(case)
            with self.subTest(arguments):
                layout = self.layout(*arguments)
                self.assertEqual(list(layout),
                                 ["numel", "numel_unpadded", "params", "buckets", "shards"])
                self.assertEqual(layout["numel"], case["numel"])
                self.assertEqual(layout["numel_unpadded"], case["numel_unpadded"])
                order = [index for bucket in case["buckets"] for index in bucket[3]]
                self.assertEqual([list(p.values()) for p in layout["params"]],
                                 [[index, *case["slots"][index]] for index in order])
                self.assertEqual([list(b.values()) for b in layout["buckets"]], case["buckets"])
                listed = [s for s in layout["shards"] if s["rank"] in case.get("ranks", [])]
                self.assertEqual(
                    sorted(list(s.values()) for s in listed),
                    sorted([bucket, rank, param, at, at + size, start, start + size]
                           for bucket, rank, param, size, start, _, _, at in
                           case.get("ranges", [])))
                places = [(s["bucket"], s["rank"], s["buffer_start"]) for s in layout["shards"]]
                self.assertEqual(places, sorted(places))

    def test_sizes_of_buckets(self):
        ten = ("--numel", comma([9025] * 10), "--data-parallel", 8)
        self.assertEqual(self.buckets(*ten), [(0, 90250, 90250)])
        self.assertEqual(len(self.buckets(*ten, "--bucket-size", 9025)), 10)
        self.assertEqual(self.buckets(*ten, "--num-buckets", 5),
                         [(i * 18050, (i + 1) * 18050, 18050) for i in range(5)])
        self.assertEqual(len(self.buckets(*ten, "--num-buckets", 4)), 4)  # 27075 x 3 + 9025
        self.assertEqual(len(self.buckets(*ten, "--num-buckets", 90251)), 10)
        hundred = ("--numel", comma([1] * 100), "--data-parallel", 1, "--num-buckets", 4)
        self.assertEqual(self.buckets(*hundred), self.buckets(*hundred[:4], "--bucket-size", 25))

    def test_what_matters_to_the_distributed_optimizer_only(self):
        plain = self.layout("--numel", "10,20,30", "--data-parallel", 3)
        self.assertEqual(plain["shards"], [])
        self.assertEqual([p["start"] for p in plain["params"]], [0, 30, 50])
        self.assertEqual(plain, self.layout("--numel", "10,20,30", "--data-parallel", 7, "--shared",
                                            "2,0", "--pad-for-high-bus-bandwidth"))
        shared = self.layout("--numel", "10,20,30", "--data-parallel", 3, "--shared", "2,0",
                             "--distributed-optimizer")
        self.assertEqual([b["params"] for b in shared["buckets"]], [[2], [1], [0]])

    def test_text_form(self):
        lines = plan("--numel", "97,103", "--data-parallel", 2,
                     "--distributed-optimizer").stdout.decode().splitlines()
        self.assertEqual(lines[0], "buffer of 256 elements, 225 without the padding of buckets; "
                                   "2 parameters, 1 bucket")
        table = [line.split() for line in lines]
        self.assertIn(["0", "128", "225", "0"], table)
        self.assertIn(["0", "0", "256", "225", "1", "0"], table)
        self.assertIn(["0", "1", "0", "0", "97", "128", "225"], table)

    def test_a_million_ranks(self):
        layout = self.layout("--numel", 10**12, "--data-parallel", 10**6, "--distributed-optimizer")
        self.assertEqual(layout["shards"][123456], {
            "bucket": 0, "rank": 123456, "param": 0, "param_start": 123456 * 10**6,
            "param_end": 123457 * 10**6, "buffer_start": 123456 * 10**6,
            "buffer_end": 123457 * 10**6})

    def test_unusable_arguments_exit_2_and_are_named(self):
        ok = ("--numel", "97,103", "--data-parallel", 2)
        cases = [
            ((), "--numel is required"),
            (("--numel", 97), "--data-parallel is required"),
            (("--data-parallel", 2), "--numel is required"),
            (("--numel", "", "--data-parallel", 2), "--numel: found '', allowed: integers"),
            (("--numel", "97,", "--data-parallel", 2), "--numel: found '97,'"),
            (("--numel", "97,,3", "--data-parallel", 2), "--numel: found '97,,3'"),
            (("--numel", "97,x", "--data-parallel", 2), "--numel: found '97,x'"),
            (("--numel", "97.5", "--data-parallel", 2), "--numel: found '97.5'"),
            (("--numel", "1e3", "--data-parallel", 2), "--numel: found '1e3'"),
            (("--numel", LARGEST + 1, "--data-parallel", 2), "--numel: found '9223372036854775808'"),
            (("--numel", "97,0", "--data-parallel", 2),
             "--numel: parameter 1: found 0 elements, allowed: >= 1"),
            (("--numel", "-5,3", "--data-parallel", 2),
             "--numel: parameter 0: found -5 elements, allowed: >= 1"),
            ((*ok, "--shared", 2), "--shared: found 2, allowed: 0 to 1"),
            ((*ok, "--shared", -1), "--shared: found -1, allowed: 0 to 1"),
            ((*ok, "--shared", "1,0,1"), "--shared: found 1 twice, allowed: each index once"),
            ((*ok, "--shared", ""), "--shared: found ''"),
            (("--numel", 97, "--data-parallel", 0), "--data-parallel: found '0', allowed: an"),
            (("--numel", 97, "--data-parallel", -2), "--data-parallel: found '-2'"),
            (("--numel", 97, "--data-parallel", "2.5"), "--data-parallel: found '2.5'"),
            ((*ok, "--bucket-size", 0), "--bucket-size: found '0', allowed: an integer >= 1"),
            ((*ok, "--num-buckets", 0), "--num-buckets: found '0', allowed: an integer >= 1"),
            ((*ok, "--num-buckets", -3), "--num-buckets: found '-3'"),
            ((*ok, "--bucket-size", 5, "--num-buckets", 2), "excludes"),
            ((*ok, "--num-buckets", 2, "--bucket-size", 5), "excludes"),
            (("--numel", f"{LARGEST},1", "--data-parallel", 1), 
             f"--numel, --data-parallel (1): size of the buffer: 1 + {LARGEST} does"),
            (("--numel", f"{LARGEST},1", "--data-parallel", 1, "--num-buckets", 2),
             "--numel, --data-parallel (1): sum: 9223372036854775807 + 1 does not fit into"),
            (("--numel", LARGEST, "--data-parallel", 1, "--distributed-optimizer"),
             "does not fit into 64 bits"),
            (("--numel", f"1,{LARGEST}", "--data-parallel", 1, "--distributed-optimizer"),
             "size of the buffer: "),
            ((*ok[:2], "--data-parallel", LARGEST, "--distributed-optimizer"),
             f"--data-parallel ({LARGEST}): "),
            ((*ok, "--pad"), "--pad"),
            ((*ok, "more"), "more"),
        ]
        for arguments, part in cases:
            with self.subTest(part):
                result = plan(*arguments)
                self.assert_failed(result, 2, part)
                self.assertEqual(result.stdout, b"")

    def test_help(self):
        text = plan("--help").stdout.decode()
        for option in ("--numel", "--shared", "--data-parallel", "--bucket-size", "--num-buckets",
                       "--distributed-optimizer", "--pad-for-high-bus-bandwidth", "--json"):
            self.assertRegex(text, rf"  {option}\s")
        self.assertIn("count elements", text)

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                [LOCKSTEP, "plan", "buckets", "--numel", "5", "--data-parallel", "2"], stdout=full,
                stderr=subprocess.PIPE, env=clean_environment(), check=False)
        self.assert_failed(result, 1, "plan buckets: standard output cannot be written: No space "
                           "left on device")


if __name__ == "__main__":
    unittest.main()
