"""Deep networks against a plain PyTorch loop: python benchmarks/deep.py [resnet18_gn ...] [--gpu]

Both train the same clients (`DEEP` in recipes.py) in one run, in turn, `--repeats` times over. Each
measurement is made in a process of its own, which is forked after the imports, so that one cannot
warm up another. The plain loop is that of `peers/run_plain.py`, on a GPU with cudnn's search of
algorithms switched on, on a processor in as many processes as there are cores. pfl runs where
`.envs/pfl` is (`peers/make.sh`). On a processor the clients are few and small.

On a processor the seconds that all processes of a contestant have worked are noted too: where other
work shares the machine, they say more than a clock.

Prints a line for each measurement and a table at the end, and adds the rows to a file. `--table`
prints the table of the rows of a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fedkeel as fk  # before torch: it says how torch's threads are to wait

# isort: split
import torch
from torch.profiler import ProfilerActivity, profile

from fedkeel.config import Precision
from fedkeel.engine.process.numerics import set_numerics

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE / "peers"))

from compare import spread  # noqa: E402
from meter import tree  # noqa: E402
from recipes import DEEP, Recipe, load  # noqa: E402
from run_fedkeel import clients, commit, dataset, task  # noqa: E402
from run_plain import Trainer, run  # noqa: E402

from harness import Clock  # noqa: E402

CORES = os.cpu_count() or 1

Row = dict[str, Any]


def plain(deep: Recipe, given: argparse.Namespace, precision: Precision) -> Row:
    """Measure rounds of the plain loop."""
    device = given.device
    set_numerics(precision)
    torch.backends.cudnn.benchmark = True
    began = time.perf_counter()
    trainer = Trainer(deep, load(deep.data).to(device), device)
    seconds: list[float] = []
    while len(seconds) < given.rounds:
        if len(seconds) == 2 and given.profiler is not None:
            given.profiler.start()
        last = time.perf_counter()
        trainer.train(range(deep.per_round))
        with torch.no_grad():
            for start, total in zip(trainer.start, trainer.total, strict=True):
                start.copy_(total).div_(len(trainer.arrays.x))
        synchronize(device)
        seconds.append(time.perf_counter() - last)
        if len(seconds) == 1:
            first = time.perf_counter() - began
        elif sum(seconds[1:]) > given.enough:
            break
    return {"first": first, "seconds": seconds[1:]}


class BusyClock:
    """A `Clock` that also notes how long all processes have worked in each round."""

    def __init__(self) -> None:
        self._clock = Clock()
        self.work: list[float] = []
        self._worked = 0.0

    @property
    def rounds(self) -> list[float]:
        """Seconds of each round."""
        return list(self._clock.rounds)

    def skip(self) -> float:
        """Return the seconds since the last lap; also forget the work so far."""
        self._worked = worked()
        return float(self._clock.skip())

    def round(self) -> None:
        """Note the end of a round."""
        self._clock.round()
        before, self._worked = self._worked, worked()
        self.work.append(self._worked - before)

    def evaluation(self) -> None:
        """Note the end of an evaluation, whose work counts in no round."""
        self._clock.evaluation()
        self._worked = worked()


def worked() -> float:
    """Return the processor seconds of this process and its descendants."""
    ticks = 0
    for pid in tree(os.getpid()):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def plain_processes(deep: Recipe, given: argparse.Namespace) -> Row:
    """Measure rounds of the plain loop in a process for each core."""
    set_numerics("float32")
    arrays, clock = load(deep.data), BusyClock()
    start = run(deep, arrays, given.rounds, CORES, clock)["start"]
    return {"first": start + clock.rounds[0], "seconds": clock.rounds[1:], "work": clock.work[1:]}


class Watch(fk.Callback):
    """Notes when rounds end, and ends the run when enough have been seen."""

    def __init__(self, rounds: int, enough: float, profiler: profile | None) -> None:
        self._began = time.perf_counter()
        self._count, self._enough, self._profiler = rounds, enough, profiler
        self.first, self.rounds = 0.0, list[float]()
        self.work, self._worked = list[float](), 0.0

    def on_round_end(self, row: Any, model: Any) -> None:
        """Note the time."""
        if row.round == 2 and self._profiler is not None:
            self._profiler.start()
        before, self._worked = self._worked, worked()
        if row.round == 1:
            self.first = time.perf_counter() - self._began
        elif row.round > 1:
            spent = {k: v for k, v in row.seconds.items() if not k.startswith("evaluat")}
            self.rounds.append(sum(spent.values()))
            self.work.append(self._worked - before)

    def stop_reason(self, row: Any) -> str:
        """Return why the run ends early."""
        is_enough = len(self.rounds) >= self._count or sum(self.rounds) > self._enough
        return "enough rounds" if is_enough else ""


def ours(
    deep: Recipe, given: argparse.Namespace, precision: Precision, engine: dict[str, Any]
) -> Row:
    """Measure rounds of fedkeel."""
    arrays = load(deep.data)
    torch.manual_seed(0)
    watch = Watch(given.rounds - 2, given.enough, given.profiler)
    began = time.perf_counter()
    result = fk.run(
        "fedavg",
        task=task(deep),
        clients=clients(arrays, deep.data),
        test=dataset(arrays.test_x, arrays.test_y, deep.data),
        rounds=10_000,  # so that `auto` takes the engine of a long run
        local=fk.Local(lr=deep.lr, epochs=1, batch_size=deep.batch),
        seed=0,
        evaluation=fk.Evaluation(every=1000),
        engine=fk.Engine(precision=precision, checkpoint_seconds=1e9, **engine),
        progress=False,
        callbacks=[watch],
    )
    ran = result.record.engine
    return {
        "first": watch.first,
        "seconds": watch.rounds,
        "work": watch.work,
        "whole": time.perf_counter() - began,
        "ran": f"{ran.kind} x {ran.parallel_clients} {ran.device}",
        "reasons": list(ran.reasons),
        "phases": {k: round(v, 4) for k, v in result.rows[-2].seconds.items()},
    }


def peer(deep: Recipe, given: argparse.Namespace, name: str, *options: str) -> Row:
    """Measure rounds by a script of `peers/`, in its environment where there is one."""
    python = HERE / ".envs" / name / "bin" / "python"
    if not python.exists():
        return {"error": f"there is no {python.relative_to(HERE)}"}
    script = str(HERE / "peers" / f"run_{name}.py")
    command = [str(python), script, deep.name, *options, "--device", given.device]
    command += ["--rounds", str(given.rounds)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row = json.loads(printed.splitlines()[-1])
    return {
        "first": row["start"] + row["first"],
        "seconds": row["seconds"],
        "version": row["version"],
    }


CONTESTANTS: dict[str, Callable[[Recipe, argparse.Namespace], Row]] = {
    f"plain, {CORES} processes": plain_processes,
    "pfl": lambda deep, given: peer(
        deep, given, "pfl", "--processes", "1" if given.gpu else str(CORES)
    ),
    "plain float32": lambda deep, given: plain(deep, given, "float32"),
    "plain tf32": lambda deep, given: plain(deep, given, "tf32"),
    "auto float32": lambda deep, given: ours(deep, given, "float32", {}),
    "auto tf32": lambda deep, given: ours(deep, given, "tf32", {}),
    "auto bf16-mixed": lambda deep, given: ours(deep, given, "bf16-mixed", {}),
    "single float32": lambda deep, given: ours(
        deep, given, "float32", {"kind": "vectorized", "parallel_clients": 1}
    ),
    "sequential float32": lambda deep, given: ours(
        deep, given, "float32", {"kind": "sequential", "device": given.device}
    ),
}
ON_CPU = (f"plain, {CORES} processes", "pfl", "auto float32")
ON_GPU = tuple(name for name in CONTESTANTS if name != ON_CPU[0])


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def child(name: str, deep: Recipe, given: argparse.Namespace, pipe: Connection) -> None:
    """Make one measurement and send it."""
    os.setsid()
    try:
        row = profiled(name, deep, given) if given.profile else CONTESTANTS[name](deep, given)
        if given.device == "cuda":
            row["gpu_peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
            row["device"] = torch.cuda.get_device_name()
        pipe.send(row)
    except BaseException as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:600]})
        raise


def profiled(name: str, deep: Recipe, given: argparse.Namespace) -> Row:
    """Make a measurement, and print where the rounds after the second spend their time."""
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 2 if given.device == "cuda" else 1]
    given.profiler = profile(activities=kinds, acc_events=True)
    row = CONTESTANTS[name](deep, given)
    given.profiler.stop()  # started by the contestant after its second round
    on_gpu = given.device == "cuda"
    every = given.profiler.key_averages()
    for side in ("device", "cpu") if on_gpu else ("cpu",):
        key = f"self_{side}_time_total"
        total = sum(getattr(event, key) for event in every)
        print(f"{side}: {total / 1e3:.1f} ms in {len(row['seconds']) - 1} rounds")
        for event in sorted(every, key=lambda e: -getattr(e, key))[:22]:
            print(f"{getattr(event, key) / 1e3:9.2f} ms {event.count:6} x {event.key[:130]}")
    return row


def measure(name: str, deep: Recipe, given: argparse.Namespace, limit: float) -> Row:
    """Measure in a process of its own, which is killed after so many seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(name, deep, given, there))
    process.start()
    there.close()
    row: Row = {"error": f"not done after {limit:.0f} s"}
    try:
        if here.poll(limit):
            row = here.recv()
    except EOFError:
        row = {"error": "the process died"}
    if "error" in row:
        process.join(5)
    if process.is_alive() and process.pid and "error" in row:
        os.killpg(process.pid, signal.SIGKILL)  # with the workers that it has started
    process.join()
    return row


def make_data(deep: Recipe) -> None:
    """Make the data of a recipe, so that it is in nobody's time.

    A process does it that is over before the others are forked: GNU OpenMP never ends a loop in a
    fork of a process that has used several threads.
    """
    process = multiprocessing.get_context("fork").Process(target=load, args=(deep.data,))
    process.start()
    process.join()


def middle(row: Row, of: str = "seconds") -> float:
    """Return the median of a round, NaN where there was none."""
    return float(statistics.median(row.get(of) or [math.nan]))


def table(rows: list[Row]) -> None:
    """Print seconds of a round, of everything up to the end of the first, and ratios to `auto`."""
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    others = [name for name in names if name != "auto float32"]
    measures = ("seconds", "work") if any("work" in row for row in rows) else ("seconds",)
    heads = [
        *names,
        *(f"{n}: first round after" for n in names),
        *(f"{n} / auto, {m}" for m in measures for n in others),
    ]
    print(f"\n| network | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for model in dict.fromkeys(row["network"] for row in rows):
        timed = [row for row in rows if row["network"] == model and row.get("seconds")]
        by_name = {n: {r["repeat"]: r for r in timed if r["contestant"] == n} for n in names}
        ours = by_name.get("auto float32", {})
        cells = [medians(map(middle, by_name[n].values()), ".4f") for n in names]
        cells += [medians((r["first"] for r in by_name[n].values()), ".1f") for n in names]
        for of in measures:
            for name in others:
                theirs = by_name[name]
                both = [r for r in theirs.keys() & ours.keys() if theirs[r].get(of)]
                cells.append(spread([middle(theirs[r], of) / middle(ours[r], of) for r in both]))
        print(f"| {model} | {' | '.join(cells)} |")


def medians(values: Iterable[float], form: str) -> str:
    """Format the median, "" of nothing."""
    numbers = list(values)
    return format(statistics.median(numbers), form) if numbers else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(DEEP))
    parser.add_argument("--contestants", nargs="*", help="; ".join(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--enough", type=float, default=3.0, help="seconds of rounds to look at")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one measurement")
    parser.add_argument("--seconds", type=float, default=1e9, help="for everything")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--profile", action="store_true", help="spoils the times")
    parser.add_argument("--go", default="first")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--table", action="store_true", help="of the rows of a go in a file")
    given = parser.parse_args()
    given.profiler = None
    given.device = "cuda" if given.gpu else "cpu"
    if given.table:
        every = map(json.loads, given.results.read_text().splitlines())
        table([row for row in every if row["go"] == given.go])
        return
    deadline, rows = time.monotonic() + given.seconds, list[Row]()
    names = given.contestants or (ON_GPU if given.gpu else ON_CPU)
    for model in given.networks:
        deep = DEEP[model] if given.gpu else DEEP[model].smaller()
        make_data(deep)
        for repeat in range(given.repeats):
            for name in names:
                left = deadline - time.monotonic()
                if left < 5:
                    continue
                row = {
                    "go": given.go,
                    "network": deep.name,
                    "contestant": name,
                    "repeat": repeat,
                    "torch": torch.__version__,
                    "commit": commit(),
                    "at": time.strftime("%F %R"),
                    **measure(name, deep, given, min(given.limit, left)),
                }
                rows.append(row)
                report(row, given.results)
    table(rows)


def report(row: Row, results: Path | None) -> None:
    """Print a measurement, and add it to a file."""
    said = row.get("error") or f"{middle(row):.4f} s a round, first after {row['first']:.1f} s"
    if "work" in row:
        said += f", {middle(row, 'work'):.2f} s of work a round"
    more = {k: row[k] for k in ("ran", "phases", "reasons", "gpu_peak_mb") if row.get(k)}
    print(f"{row['network']:15} {row['contestant']:18} {said} {more or ''}", flush=True)
    if results:
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
