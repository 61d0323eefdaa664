"""Memory of a process and all its descendants: python meter.py PID < PIPE

Samples the proportional set size (what processes share counts once, mapped files included) four
times a second until its input ends, then prints one JSON line. It runs beside what it measures, so
a run with a meter is not timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from pathlib import Path


def tree(pid: int) -> list[int]:
    """Return the process and its descendants, without this process."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{parent}/task").glob("*/children"):
                found += [int(p) for p in file.read_text().split() if int(p) != os.getpid()]
    return found


def proportional(pid: int) -> int:
    """Bytes of proportional set size; 0 for a process that has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    pid, began, series = int(sys.argv[1]), time.monotonic(), []
    while not select.select([sys.stdin], [], [], 0.25)[0]:
        used = sum(proportional(p) for p in tree(pid))
        series.append((round(time.monotonic() - began, 2), round(used / 1e6)))
    step = max(1, len(series) // 30)
    print(json.dumps({"peak_mb": max(mb for _, mb in series), "series_mb": series[::step]}))


if __name__ == "__main__":
    main()
