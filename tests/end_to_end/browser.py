"""Examines pages and pictures as a browser draws them: a headless Chromium measures the boxes of a
page and takes a screenshot, whose pixels are read here."""

import collections
import html
import json
import math
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import zlib

HEADLESS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--force-device-scale-factor=1")


def find_browser():
    """Returns a browser that draws an empty page here, or None."""
    for path in filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        with tempfile.TemporaryDirectory() as profile:
            try:
                if subprocess.run([path, *HEADLESS, f"--user-data-dir={profile}", "--dump-dom",
                                   "about:blank"], capture_output=True, timeout=60,
                                  check=False).returncode == 0:
                    return path
            except (OSError, subprocess.TimeoutExpired):
                continue
    return None


BROWSER = find_browser()
WIDTH, HEIGHT = 1200, 4000
Box = collections.namedtuple("Box", "left top right bottom name")

# Puts the measurements into the page; --dump-dom returns them from there.
MEASURE = """<script>
addEventListener("load", () => {
  const box = (element, name) => {
    const r = element.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom, name];
  };
  const all = (root, tags) => [...root.querySelectorAll(tags)];
  const found = {
    width: document.documentElement.scrollWidth,
    bottom: document.body.getBoundingClientRect().bottom,
    sections: all(document, "section, h1, body > p").map(e => box(e, e.id || e.tagName)),
    drawings: all(document, "svg").map(svg => ({
      box: box(svg, ""),
      texts: all(svg, "text").map(e => box(e, e.textContent)),
      rects: all(svg, "rect").map(e => box(e, getComputedStyle(e).fill))}))};
  const place = document.createElement("pre");
  place.id = "measured";
  place.textContent = JSON.stringify(found);
  place.style.display = "none";
  document.body.append(place);
});
</script>"""


class Look:
    """A page as the browser draws it, or a drawing on its own page."""

    def __init__(self, text, width=WIDTH):
        if text.lstrip().startswith("<svg") or text.lstrip().startswith("<?xml"):
            text = f"<!DOCTYPE html><body style='margin:0'>{text[text.index('<svg'):]}</body>"
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder, "page.html")
            page.write_text(text.replace("</body>", MEASURE + "</body>"))
            picture = pathlib.Path(folder, "picture.png")
            dom = self.browse(width, HEIGHT, "--dump-dom", page.as_uri())
            found = json.loads(
                html.unescape(re.search(r'id="measured"[^>]*>(.*?)</pre>', dom, re.S)[1]))
            self.browse(width, math.ceil(found["bottom"]), f"--screenshot={picture}",
                        page.as_uri())
            self.pixels = read_png(picture.read_bytes())
        self.width = found["width"]
        self.sections = [Box(*each) for each in found["sections"]]
        self.drawings = [(Box(*drawing["box"]), [Box(*each) for each in drawing["texts"]],
                          [Box(*each) for each in drawing["rects"]])
                         for drawing in found["drawings"]]

    @staticmethod
    def browse(width, height, *arguments):
        with tempfile.TemporaryDirectory() as profile:
            result = subprocess.run(
                [BROWSER, *HEADLESS, f"--user-data-dir={profile}",
                 f"--window-size={width},{height}", *arguments],
                capture_output=True, timeout=120, check=True)
        return result.stdout.decode()

    def shows(self, x, y):
        """Returns whether a point is on the page, not in a part of a section that is hidden until
        it is scrolled."""
        holders = [each for each in self.sections if each.top <= y <= each.bottom]
        return y < len(self.pixels) and all(each.left <= x <= each.right for each in holders)

    def color_at(self, x, y):
        """Returns (red, green, blue) of the screenshot."""
        return tuple(self.pixels[int(y)][3 * int(x):3 * int(x) + 3])


def overlaps(first, second, slack=1):
    """Returns whether two boxes overlap by more than `slack` pixels in both directions."""
    return (min(first.right, second.right) - max(first.left, second.left) > slack
            and min(first.bottom, second.bottom) - max(first.top, second.top) > slack)


def inside(inner, outer, slack=1):
    return (inner.left >= outer.left - slack and inner.right <= outer.right + slack
            and inner.top >= outer.top - slack and inner.bottom <= outer.bottom + slack)


def undo_filter(kind, row, above, size):
    """Decodes a row of a PNG file from its bytes under filter `kind`; a pixel has `size` bytes."""
    if kind == 2:
        row[:] = bytes((byte + up) & 255 for byte, up in zip(row, above))
        return
    for i in range(len(row)):
        left = row[i - size] if i >= size else 0
        up = above[i]
        corner = above[i - size] if i >= size else 0
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up) // 2
        else:
            guess = min((left, up, corner), key=lambda each: abs(left + up - corner - each))
        row[i] = (row[i] + guess) & 255


def read_png(data):
    """Returns the rows of an image of 8-bit RGB or RGBA, as bytes of RGB."""
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    if depth != 8 or kind not in (2, 6):
        raise ValueError(f"a PNG of depth {depth} and color type {kind}")
    size = 3 if kind == 2 else 4
    packed, at = b"", 8
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at:at + 8])
        if name == b"IDAT":
            packed += data[at + 8:at + 8 + length]
        at += length + 12
    raw, rows = zlib.decompress(packed), []
    above = bytes(width * size)
    for y in range(height):
        start = y * (width * size + 1)
        row = bytearray(raw[start + 1:start + 1 + width * size])
        if raw[start]:
            undo_filter(raw[start], row, above, size)
        above = row
        rows.append(bytes(row) if size == 3 else
                    b"".join(row[i:i + 3] for i in range(0, len(row), 4)))
    return rows
