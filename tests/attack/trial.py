"""One trial of an attack: a call in a process of its own, with limits, and how it ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedkeel.errors import FedkeelError

PROCESSOR_SECONDS = 10
WALL_SECONDS = 60.0
MEMORY = 1 << 30
"""What a trial may take beyond what the process that starts it has."""

GOOD = ("the same", "refused in words")


@dataclass(frozen=True)
class Ended:
    """How a trial ended.

    Args:
        how: a few words; those in `GOOD` are good.
        detail: what was printed, or measured.
        figure: a number that is collected, such as how far a model was moved.
    """

    how: str
    detail: str = ""
    figure: float | None = None

    @property
    def good(self) -> bool:
        """Whether the trial is one that nobody has to look into."""
        return self.how in GOOD


def attempt(call: Callable[[], Ended], marker: Path | None = None) -> Ended:
    """Make a call in a forked process, and say how it ended.

    Args:
        call: what is tried. An error of fedkeel's counts as a refusal.
        marker: a file that must not be there afterwards.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder) / "answer", Path(folder) / "output"
        child = os.fork()
        if child == 0:
            _serve(call, answer, output)
        ended = _wait(child, answer, output)
    if marker is not None and marker.exists():
        marker.unlink()
        return Ended("ran a stranger's command", ended.detail)
    return ended


def _serve(call: Callable[[], Ended], answer: Path, output: Path) -> None:
    """Make the call, and end this process whatever happens."""
    os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(handle, number)
    here = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        ended = call()
    except FedkeelError as error:
        ended = Ended("refused in words", "\n".join(error.lines()))
    except MemoryError:
        ended = Ended("out of memory", traceback.format_exc()[-2000:])
    except BaseException as error:
        memory = "allocate memory" in str(error)
        ended = Ended("out of memory" if memory else "traceback", traceback.format_exc()[-3000:])
    with contextlib.suppress(BaseException):
        answer.write_text(json.dumps([ended.how, ended.detail, ended.figure]))
    os._exit(0)


def _wait(child: int, answer: Path, output: Path) -> Ended:
    end = time.monotonic() + WALL_SECONDS
    while True:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Ended("hangs", f"{WALL_SECONDS:g} s by the clock")
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it has started
    said = output.read_text(errors="replace")[-2000:] if output.exists() else ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return Ended("hangs", f"{PROCESSOR_SECONDS} s of processor time\n{said}")
        return Ended(f"killed by signal {number}", said)
    if not answer.exists():
        return Ended("ended by itself", said)
    how, detail, figure = json.loads(answer.read_text())
    return Ended(how, detail or said, figure)


def command_ended(code: int, out: str, err: str) -> Ended | None:
    """Return how a command ended by its output, None where it worked."""
    if "Traceback (most recent call last)" in err + out:
        return Ended("traceback", err[-3000:])
    if code == 0:
        return None
    words = err.strip()
    return Ended("refused in words", words) if words else Ended("failed without a word", out[-500:])


@dataclass
class Tally:
    """The ends of all trials of a script."""

    name: str
    counts: Counter[str]
    figures: list[float]
    bad: list[tuple[int, str, Ended]]

    def show(self) -> int:
        """Print what came out; return the code to end with."""
        total = sum(self.counts.values())
        print(f"\n{self.name}: {total} trials")
        for how, count in self.counts.most_common():
            print(f"  {count:6d}  {how}")
        if self.figures:
            ordered = sorted(self.figures)
            at = [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.99, 1.0)]
            print("  figure: median {:.3g}, 99 % {:.3g}, largest {:.3g}".format(*at))
        kinds = Counter(ended.how for _, _, ended in self.bad)
        for number, what, ended in self.bad[:60]:
            lines = ended.detail.strip().splitlines()
            print(f"  BAD trial {number}: {ended.how}: {what}: {lines[-1][:200] if lines else ''}")
        if len(self.bad) > 60:
            print(f"  and {len(self.bad) - 60} more: {dict(kinds)}")
        return 1 if self.bad else 0


def arguments(trials: int) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print each trial in full")
    return parser.parse_args()


def tally(
    name: str, options: argparse.Namespace, trials: Iterator[tuple[int, str, Ended]]
) -> Tally:
    """Count the ends of trials, and print as they come."""
    made = Tally(name, Counter(), [], [])
    for number, what, ended in trials:
        made.counts[ended.how] += 1
        if ended.figure is not None:
            made.figures.append(ended.figure)
        if not ended.good:
            made.bad.append((number, what, ended))
        if options.show:
            print(f"--- {number} {what}: {ended.how} {ended.figure or ''}\n{ended.detail}")
        elif sys.stderr.isatty():
            print(f"\r{number + 1} {dict(made.counts)}", end="", file=sys.stderr)
        elif (number + 1) % 100 == 0:
            print(f"{number + 1} {dict(made.counts)}", flush=True)
    return made
