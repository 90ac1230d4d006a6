"""lockstep plan CONFIG: the parts of the report agree with plan's other commands; and its page."""

import html.parser
import json
import os
import re
import unittest
import xml.etree.ElementTree as ElementTree

from support import LOCKSTEP, SOURCE, EndToEnd, run

TINY = SOURCE / "configs/tiny.textproto"
SVG = "{http://www.w3.org/2000/svg}"
PIPELINE = ("--set", "parallel.pipeline_model_parallel_size=2", "--set",
            "parallel.tensor_model_parallel_size=2", "--set", "train.global_batch_size=64",
            "--set", "train.micro_batch_size=8", "--world-size", 8)
KEYS = ["job", "world_size", "ranks_per_host", "hosts", "parameters", "flops_of_step", "groups",
        "buffers", "schedule", "memory", "links"]


class Elements(html.parser.HTMLParser):
    """The names and attributes of a page's elements."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def boxes(svg, wanted=lambda rect: True):
    """Returns (left, top, right, bottom) of the rectangles of a drawing."""
    found = []
    for rect in svg.iter(SVG + "rect"):
        if rect.get("width") != "100%" and wanted(rect):
            x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found


class PlanReport(EndToEnd):
    def ask(self, *arguments):
        result = run(LOCKSTEP, "plan", *arguments, "--json")
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        return json.loads(result.stdout)

    def test_help_comes_before_the_place_of_a_command(self):
        result = run(LOCKSTEP, "plan", "--help", "groups")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(b"Usage: lockstep plan", result.stdout)

    def test_the_parts_are_those_of_the_other_commands(self):
        report = self.ask(TINY, *PIPELINE)
        self.assertEqual(list(report), KEYS)
        self.assertEqual((report["world_size"], report["ranks_per_host"], report["hosts"]), (8, 8, 1))
        recorded = [stage.pop("recorded_peak_bytes") for stage in report["memory"]]
        self.assertEqual(report["memory"], self.ask("memory", TINY, *PIPELINE)["stages"])
        for stage, peak in zip(report["memory"], recorded):
            self.assertGreater(peak, stage["parameter_bytes"] + stage["optimizer_bytes"])
        groups = self.ask("groups", "--world-size", 8, "--tensor", 2, "--pipeline", 2, "--summary")
        self.assertEqual(report["groups"], groups["groups"])
        schedule = self.ask("schedule", "--pipeline", 2, "--microbatches", 4)
        self.assertEqual(report["schedule"]["family"], "1f1b")
        self.assertEqual(report["schedule"]["microbatches"], 4)
        self.assertEqual(report["schedule"]["alive"], [2, 1])
        for part in ("warmup", "bubble_fraction"):
            self.assertEqual(report["schedule"][part], schedule[part])
        for stage in (0, 1):
            buffers = [b for b in report["buffers"] if b["stage"] == stage]
            self.assertEqual(sum(b["parameters"] for b in buffers),
                             report["memory"][stage]["parameters"])
            for buffer in buffers:
                self.assertEqual(buffer["buckets"][-1][1], buffer["numel"])

    def test_buffers_name_the_group_whose_ranks_they_count(self):
        sharded = ("--world-size", 4, "--set", "train.global_batch_size=32", "--set",
                   "ddp.use_distributed_optimizer=true")
        for instances, group, ranks in ((1, "dp-cp", 4), (2, "intra-dp-cp", 2)):
            options = (TINY, *sharded, "--set",
                       f"parallel.num_distributed_optimizer_instances={instances}")
            with self.subTest(group):
                buffers = self.ask(*options)["buffers"]
                self.assertEqual({(b["group"], b["ranks"]) for b in buffers}, {(group, ranks)})
                text = run(LOCKSTEP, "plan", *options).stdout.decode()
                self.assertRegex(text, rf"\n +0 +0  {group} +{ranks} ")
                page = self.folder / "page.html"
                self.assertEqual(run(LOCKSTEP, "plan", *options, "--html", page).returncode, 0)
                self.assertIn(f"0.0 {group}<", page.read_text())

    def test_bytes_of_gradients_are_those_of_a_ring(self):
        for ranks, batch in ((2, 16), (4, 32)):
            report = self.ask(TINY, "--set", f"train.global_batch_size={batch}", "--world-size",
                              ranks, "--ranks-per-host", 2)
            gradients = report["memory"][0]["gradient_bytes"]
            [use] = [use for use in report["links"]["groups"] if use["group"] == "dp-cp"]
            self.assertEqual(use["ranks"], ranks)
            sent = 2 * (ranks - 1) * gradients // ranks
            # Plus the numbers of tokens and the losses.
            self.assertGreaterEqual(use["most_of_a_rank"], sent)
            self.assertLess(use["most_of_a_rank"], sent + 200)
            total = use["inside_bytes"] + use["between_bytes"]
            self.assertEqual(total, ranks * use["most_of_a_rank"])
            self.assertEqual(use["between_bytes"], 0 if ranks == 2 else total // 2)

    def test_bytes_of_tensor_parallelism(self):
        report = self.ask(TINY, "--set", "parallel.tensor_model_parallel_size=2", "--world-size", 2)
        [use] = [use for use in report["links"]["groups"] if use["group"] == "tp"]
        batch, sequence, hidden, layers = 16, 128, 128, 4
        # A layer all-reduces two outputs in forward and two input gradients in backward, plus one
        # for the embedding and one for the output layer's input. Each of two ranks sends whole
        # tensors.
        tensor = 4 * batch * sequence * hidden
        exact = (4 * layers + 2) * tensor
        # Plus the largest logit and two sums of the loss for each token, and norms.
        self.assertGreater(use["most_of_a_rank"], exact)
        self.assertLess(use["most_of_a_rank"], exact + 4 * 4 * batch * sequence)
        self.assertEqual(use["between_bytes"], 0)

    def test_time_is_that_of_plan_time(self):
        half = (*PIPELINE, "--set", "train.precision=bf16", "--machine", "dgx_a100")
        report = self.ask(TINY, *half)
        self.assertEqual(list(report), [*KEYS, "time"])
        self.assertEqual(report["time"].pop("machine"), "DGX A100")
        self.assertEqual(report["time"], self.ask("time", TINY, *half))
        text = run(LOCKSTEP, "plan", TINY, *half).stdout.decode()
        self.assertIn("on DGX A100: ", text)
        result = run(LOCKSTEP, "plan", TINY, *half, "--ranks-per-host", 4)
        self.assert_failed(result, 2, "--ranks-per-host")

    def test_time_is_drawn(self):
        half = (*PIPELINE, "--set", "train.precision=bf16", "--machine", "dgx_a100")
        classes = self.ask("time", TINY, *half)["classes"]
        [svg] = self.drawings(self.page(*half))["time"]
        parts = boxes(svg, lambda rect: rect.get("class") == "part")
        self.assert_apart(parts, 1e-6)
        self.assertEqual(len({box[1] for box in parts}), len(classes))
        # All ranks take equally long.
        ends = [max(box[2] for box in parts if box[1] == top) for top in {box[1] for box in parts}]
        self.assertLess(max(ends) - min(ends), 0.02)
        for one, top in zip(classes, sorted({box[1] for box in parts})):
            left, _, right, _ = min(box for box in parts if box[1] == top)
            share = one["compute_ms"] / (one["compute_ms"] + one["bubble_ms"] + one["optimizer_ms"]
                                         + sum(one["exposed_communication_ms"].values()))
            self.assertAlmostEqual(right - left, 640 * share, delta=0.05)

    def test_text_names_every_part(self):
        result = run(LOCKSTEP, "plan", TINY, *PIPELINE)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        text = result.stdout.decode()
        for part in ("TFLOP a step", "order tp-cp-ep-dp-pp", "reduced over", "schedule 1f1b",
                     "bubble 20.00 %", "one rank of each pipeline stage", "between hosts"):
            self.assertIn(part, text)

    def page(self, *arguments):
        path = self.folder / "report.html"
        result = run(LOCKSTEP, "plan", TINY, *arguments, "--html", path)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stdout, b"")
        return path.read_text()

    def drawings(self, page):
        """Returns the drawings by the id of their section."""
        found = {}
        for section, body in re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL):
            found[section] = [ElementTree.fromstring(svg)
                              for svg in re.findall(r"<svg.*?</svg>", body, re.DOTALL)]
        return found

    def test_the_page_stands_alone(self):
        page = self.page(*PIPELINE)
        elements = Elements(page).found
        self.assertEqual([e["id"] for tag, e in elements if tag == "section"],
                         ["schedule", "memory", "links", "buckets", "groups"])
        self.assertFalse({"script", "link", "img", "iframe"} & {tag for tag, _ in elements})
        for _, attributes in elements:
            self.assertFalse({"src", "href"} & set(attributes))
        self.assertNotRegex(page.replace('xmlns="http://www.w3.org/2000/svg"', ""), "https?:|url\\(")

    def assert_apart(self, rectangles, slack):
        ordered = sorted(rectangles, key=lambda box: (box[1], box[0]))
        for one, other in zip(ordered, ordered[1:]):
            self.assertLess(one[0], one[2])
            if one[1] == other[1]:
                self.assertLessEqual(one[2], other[0] + slack)
            else:
                self.assertLessEqual(one[3], other[1])

    def test_all_is_drawn_and_nothing_overlaps(self):
        drawings = self.drawings(self.page(*PIPELINE, "--ranks-per-host", 4))
        counts = {section: len(found) for section, found in drawings.items()}
        self.assertEqual(counts, {"schedule": 1, "memory": 1, "links": 1, "buckets": 1,
                                  "groups": 0})
        [timeline] = drawings["schedule"]
        tasks = boxes(timeline, lambda rect: rect.find(SVG + "title") is not None)
        self.assertEqual(len(tasks), 2 * 2 * 4)  # ranks, directions, micro-batches
        self.assert_apart(tasks, 0.11)  # coordinates have one decimal
        for section in ("memory", "links", "buckets"):
            [svg] = drawings[section]
            width, height = float(svg.get("width")), float(svg.get("height"))
            parts = boxes(svg)
            self.assertGreater(len(parts), 1, section)
            self.assert_apart(parts, 0.011)  # here they have two decimals
            for left, top, right, bottom in parts:
                self.assertGreaterEqual(left, 0)
                self.assertGreaterEqual(top, 0)
                self.assertLessEqual(right, width)
                self.assertLessEqual(bottom, height)

    def test_bars_are_as_long_as_what_they_show(self):
        report = self.ask(TINY, *PIPELINE)
        [svg] = self.drawings(self.page(*PIPELINE))["memory"]
        parts = boxes(svg, lambda rect: rect.get("class") == "part")
        rows = sorted({top for _, top, _, _ in parts})
        self.assertEqual(len(rows), 2)
        lengths = [sum(right - left for left, top, right, _ in parts if top == row) for row in rows]
        total = [stage["total_bytes"] for stage in report["memory"]]
        self.assertAlmostEqual(lengths[0] / lengths[1], total[0] / total[1], delta=0.001)

    def test_an_interleaved_schedule_is_drawn(self):
        arguments = (*PIPELINE, "--set", "parallel.virtual_pipeline_model_parallel_size=2")
        [timeline] = self.drawings(self.page(*arguments))["schedule"]
        tasks = boxes(timeline, lambda rect: rect.find(SVG + "title") is not None)
        self.assertEqual(len(tasks), 2 * 2 * 2 * 4)
        self.assert_apart(tasks, 0.11)

    def test_what_is_refused(self):
        for arguments, told in (
                ((TINY,), "--world-size is required"),
                (("--world-size", 2), "CONFIG is required"),
                ((TINY, "--world-size", 3, "--set", "parallel.tensor_model_parallel_size=2"),
                 "parallel.tensor_model_parallel_size (2)"),
                ((TINY, "--world-size", 2, "--ranks-per-host", 0), "--ranks-per-host: found '0'"),
                (("--world-size", 2, "groups", "--world-size", 2),
                 "plan: found '--world-size' before groups, allowed: after it"),
                (("tiny", "groups", "--world-size", 4),
                 "plan: found 'tiny' before groups, allowed: none, because `lockstep plan groups` "
                 "takes no configuration"),
                (("tiny", "memory"),
                 "plan: found 'tiny' before memory, allowed: after it, as in `lockstep plan memory "
                 "tiny`"),
                (("--html", "memory", "groups", "--world-size", 4),
                 "plan: found '--html' before groups, allowed: none, because `lockstep plan "
                 "groups` takes no --html"),
                ((TINY, "--world-size", 2, "--json", "--html", "x"), "--html excludes --json"),
                (("none.textproto", "--world-size", 2), "none.textproto")):
            with self.subTest(told):
                self.assert_failed(run(LOCKSTEP, "plan", *arguments), 2, told)

    def test_all_parts_are_of_one_vocabulary(self):
        odd = (TINY, "--world-size", 2, "--set", "model.vocab_size=300")
        for device, multiple in (("auto", 1), ("cpu", 1), ("cuda", 128)):
            with self.subTest(device):
                report = self.ask(*odd, "--set", f"train.device={device}")
                gradients = 4 * sum(buffer["numel"] for buffer in report["buffers"])
                [use] = [use for use in report["links"]["groups"] if use["group"] == "dp-cp"]
                # Of two ranks each sends all gradients, and a few numbers.
                self.assertGreaterEqual(use["most_of_a_rank"], gradients)
                self.assertLess(use["most_of_a_rank"], gradients + 200)
                same = self.ask(*odd, "--set", f"train.device={device}", "--set",
                                f"model.make_vocab_size_divisible_by={multiple}")
                self.assertEqual(report, same)

    def test_names_are_any_bytes(self):
        config = os.fsencode(self.folder) + b"/caf\xe9.textproto"
        machine = os.fsencode(self.folder) + b"/\xe9.textproto"
        with open(config, "wb") as file:
            file.write(TINY.read_bytes())
        with open(machine, "wb") as file:
            file.write((SOURCE / "configs/machines/dgx_a100.textproto").read_bytes())
        report = self.ask(os.fsdecode(config), "--world-size", 1, "--machine", os.fsdecode(machine))
        self.assertTrue(report["job"].endswith("caf\ufffd.textproto on 1 rank"), report["job"])

    def test_a_name_is_a_configuration_too(self):
        self.assertEqual(self.ask("tiny", "--world-size", 1)["world_size"], 1)


if __name__ == "__main__":
    unittest.main()
