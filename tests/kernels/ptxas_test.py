"""Checks the compiled CUDA sources: no kernel spills, each has every architecture, and no host
function calls a device function."""

import os
import pathlib
import re
import subprocess
import unittest

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
SHARED = re.compile(r"(\d+) bytes smem")
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def build_folder():
    return pathlib.Path(os.environ["LOCKSTEP_BUILD"], "kernels")


def messages():
    """Returns the texts that cmake/keep_messages left next to the objects of the CUDA sources."""
    return [path.read_text() for path in sorted(build_folder().rglob("*.cu.o.messages"))]


def references(path):
    """Returns {function of an object: the symbols that its code refers to}."""
    listing = subprocess.run(["objdump", "-drC", "--no-show-raw-insn", path], check=True,
                             capture_output=True, text=True).stdout
    function, found = "", {}
    for line in listing.splitlines():
        if match := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            function = match.group(1)
        elif match := re.search(r"R_X86_64_\w+\s+(.+)$", line):
            found.setdefault(function, []).append(match.group(1))
    return found


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

    def test_the_largest_block_has_enough_registers(self):
        most = 65536 // 512  # of a multiprocessor, by the threads of the largest block we launch
        found = 0
        for text in messages():
            for number in REGISTERS.findall(text):
                found += 1
                self.assertLessEqual(int(number), most)
        self.assertGreater(found, 0)

    def test_dynamic_shared_memory_leaves_room_for_the_static_one(self):
        source = pathlib.Path(__file__).parents[2] / "kernels/layers/norm_cuda.cu"
        limit = eval(re.search(r"kSharedBytes = ([\d ()<+-]+);", source.read_text()).group(1))
        found = 0
        for text in messages():
            entry = ""
            for line in text.splitlines():
                if match := ENTRY.search(line):
                    entry = match.group(1)
                if "norm_gradient_kernel" in entry and (match := SHARED.search(line)):
                    found += 1
                    self.assertLessEqual(int(match.group(1)) + limit, 48 << 10, entry)
        self.assertGreater(found, 0)

    def test_each_kernel_is_built_for_every_architecture(self):
        kernels = {}
        for text in messages():
            for kernel, architecture in ENTRY.findall(text):
                kernels.setdefault(kernel, set()).add(architecture)
        # 10: AdamW and SGD in fp32 and fp64, the sum of squares of three dtypes and its second
        # pass, fingerprints, and the zeros of experts without rows. 6: three dtypes to two 8-bit
        # formats. For four dtypes, each in packs and element by element: forward and backward of
        # SwiGLU, rotary embedding, RMSNorm and LayerNorm, cross entropy with and without smoothing,
        # its gradient, dropout with and without a residual. Losses in fp32 and fp64, with and
        # without smoothing.
        self.assertEqual(len(kernels), 10 + 6 + 2 * 4 * (2 * 4 + 2 + 1 + 2) + 2 * 2)
        wanted = os.environ["LOCKSTEP_CUDA_ARCHITECTURES"].split()
        for kernel, architectures in kernels.items():
            self.assertEqual(sorted(architectures), sorted(wanted), kernel)

    def test_the_compiler_warns_of_nothing(self):
        for text in messages():
            self.assertNotIn("warning", text.lower())

    def test_no_host_function_calls_a_device_function(self):
        """nvcc's host code for a device function is only a call of exit()."""
        functions = {}
        for path in sorted(build_folder().rglob("*.cu.o")):
            functions |= references(path)
        self.assertTrue([name for name in functions if "rotary_cuda" in name], functions)
        for name, symbols in functions.items():
            if len(symbols) > 1:
                self.assertFalse([one for one in symbols if re.match(r"exit\b", one)], name)


if __name__ == "__main__":
    unittest.main()
