"""Runs the GPU tests and writes what happened, with the conditions, as JSON.

    python tools/gpu_tests.py [--out tools/bench/results/gpu_tests.json] [pytest arguments]

The committed file says on which commit and device the tests of the `gpu` marker were last seen to pass.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def outcome(case: ElementTree.Element) -> str:
    """passed, failed, error or skipped, from one <testcase> of a JUnit report."""
    for tag, word in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        if case.find(tag) is not None:
            return word
    return "passed"


def conditions(commit: str | None) -> dict[str, str]:
    """Where and when: device, driver, torch, commit, date in UTC."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
    if commit is None:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = git.stdout.strip() or "unknown"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "device": device,
        "driver": driver,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tools/bench/results/gpu_tests.json")
    parser.add_argument("--marker", default="gpu")
    parser.add_argument("--commit", help="the commit under test, where the checkout has no git history")
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", options.marker, f"--junitxml={report}", *rest]
        status = subprocess.run(command, cwd=ROOT).returncode
        if not report.exists():
            print(f"pytest ended with {status} and wrote no report", file=sys.stderr)
            return status or 1
        cases = list(ElementTree.parse(report).iter("testcase"))
    counts = Counter(outcome(case) for case in cases)
    by_file: dict[str, Counter[str]] = {}
    for case in cases:
        by_file.setdefault(case.get("classname", "?"), Counter())[outcome(case)] += 1
    document = {
        **conditions(options.commit),
        "marker": options.marker,
        "counts": dict(counts),
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
        "files": {name: dict(count) for name, count in sorted(by_file.items())},
        "not_passed": [
            f"{case.get('classname')}::{case.get('name')}" for case in cases if outcome(case) in ("failed", "error")
        ],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document["counts"]), "->", options.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
