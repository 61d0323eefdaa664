"""Processor seconds until a command answers, and until the modules of a run are imported.

    python benchmarks/starts.py [CALLS]   # 3 calls of each unless another number is given

Each line is a command, and the least processor seconds of its calls, in processes of their own.
The file of Python's bytecode is written by a first call, which does not count. `import torch` is
what no start of a run can be faster than.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
from fedkeel import cli
from fedkeel.cli.common import many_imports
with many_imports():
    from fedkeel.report import alerts, client_gains, page, runs, tables
    from fedkeel.runner import features, ingredients, prepare, start
    from fedkeel.study import comparison
"""
WRONG = "rouns = 3\nmethod = 'fedavg'\n"

CALLS: dict[str, list[str]] = {
    "import torch": ["-c", "import torch"],
    "import fedkeel": ["-c", "import fedkeel"],
    "modules of a run": ["-c", RUN],
    **{
        f"fedkeel {words}": ["-m", "fedkeel", *words.split()]
        for words in (
            *("--help", "methods", "methods fedavg", "methods fedprox+gcfed --json"),
            *("check wrong.toml", "run wrong.toml", "compare wrong.toml", "report no/folder"),
        )
    },
}


def seconds(words: list[str], folder: str) -> float:
    """Return the processor seconds of a call."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the seconds of each call."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "wrong.toml").write_text(WRONG, encoding="utf-8")
        for name, words in CALLS.items():
            seconds(words, folder)
            print(f"{name:36} {min(seconds(words, folder) for _ in range(calls)):6.2f}", flush=True)


if __name__ == "__main__":
    main()
