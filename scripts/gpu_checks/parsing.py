"""Parses the output of the tools."""

import csv
import re


def gtest_results(text):
    """Returns {test: "ok" | "failed" | "skipped"}."""
    states = {"OK": "ok", "FAILED": "failed", "SKIPPED": "skipped"}
    found = re.findall(r"^\[ +(OK|FAILED|SKIPPED) +\] ([\w/]+\.[\w/]+)(?:, .*)? \(\d+ ms\)", text,
                       re.M)
    return {name: states[state] for state, name in found}


def gtest_failure(text, test):
    """Returns the first message of a failed test."""
    own = text.split(f"[ RUN      ] {test}\n")[-1].split(f"[  FAILED  ] {test}")[0]
    lines = [" ".join(line.split()) for line in own.splitlines() if line.strip()]
    return " ".join(lines[:6]) or "it ended the program"


def sanitizer_findings(text):
    """Returns compute-sanitizer's number of errors or hazards; None if it printed no summary."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    return sum(int(errors or hazards) for errors, hazards in found) if found else None


def gpu_query(text):
    """Parses nvidia-smi's name, driver_version and memory.total, as CSV without a header."""
    rows = csv.reader(line for line in text.splitlines() if line.strip())
    return [dict(zip(("name", "driver", "memory"), (field.strip() for field in row)))
            for row in rows]


def ncu_metrics(text):
    """Returns {kernel: {metric: (value, unit)}} of `ncu --csv`, for each kernel's last launch."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return {}
    kernels = {}
    for row in csv.DictReader(lines[first:]):
        value = (row.get("Metric Value") or "").replace(",", "")
        if row.get("Metric Name") and re.fullmatch(r"[-+.\deE]+", value):
            kernel = kernels.setdefault(row["Kernel Name"], {})
            kernel[row["Metric Name"]] = (float(value), row["Metric Unit"])
    return kernels


def missing_libraries(text):
    """Returns the libraries that ldd did not find."""
    return re.findall(r"^\s*(\S+) => not found", text, re.M)


def resolved_libraries(text):
    """Returns ldd's {name: path}."""
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", text, re.M))
