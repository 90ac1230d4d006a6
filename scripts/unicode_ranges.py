"""Writes datasets/pieces/unicode_ranges.h and unicode_letters.h: the character classes by which
texts are split, as tiktoken's regular expressions define them; those of PyPI's tokenizers are the
same. Also writes unicode_marks.h: the characters that tokenizers' normalization joins to the
preceding characters or reorders.

Run it with tiktoken and tokenizers: python scripts/unicode_ranges.py
"""

import pathlib

import tiktoken
import tokenizers

SOURCE = pathlib.Path(__file__).resolve().parents[1]
BYTES = {bytes([b]): b for b in range(256)}
COLUMNS = 100


def joined(points):
    """Joins ascending code points into ranges (first, last)."""
    ranges = []
    for point in points:
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return ranges


def characters():
    return (point for point in range(0x110000) if not 0xD800 <= point < 0xE000)


def ranges_of(pattern):
    """Returns the code points that the pattern matches; tiktoken drops all others."""
    encoding = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=BYTES, special_tokens={})
    return joined(point for point in characters() if encoding.encode(chr(point)))


def combining_ranges():
    """Returns characters that normalization reorders or joins to the preceding ones, and all but
    the first character of every decomposition."""
    composed, decomposed = tokenizers.normalizers.NFC(), tokenizers.normalizers.NFD()
    found = set()
    for point in characters():
        character = chr(point)
        parts = decomposed.normalize_str(character)
        found.update(map(ord, parts[1:]))
        texts = (f"a\u0315{character}", f"a{character}\u0334", f"a\u0345{character}")
        if parts == character and any(composed.normalize_str(text) != text for text in texts):
            found.add(point)
    return joined(sorted(found))


def classes(*names):
    """Returns tables of Unicode's classes, given as pairs of our name and Unicode's short name."""
    return [(name, ranges_of(rf"\p{{{short}}}")) for name, short in names]


def lines_of(name, ranges):
    texts = [f"{{{first:#x}, {last:#x}}}," for first, last in ranges]
    yield f"inline constexpr CodePointRange k{name}Ranges[] = {{"
    line = " "
    for text in texts:
        if len(line) + 1 + len(text) > COLUMNS:
            yield line
            line = " "
        line += " " + text
    yield line
    yield "};"


def write(name, made_with, includes, front, tables):
    lines = ["#pragma once", "", f"// Written by scripts/unicode_ranges.py with {made_with}.", "",
             *includes, "", "namespace lockstep {", "", *front, "// clang-format off",
             *(line for table in tables for line in lines_of(*table)),
             "// clang-format on", "", "}  // namespace lockstep"]
    (SOURCE / "datasets/pieces" / name).write_text("\n".join(lines) + "\n")


def main():
    write("unicode_ranges.h", f"tiktoken {tiktoken.__version__}", ["#include <cstdint>"],
          ["struct CodePointRange {", "  uint32_t first;", "  uint32_t last;  ///< inclusive", "};",
           ""],
          [("Space", ranges_of(r"\s")),
           *classes(("Letter", "L"), ("Number", "N"), ("Mark", "M"), ("Punctuation", "P"),
                    ("Symbol", "S"))])
    write("unicode_letters.h", f"tiktoken {tiktoken.__version__}",
          ['#include "lockstep/datasets/unicode_ranges.h"'], [],
          classes(("UppercaseLetter", "Lu"), ("LowercaseLetter", "Ll"), ("TitlecaseLetter", "Lt"),
                  ("ModifierLetter", "Lm")))
    write("unicode_marks.h", f"tokenizers {tokenizers.__version__}",
          ['#include "lockstep/datasets/unicode_ranges.h"'], [],
          [("Combining", combining_ranges())])


if __name__ == "__main__":
    main()
