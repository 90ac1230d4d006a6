"""What the assembler said of our CUDA kernels: nothing is spilled, for any architecture."""

import os
import pathlib
import re
import unittest

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def messages():
    """The texts that cmake/keep_messages left beside the objects of the CUDA sources."""
    folder = pathlib.Path(os.environ["LOCKSTEP_BUILD"], "kernels")
    return [path.read_text() for path in sorted(folder.rglob("*.cu.o.messages"))]


class PtxasTest(unittest.TestCase):
    def test_no_kernel_spills_registers_or_has_a_stack(self):
        entries = spills = 0
        for text in messages():
            entry = None
            for line in text.splitlines():
                if match := ENTRY.search(line):
                    entry, entries = match.groups(), entries + 1
                if match := SPILLS.search(line):
                    spills += 1
                    self.assertEqual(match.groups(), ("0", "0", "0"), entry)
        self.assertGreater(entries, 0)
        self.assertEqual(spills, entries)

    def test_each_kernel_is_built_for_every_architecture(self):
        kernels = {}
        for text in messages():
            for kernel, architecture in ENTRY.findall(text):
                kernels.setdefault(kernel, set()).add(architecture)
        # AdamW and SGD in fp32 and fp64, the sum of squares of three dtypes and its second pass,
        # and the zeros of experts without rows: 9. Of four dtypes, each in packs and element by
        # element: forward and backward of SwiGLU, rotary embedding, RMSNorm and LayerNorm, cross
        # entropy with and without smoothing, their gradient. Losses in fp32 and fp64, with and
        # without smoothing.
        self.assertEqual(len(kernels), 9 + 2 * 4 * (2 * 4 + 2 + 1) + 2 * 2)
        wanted = os.environ["LOCKSTEP_CUDA_ARCHITECTURES"].split()
        for kernel, architectures in kernels.items():
            self.assertEqual(sorted(architectures), sorted(wanted), kernel)

    def test_the_compiler_warns_of_nothing(self):
        for text in messages():
            self.assertNotIn("warning", text.lower())


if __name__ == "__main__":
    unittest.main()
