"""Pages and pictures in a browser: each part is drawn, and no part covers another."""

import re
import unittest

from browser import BROWSER, Look, inside, overlaps
from support import LOCKSTEP, SOURCE, EndToEnd, run

PARTS = ["schedule", "memory", "time", "links", "buckets", "groups"]
MOE = SOURCE / "configs/moe_tiny.textproto"
TINY = SOURCE / "configs/tiny.textproto"


def settings(*fields):
    return [word for field in fields for word in ("--set", field)]


def color_of(text):
    """Parses "rgb(1, 2, 3)"; returns None for a transparent color."""
    numbers = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", text)
    return tuple(map(int, numbers.groups())) if numbers else None


def uncovered_point(box, others):
    """Returns a point well inside a box that none of `others` covers; None if there is none."""
    for part in (2, 4, 6, 8):
        x = box.left + (box.right - box.left) / part
        y = (box.top + box.bottom) / 2
        if min(x - box.left, y - box.top) > 3 and not any(
                each.left - 1 <= x <= each.right + 1 and each.top - 1 <= y <= each.bottom + 1
                for each in others):
            return x, y
    return None


@unittest.skipUnless(BROWSER, "no browser that runs: scripts/setup browser")
class InABrowser(EndToEnd):
    def report(self, config, *arguments):
        path = self.folder / "report.html"
        result = run(LOCKSTEP, "plan", config, *arguments, "--html", path)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return path.read_text()

    def check_drawing(self, look, drawing):
        box, texts, rects = drawing
        self.assertGreater(len(texts), 1)
        for i, text in enumerate(texts):
            self.assertTrue(inside(text, box), f"'{text.name}' sticks out of its drawing")
            for other in texts[:i]:
                self.assertFalse(overlaps(text, other), f"'{text.name}' lies on '{other.name}'")
        drawn = 0
        for index, rect in enumerate(rects):
            self.assertTrue(inside(rect, box), rect)
            point = uncovered_point(rect, rects[index + 1:] + texts)
            if color_of(rect.name) and point and look.shows(*point):
                self.assertEqual(look.color_at(*point), color_of(rect.name), rect)
                drawn += 1
        return drawn

    def check_page(self, page, width=1200):
        look = Look(page, width)
        self.assertLessEqual(look.width, width)  # no horizontal scrolling
        self.assertEqual([each.name for each in look.sections if each.name in PARTS],
                         [part for part in PARTS if f'<section id="{part}">' in page])
        for i, section in enumerate(look.sections):
            self.assertGreater(section.bottom - section.top, 10, section)
            for other in look.sections[:i]:
                self.assertFalse(overlaps(section, other), f"{section} lies on {other}")
        self.assertGreaterEqual(len(look.drawings), 3)
        drawn = sum(self.check_drawing(look, drawing) for drawing in look.drawings)
        self.assertGreater(drawn, 10)
        return look

    def test_a_report_with_all_parts(self):
        page = self.report(MOE, "--world-size", 8, "--machine", "dgx_a100", *settings(
            "parallel.pipeline_model_parallel_size=2", "train.global_batch_size=64"))
        look = self.check_page(page)
        self.assertEqual([each.name for each in look.sections if each.name in PARTS], PARTS)

    def test_reports_of_other_layouts(self):
        for arguments in (
                ("--world-size", 1),
                ("--world-size", 64, *settings(
                    "parallel.tensor_model_parallel_size=2", "train.global_batch_size=512",
                    "parallel.pipeline_model_parallel_size=4", "model.num_layers=16",
                    "parallel.virtual_pipeline_model_parallel_size=2")),
                ("--world-size", 16, "--machine", "dgx_h100", *settings(
                    "parallel.context_parallel_size=2", "train.global_batch_size=64",
                    "ddp.use_distributed_optimizer=true"))):
            with self.subTest(arguments=arguments):
                self.check_page(self.report(TINY, *arguments))

    def test_a_report_on_a_narrow_screen(self):
        self.check_page(self.report(TINY, "--world-size", 2), 500)

    def test_a_figure_that_covers_another_is_seen(self):
        page = self.report(TINY, "--world-size", 2)
        moved = page.replace('<section id="memory">',
                             '<section id="memory" style="margin-top: -60px">')
        self.assertNotEqual(moved, page)
        with self.assertRaises(AssertionError):
            self.check_page(moved)
        with self.assertRaises(AssertionError):  # a part that exists but is not drawn
            self.check_page(page.replace("<rect ", '<rect opacity="0.1" '))

    def test_the_pictures_of_readme_and_docs(self):
        pictures = sorted((SOURCE / "docs/images").glob("*.svg"))
        self.assertGreaterEqual(len(pictures), 3)
        for picture in pictures:
            with self.subTest(picture=picture.name):
                look = Look(picture.read_text())
                [drawing] = look.drawings
                self.check_drawing(look, drawing)

    def test_the_curve_of_a_run(self):
        output = self.folder / "run"
        result = run(LOCKSTEP, "train", TINY, "--output", output, *settings(
            "train.train_iters=12", "train.eval_interval=4", "train.eval_iters=1",
            "model.num_layers=1", "train.sample_tokens=0"))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        look = Look((output / "loss.svg").read_text())
        [drawing] = look.drawings
        self.check_drawing(look, drawing)


if __name__ == "__main__":
    unittest.main()
