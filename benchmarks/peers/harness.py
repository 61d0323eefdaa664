"""What all scripts beside this one share: arguments, the clock, the meter, the line they print.

Imports neither torch nor a peer, so that a script may first start further processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # for `import recipes`


def arguments(text: str, *more: Callable[[argparse.ArgumentParser], object]) -> argparse.Namespace:
    """Read the command line, and set what must be set before torch is imported."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("recipe", help="a name in recipes.py")
    parser.add_argument("--rounds", type=int, help="instead of the recipe's own")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="in each process")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--memory", action="store_true", help="measure memory; spoils the times")
    for add in more:
        add(parser)
    given = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(given.threads)
    return given


class Clock:
    """Gives the seconds since the last lap to rounds or to evaluations."""

    def __init__(self, device: str = "cpu") -> None:
        self.rounds: list[float] = []
        self.evaluations: list[float] = []
        self._device = device
        self._last = time.perf_counter()

    def _lap(self) -> float:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
        now = time.perf_counter()
        spent, self._last = now - self._last, now
        return spent

    def skip(self) -> float:
        """Return the seconds since the last lap, and give them to nobody."""
        return self._lap()

    def round(self) -> None:
        self.rounds.append(self._lap())

    def evaluation(self) -> None:
        self.evaluations.append(self._lap())


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send whatever a peer prints to standard error: standard output is for the one JSON line."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def metered(on: bool) -> Iterator[dict[str, Any]]:
    """Yield a dictionary that has the memory of this process and its descendants afterwards."""
    found: dict[str, Any] = {}
    if not on:
        yield found
        return
    command = [sys.executable, str(HERE / "meter.py"), str(os.getpid())]
    meter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        out, _ = meter.communicate("")
        found.update(json.loads(out))


def report(
    peer: str,
    package: str | None,
    recipe: Any,
    given: argparse.Namespace,
    clock: Clock,
    *,
    start: float,
    accuracy: float,
    examples: list[int],
    **more: Any,
) -> None:
    """Print the one JSON line.

    Args:
        peer: name in tables.
        package: distribution whose version counts, None for torch alone.
        recipe: what was run.
        given: the command line.
        clock: rounds and evaluations, in seconds.
        start: seconds from arrays in memory to the first round, without evaluations.
        accuracy: on the test set, after the last round.
        examples: examples processed in each round.
        **more: further entries.
    """
    import torch

    if given.device == "cuda":
        more["gpu_peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
    values = {
        "peer": peer,
        "version": metadata.version(package) if package else torch.__version__,
        "torch": torch.__version__,
        "recipe": recipe.name,
        "processes": given.processes,
        "threads": given.threads,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "rounds": len(clock.rounds),
        "clients": recipe.per_round,
        "steps": recipe.steps(),
        "start": round(start, 4),
        "first": round(clock.rounds[0], 5),
        "seconds": [round(s, 5) for s in clock.rounds[1:]],
        "evaluations": [round(s, 5) for s in clock.evaluations],
        "examples": examples[1:],
        "examples_a_round": recipe.examples(),
        "multiply_adds": recipe.multiply_adds(),
        "accuracy": round(accuracy, 4),
        **more,
    }
    print(json.dumps(values), flush=True)
