"""Try a driver from the command line: `python -m cloche.testing.conformance package.module:Driver [--json] [--deadline S]`.

The class is called with a state directory. Prints the report and ends with 1 if a behaviour failed; gaps are for those who
know them, so here every failure counts.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import msgspec

from cloche.linux import processes
from cloche.testing import conformance


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cloche.testing.conformance", description="Try a driver.")
    parser.add_argument("driver", help="package.module:Class, called with a state directory")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--deadline", type=float, default=conformance.DEADLINE_S, help="seconds that a behaviour may take"
    )
    chosen = parser.parse_args(arguments)
    processes.become_subreaper()  # what a driver orphans stays in our sight
    module, _, name = chosen.driver.partition(":")
    report = conformance.run(getattr(importlib.import_module(module), name), deadline_s=chosen.deadline)
    text = msgspec.json.encode(report._asdict()).decode() if chosen.json else report.text()
    sys.stdout.write(text + "\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
