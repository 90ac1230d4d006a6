"""Writes datasets/tokenizers/unicode_ranges.h: the letters, numbers and white space that GPT-2's splitting
of a text distinguishes, as tiktoken's regular expressions know them.

Run where tiktoken is installed: python scripts/unicode_ranges.py
"""

import pathlib

import tiktoken

SOURCE = pathlib.Path(__file__).resolve().parents[1]
BYTES = {bytes([b]): b for b in range(256)}
PER_LINE = 6


def ranges_of(pattern):
    """Code points that the pattern matches, as (first, last): what it does not match is dropped."""
    encoding = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=BYTES, special_tokens={})
    ranges = []
    for point in range(0x110000):
        if 0xD800 <= point < 0xE000 or not encoding.encode(chr(point)):
            continue
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return ranges


def main():
    lines = ["#pragma once", "",
             f"// Written by scripts/unicode_ranges.py with tiktoken {tiktoken.__version__}.", "",
             "#include <cstdint>", "", "namespace lockstep {", "",
             "struct CodePointRange {", "  uint32_t first;", "  uint32_t last;  ///< inclusive",
             "};", "", "// clang-format off"]
    for name, pattern in (("Letter", r"\p{L}"), ("Number", r"\p{N}"), ("Space", r"\s")):
        ranges = [f"{{{first:#x}, {last:#x}}}," for first, last in ranges_of(pattern)]
        lines.append(f"inline constexpr CodePointRange k{name}Ranges[] = {{")
        lines += ["  " + " ".join(ranges[i:i + PER_LINE]) for i in range(0, len(ranges), PER_LINE)]
        lines.append("};")
    lines += ["// clang-format on", "", "}  // namespace lockstep"]
    (SOURCE / "datasets/tokenizers/unicode_ranges.h").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
