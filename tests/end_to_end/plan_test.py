"""lockstep plan groups: every option, both output formats, what is refused, and a large world."""

import json
import resource
import subprocess
import unittest

from support import LOCKSTEP, SOURCE, EndToEnd, clean_environment, memory_limit, run

KINDS = ["tp", "cp", "dp", "dp-cp", "pp", "tp-pp", "tp-dp", "tp-cp", "tp-dp-cp", "ep", "expert-tp",
         "expert-dp", "tp-ep", "tp-ep-pp", "embedding", "position-embedding", "intra-dp-cp",
         "intra-expert-dp", "inter-optimizer", "intra-optimizer"]
LIMIT = 100_000_000


def plan(*arguments):
    return run(LOCKSTEP, "plan", "groups", *arguments)


def options(sizes):
    """Returns the options for a case of rank_groups_golden.json."""
    arguments = []
    for name, value in sizes.items():
        if value is None or value == [] or name == "virtual_pipeline":
            continue
        value = ",".join(map(str, value)) if isinstance(value, list) else value
        arguments += ["--" + name.replace("_", "-"), value]
    return arguments


class Plan(EndToEnd):
    def groups(self, *arguments):
        result = plan("--json", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        return json.loads(result.stdout)

    def test_the_contract(self):
        plan_of_16 = self.groups("--world-size", 16, "--tensor", 2, "--pipeline", 4)
        self.assertEqual(list(plan_of_16), ["world_size", "order", "sizes", "groups"])
        self.assertEqual(plan_of_16["world_size"], 16)
        self.assertEqual(plan_of_16["order"], "tp-cp-ep-dp-pp")
        self.assertEqual(plan_of_16["sizes"], {"tp": 2, "cp": 1, "dp": 2, "pp": 4, "ep": 1,
                                               "etp": 2, "edp": 2})
        self.assertEqual(list(plan_of_16["groups"]), KINDS)
        self.assertEqual(plan_of_16["groups"]["tp"], [[r, r + 1] for r in range(0, 16, 2)])
        self.assertEqual(plan_of_16["groups"]["embedding"], [[r, r + 12] for r in range(4)])
        self.assertEqual(plan_of_16["groups"]["inter-optimizer"], [])

    def test_equals_megatron_core_in_every_form(self):
        golden = json.loads((SOURCE / "tests/parallel_state/rank_groups_golden.json").read_text())
        listed = [c for c in golden["cases"] if isinstance(c["groups"]["tp"], list)]
        self.assertGreater(len(listed), 30)
        for case in listed:
            arguments = options(case["sizes"])
            with self.subTest(arguments):
                answer = self.groups(*arguments)
                self.assertEqual(answer["order"], case["sizes"]["order"])
                self.assertEqual(answer["groups"], case["groups"])
                rank = case["sizes"]["world_size"] - 2
                own = self.groups(*arguments, "--rank", rank)
                self.assertEqual(own["groups"], {
                    kind: next((g for g in groups if rank in g), [])
                    for kind, groups in case["groups"].items()})
                summary = self.groups(*arguments, "--summary")
                self.assertEqual(summary["groups"], {
                    kind: {"count": len(groups), "size": len(groups[0]) if groups else 0}
                    for kind, groups in case["groups"].items()})
                self.assertEqual(own["sizes"], summary["sizes"])

    def test_pp_may_stand_anywhere_if_dense_and_expert_layers_have_the_same_stages(self):
        """Megatron Core requires pp last, or the same number of data-parallel ranks for both."""
        answer = self.groups("--world-size", 8, "--pipeline", 2, "--expert", 2, "--order",
                             "tp-cp-pp-ep-dp")
        self.assertEqual((answer["sizes"]["dp"], answer["sizes"]["edp"]), (4, 2))
        self.assertEqual(answer["groups"]["pp"], [[0, 1], [2, 3], [4, 5], [6, 7]])
        self.assertEqual(answer["groups"]["ep"], [[0, 2], [1, 3], [4, 6], [5, 7]])
        self.assertEqual(answer["groups"]["dp"], [[0, 2, 4, 6], [1, 3, 5, 7]])

    def test_text_form(self):
        arguments = ("--world-size", 8, "--context", 4, "--pipeline", 2, "--hierarchical-context",
                     "2,2")
        lines = plan(*arguments).stdout.decode().splitlines()
        self.assertEqual(lines[0], "world size 8, order tp-cp-ep-dp-pp: "
                                   "tp 1 cp 4 dp 1 pp 2 ep 1 etp 1 edp 4")
        self.assertIn("pp                  0 4 | 1 5 | 2 6 | 3 7", lines)
        self.assertIn("cp-level-1          0 2 | 1 3 | 4 6 | 5 7", lines)
        self.assertEqual([line.split()[0] for line in lines[1:]],
                         KINDS + ["cp-level-0", "cp-level-1"])
        own = plan(*arguments, "--rank", 6).stdout.decode().splitlines()
        self.assertIn("cp-level-0          6 7", own)
        self.assertIn("inter-optimizer     -", own)
        summary = plan(*arguments, "--summary").stdout.decode().splitlines()
        self.assertIn("cp-level-0          4 x 2", summary)

    def test_unusable_arguments_exit_2_and_are_named(self):
        of_8 = ("--world-size", 8)
        cases = [
            ((), "--world-size is required"),
            (("--world-size", 0), "world-size: found 0, allowed: >= 1"),
            (("--world-size", -4), "world-size: found -4, allowed: >= 1"),
            (("--world-size", "many"), "--world-size: found 'many'"),
            (("--world-size", "8.5"), "--world-size: found '8.5'"),
            (("--world-size", 10**20), "--world-size: found '1000"),
            ((*of_8, "--tensor", 3), "lockstep: --world-size (8) is not divisible by --tensor (3) x "),
            ((*of_8, "--tensor", 0), "tensor: found 0"),
            ((*of_8, "--pipeline", 3), "pipeline (3)"),
            ((*of_8, "--context", -1), "context: found -1"),
            ((*of_8, "--expert", 3), "--expert (3)"),
            ((*of_8, "--expert-tensor", 3), "--expert-tensor (3)"),
            ((*of_8, "--rank", 8), "lockstep: --rank: found 8, allowed: 0 to 7, because --world-size is 8"),
            ((*of_8, "--rank", -1), "lockstep: --rank: found -1, allowed: 0 to 7"),
            ((*of_8, "--rank", 1, "--summary"), "--rank excludes --summary"),
            ((*of_8, "--summary", "--rank", 1), "--rank excludes --summary"),
            ((*of_8, "--order", "tp-xp"), "lockstep: --order 'tp-xp': found axis 'xp'"),
            ((*of_8, "--order", "tp-dp-dp"), "axis 'dp' is named twice"),
            ((*of_8, "--order", "tp-pp"), "lacks axis 'dp', whose size is 8"),
            ((*of_8, "--order", "tp-"), "found axis ''"),
            ((*of_8, "--order", "dp-pp-ep", "--pipeline", 2, "--expert", 2), "pp must come last, because the dense grid and"),
            ((*of_8, "--optimizer-instances", 3), "optimizer-instances (3) must divide"),
            ((*of_8, "--expert", 4, "--optimizer-instances", 4), "expert dp = 2"),
            ((*of_8, "--context", 4, "--hierarchical-context", "2,3"),
             "--hierarchical-context: found 2,3, allowed: sizes whose product is --context (4)"),
            ((*of_8, "--context", 4, "--hierarchical-context", "2,,2"),
             "--hierarchical-context: found '2,,2'"),
            ((*of_8, "--ranks", 1), "--ranks"),
            ((*of_8, "more"), "more"),
        ]
        for arguments, part in cases:
            with self.subTest(part):
                result = plan(*arguments)
                self.assert_failed(result, 2, part)
                self.assertEqual(result.stdout, b"")
        self.assert_failed(run(LOCKSTEP, "plan"), 2, "subcommand is required")
        self.assert_failed(run(LOCKSTEP, "plan", "group"), 2, "'group'; did you mean 'groups'?")
        self.assert_failed(run(LOCKSTEP, "plan", "xyzzy"), 2, "'xyzzy'; allowed: groups, buckets")

    def test_help(self):
        self.assertIn(b"  plan  ", run(LOCKSTEP, "--help").stdout)
        text = plan("--help").stdout.decode()
        for option in ("--world-size", "--tensor", "--pipeline", "--context", "--expert",
                       "--expert-tensor", "--order", "--optimizer-instances",
                       "--hierarchical-context", "--rank", "--summary", "--json"):
            self.assertIn(f"  {option} ", text)

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "wb") as full:
            result = subprocess.run([LOCKSTEP, "plan", "groups", "--world-size", "8"], stdout=full,
                                    stderr=subprocess.PIPE, env=clean_environment(), check=False)
        self.assert_failed(result, 1, "standard output cannot be written: No space left on device")

    def groups_in_little_memory(self, *arguments):
        """Returns the answer, computed in an address space of LIMIT bytes."""
        limit = memory_limit(LIMIT)
        result = subprocess.run(
            [LOCKSTEP, "plan", "groups", "--json", *map(str, arguments)], stdout=subprocess.PIPE,
            env=clean_environment(), check=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        return json.loads(result.stdout)["groups"]

    def test_a_million_ranks_need_no_table(self):
        world = ("--world-size", 1 << 20)
        parts = ("--tensor", 8, "--pipeline", 16, "--context", 2, "--expert", 8)
        groups = self.groups_in_little_memory(*world, "--rank", 1 << 19)
        self.assertEqual(groups["dp"], list(range(1 << 20)))
        self.assertEqual(groups["tp"], [1 << 19])
        summary = self.groups_in_little_memory(*world, *parts, "--summary")
        self.assertEqual(summary["pp"], {"count": 1 << 16, "size": 16})
        self.assertEqual(self.groups_in_little_memory(*world, *parts, "--rank", 0)["pp"],
                         list(range(0, 1 << 20, 1 << 16)))

    def test_all_groups_of_65536_ranks(self):
        groups = self.groups_in_little_memory("--world-size", 65536, "--tensor", 8, "--pipeline", 4,
                                              "--expert", 16, "--optimizer-instances", 4)
        self.assertEqual(groups["tp"], [list(range(r, r + 8)) for r in range(0, 65536, 8)])
        for kind, count in (("intra-dp-cp", 32 * 4), ("inter-optimizer", 65536 // 4)):
            self.assertEqual(len(groups[kind]), count)
            self.assertEqual(sorted(r for g in groups[kind] for r in g), list(range(65536)))


if __name__ == "__main__":
    unittest.main()
