"""What the tools print, as data."""

import csv
import re


def gtest_results(text):
    """{test: "ok" | "failed" | "skipped"}."""
    states = {"OK": "ok", "FAILED": "failed", "SKIPPED": "skipped"}
    found = re.findall(r"^\[ +(OK|FAILED|SKIPPED) +\] ([\w/]+\.[\w/]+)(?:, .*)? \(\d+ ms\)", text,
                       re.M)
    return {name: states[state] for state, name in found}


def gtest_failure(text, test):
    """The first complaint of a test that failed."""
    own = text.split(f"[ RUN      ] {test}\n")[-1].split(f"[  FAILED  ] {test}")[0]
    lines = [" ".join(line.split()) for line in own.splitlines() if line.strip()]
    return " ".join(lines[:6]) or "it ended the program"


def sanitizer_findings(text):
    """The number of errors or hazards that compute-sanitizer found; None: it did not get so far."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    return sum(int(errors or hazards) for errors, hazards in found) if found else None


def gpu_query(text):
    """What nvidia-smi says of name, driver_version and memory.total, as CSV without header."""
    rows = csv.reader(line for line in text.splitlines() if line.strip())
    return [dict(zip(("name", "driver", "memory"), (field.strip() for field in row)))
            for row in rows]


def ncu_metrics(text):
    """{kernel: {metric: (value, unit)}} of `ncu --csv`, of the last launch of each."""
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
    """The libraries that ldd did not find."""
    return re.findall(r"^\s*(\S+) => not found", text, re.M)


def resolved_libraries(text):
    """{name: path} of ldd."""
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", text, re.M))
