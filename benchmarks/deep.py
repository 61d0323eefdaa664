"""Deep networks against a plain PyTorch loop: python benchmarks/deep.py [resnet18_gn ...] [--gpu]

Both train the same clients in one run, one after the other on one device. Every measurement is made
in a process of its own, which is forked after the imports, so that one cannot warm up another. The
plain loop is that of `peers/run_plain.py`, with cudnn's search of algorithms switched on. Where no
GPU is asked for, sizes are small: that only shows that the script runs.

Prints a line for each measurement and a table at the end, and adds the rows to a file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fedkeel as fk
from fedkeel.config import Precision
from fedkeel.engine.process.numerics import set_numerics
from fedkeel.task.models import make

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE / "peers"))

from recipes import Arrays, Data, Recipe  # noqa: E402
from run_plain import Trainer  # noqa: E402

Row = dict[str, Any]


@dataclass(frozen=True)
class Deep:
    """A network of a paper and the clients of a round.

    Args:
        model: name in fedkeel's list of networks.
        clients: number of clients, all of which take part.
        size: examples of each.
        batch: examples of a step.
        shape: of one input; of one axis where inputs are characters.
        classes: number of classes.
        args: arguments of the network.
    """

    model: str
    clients: int
    size: int
    batch: int
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    args: tuple[tuple[str, Any], ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether inputs are characters."""
        return len(self.shape) == 1

    def network(self) -> nn.Module:
        """Return the network with its initial weights."""
        return make(self.model, self.shape, self.classes, dict(self.args))

    def recipe(self, rounds: int) -> Recipe:
        """Return it as the plain loop takes it."""
        data = Data(self.clients, self.size, self.shape, self.classes, test=TEST)
        lr = 0.01
        return Recipe(
            self.model, self.model, data, self.network, self.clients, self.batch, lr, rounds
        )

    def small(self) -> Deep:
        """Return the same for a processor, a few seconds of work."""
        args = {"resnet18_gn": (("width", 8),), "vit": (("depth", 1),)}.get(self.model, ())
        return replace(self, clients=2, size=8, batch=4, args=args)


TEST = 200
"""Test examples."""

DEEP = {
    deep.model: deep
    for deep in (
        Deep("resnet18_gn", 10, 500, 50),
        Deep("fixup_resnet9", 20, 100, 20, classes=100),
        Deep("vit", 10, 250, 25),
        Deep("lenet5", 10, 320, 64),
        Deep("resnet20", 10, 320, 64),
        Deep("vgg11", 10, 250, 50),
        Deep("char_lstm", 10, 200, 20, (80,), 80),
        Deep("densenet121_gn", 10, 100, 20, (3, 64, 64)),
    )
}


def arrays(deep: Deep) -> Arrays:
    """Return random inputs and labels; their meaning changes no speed."""
    random = torch.Generator().manual_seed(2026)
    count = deep.clients * deep.size

    def inputs(n: int) -> Tensor:
        if deep.is_text:
            return torch.randint(deep.classes, (n, *deep.shape), generator=random)
        return torch.randn(n, *deep.shape, generator=random)

    def labels(n: int) -> Tensor:
        return torch.randint(deep.classes, (n,), generator=random)

    offsets = np.arange(deep.clients + 1) * deep.size
    return Arrays(inputs(count), labels(count), offsets, inputs(TEST), labels(TEST))


def plain(deep: Deep, given: argparse.Namespace, precision: Precision) -> Row:
    """Measure rounds of the plain loop."""
    recipe, device = deep.recipe(given.rounds), given.device
    set_numerics(precision)
    torch.backends.cudnn.benchmark = True
    began = time.perf_counter()
    trainer = Trainer(recipe, arrays(deep).to(device), device)
    seconds: list[float] = []
    while len(seconds) < given.rounds:
        if len(seconds) == 2 and given.profiler is not None:
            given.profiler.start()
        last = time.perf_counter()
        trainer.train(range(deep.clients))
        with torch.no_grad():
            for start, total in zip(trainer.start, trainer.total, strict=True):
                start.copy_(total).div_(deep.clients * deep.size)
        synchronize(device)
        seconds.append(time.perf_counter() - last)
        if len(seconds) == 1:
            first = time.perf_counter() - began
        elif sum(seconds[1:]) > given.enough:
            break
    return {"first": first, "seconds": seconds[1:]}


class Watch(fk.Callback):
    """Notes when rounds end, and ends the run when enough have been seen."""

    def __init__(self, rounds: int, enough: float, profiler: profile | None) -> None:
        self._began = time.perf_counter()
        self._count, self._enough, self._profiler = rounds, enough, profiler
        self.first, self.rounds = 0.0, list[float]()

    def on_round_end(self, row: Any, model: Any) -> None:
        """Note the time."""
        if row.round == 2 and self._profiler is not None:
            self._profiler.start()
        if row.round == 1:
            self.first = time.perf_counter() - self._began
        elif row.round > 1:
            spent = {k: v for k, v in row.seconds.items() if not k.startswith("evaluat")}
            self.rounds.append(sum(spent.values()))

    def stop_reason(self, row: Any) -> str:
        """Return why the run ends early."""
        is_enough = len(self.rounds) >= self._count or sum(self.rounds) > self._enough
        return "enough rounds" if is_enough else ""


def ours(
    deep: Deep, given: argparse.Namespace, precision: Precision, engine: dict[str, Any]
) -> Row:
    """Measure rounds of fedkeel."""
    data = arrays(deep)
    federation = fk.Federation(
        data=fk.dataset(data.x, data.y, tokens=deep.is_text, classes=deep.classes),
        rows=np.arange(data.offsets[-1]),
        offsets=data.offsets,
        holdout_rows=data.offsets[:-1].copy(),
        holdout_offsets=np.arange(len(data.offsets)),
    )
    test = fk.dataset(data.test_x, data.test_y, tokens=deep.is_text, classes=deep.classes)
    torch.manual_seed(0)
    watch = Watch(given.rounds - 2, given.enough, given.profiler)
    began = time.perf_counter()
    result = fk.run(
        "fedavg",
        task=fk.Task(deep.network(), buffers="average"),
        clients=federation,
        test=test,
        rounds=10_000,  # so that `auto` takes the engine of a long run
        local=fk.Local(lr=0.01, epochs=1, batch_size=deep.batch),
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
        "whole": time.perf_counter() - began,
        "ran": f"{ran.kind} x {ran.parallel_clients} {ran.device}",
        "reasons": list(ran.reasons),
        "phases": {k: round(v, 4) for k, v in result.rows[-2].seconds.items()},
    }


CONTESTANTS: dict[str, Callable[[Deep, argparse.Namespace], Row]] = {
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


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def child(name: str, deep: Deep, given: argparse.Namespace, pipe: Connection) -> None:
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


def profiled(name: str, deep: Deep, given: argparse.Namespace) -> Row:
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


def measure(name: str, deep: Deep, given: argparse.Namespace, limit: float) -> Row:
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


def cell(row: Row | None) -> str:
    """Return the median of a round."""
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    return f"{statistics.median(row['seconds']):.4f}" if row["seconds"] else "-"


def table(rows: list[Row], names: list[str]) -> None:
    """Print seconds of a round, and of the time until the first round has ended."""
    print(f"\n| network | {' | '.join(names)} | first round after, s: {', '.join(names)} |")
    print("|---" * (len(names) + 2) + "|")
    for model in dict.fromkeys(row["network"] for row in rows):
        by_name = {row["contestant"]: row for row in rows if row["network"] == model}
        first = [
            f"{by_name[n]['first']:.1f}" if "first" in by_name.get(n, {}) else "-" for n in names
        ]
        cells = [cell(by_name.get(name)) for name in names]
        print(f"| {model} | {' | '.join(cells)} | {', '.join(first)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(DEEP))
    parser.add_argument("--contestants", nargs="*", default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--enough", type=float, default=3.0, help="seconds of rounds to look at")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one measurement")
    parser.add_argument("--seconds", type=float, default=1e9, help="for everything")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--profile", action="store_true", help="spoils the times")
    parser.add_argument("--go", default="first")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    given.profiler = None
    given.device = "cuda" if given.gpu else "cpu"
    deadline, rows = time.monotonic() + given.seconds, list[Row]()
    for model in given.networks:
        deep = DEEP[model] if given.gpu else DEEP[model].small()
        for name in given.contestants:
            left = deadline - time.monotonic()
            if left < 5:
                continue
            row = measure(name, deep, given, min(given.limit, left))
            row = {
                "go": given.go,
                "network": model,
                "contestant": name,
                "torch": torch.__version__,
                **row,
            }
            rows.append(row)
            said = row.get("error") or f"{cell(row)} s a round, first after {row['first']:.1f} s"
            more = {k: row[k] for k in ("ran", "phases", "reasons", "gpu_peak_mb") if row.get(k)}
            print(f"{model:15} {name:18} {said} {more or ''}", flush=True)
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    table(rows, given.contestants)


if __name__ == "__main__":
    main()
