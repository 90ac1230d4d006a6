"""Literal samples of the tools' output, so that the parsers are tested without a GPU. Each comes
with its parser and the expected result."""

from . import parsing

GTEST = """[==========] Running 3 tests from 2 test suites.
[ RUN      ] Kernels.AdamW
[       OK ] Kernels.AdamW (12 ms)
[ RUN      ] Kernels.Sgd
cuda_test.cpp:31: Failure
Value of: at::allclose(a, b)
  Actual: false
Expected: true
[  FAILED  ] Kernels.Sgd (3 ms)
[ RUN      ] Layouts/OnCuda.Trains/tied
[  SKIPPED ] Layouts/OnCuda.Trains/tied (0 ms)
[ RUN      ] Layouts/OnCuda.Trains/gqa
[  FAILED  ] Layouts/OnCuda.Trains/gqa, where GetParam() = gqa (7 ms)
[==========] 3 tests from 2 test suites ran. (15 ms total)
[  FAILED  ] Kernels.Sgd
"""

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at write(int *)+0x90 in bad.cu:4
========= ERROR SUMMARY: 1 error
"""

RACECHECK = """========= COMPUTE-SANITIZER
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""

GPU = "NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB\n"

NCU = """==PROF== Connected to process 71 (/bundle/benchmarks/gpu_bench)
==PROF== Profiling "adamw_kernel" - 0: 0%....50%....100% - 1 pass
{"a line of": "the program itself"}
==PROF== Disconnected from process 71
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","71","gpu_bench","127.0.0.1","adamw_kernel","1","7","(256, 1, 1)","(1056, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes.sum.per_second","Gbyte/s","2,711.50"
"0","71","gpu_bench","127.0.0.1","adamw_kernel","1","7","(256, 1, 1)","(1056, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","us","1,485.25"
"""

LDD = """\tlinux-vdso.so.1 (0x00007ffd6d5f2000)
\tlibprotobuf.so.32 => not found
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f1a2c000000)
"""

SAMPLES = (
    (parsing.gtest_results, GTEST,
     {"Kernels.AdamW": "ok", "Kernels.Sgd": "failed", "Layouts/OnCuda.Trains/tied": "skipped",
      "Layouts/OnCuda.Trains/gqa": "failed"}),
    (parsing.sanitizer_findings, MEMCHECK, 1),
    (parsing.sanitizer_findings, RACECHECK, 2),
    (parsing.sanitizer_findings, "========= Error: Device not supported\n", None),
    (parsing.gpu_query, GPU,
     [{"name": "NVIDIA H100 80GB HBM3", "driver": "580.159.04", "memory": "81559 MiB"}]),
    (parsing.ncu_metrics, NCU,
     {"adamw_kernel": {"dram__bytes.sum.per_second": (2711.5, "Gbyte/s"),
                       "gpu__time_duration.sum": (1485.25, "us")}}),
    (parsing.missing_libraries, LDD, ["libprotobuf.so.32"]),
    (parsing.resolved_libraries, LDD, {"libc.so.6": "/lib/x86_64-linux-gnu/libc.so.6"}),
)


def wrong():
    """Returns the names of parsers that misread their sample."""
    return [parser.__name__ for parser, text, expected in SAMPLES if parser(text) != expected]
