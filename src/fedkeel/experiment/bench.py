"""This machine's speed by engine, and the share that it is of what the machine can multiply.

Each engine trains the same clients on made-up data: the 2NN and the small CNN of McMahan et al.
(2017), and a logistic regression. A rate is that of the median round. Beside it stands the share of
the peak: multiply-adds of forward and backward passes in a second, over those of large matrix
products in as many processes of one thread as the machine has cores.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import torch

from fedkeel import config
from fedkeel.data.dataset import dataset
from fedkeel.data.divide.arrays import iid
from fedkeel.engine.heap import kept
from fedkeel.engine.rounds import answered
from fedkeel.engine.workers import beginning
from fedkeel.errors import ConfigError, RunError, did_you_mean
from fedkeel.experiment.choose import choose
from fedkeel.experiment.engines import make
from fedkeel.experiment.footprint import multiply_adds
from fedkeel.experiment.prepare import cores, prepare
from fedkeel.experiment.prepared import Ingredients, Prepared
from fedkeel.method.server import server_message
from fedkeel.task import models
from fedkeel.task.task import Task

SIDE = 1024
"""Rows and columns of the matrices whose product is the peak."""


@dataclass(frozen=True)
class Workload:
    """Clients that are trained, all of them in each round.

    Args:
        name: what it is called.
        model: name of the network.
        args: its arguments.
        shape: of one input.
        clients: K.
        examples: of each client.
        batch: examples of a mini-batch; a client passes over its examples once.
    """

    name: str
    model: str
    args: dict[str, Any]
    shape: tuple[int, ...]
    clients: int
    examples: int
    batch: int

    @property
    def words(self) -> str:
        """What is trained."""
        return f"{self.clients} clients of {self.examples} examples, batches of {self.batch}"


WORKLOADS = (
    Workload("2NN", "mlp", {"hidden": (512, 256)}, (1, 28, 28), 20, 320, 64),
    Workload("CNN", "cnn_mcmahan", {}, (1, 28, 28), 8, 40, 10),
    Workload("logistic", "logistic", {}, (1, 28, 28), 100, 60, 10),
)


def workloads(only: str | None = None) -> tuple[Workload, ...]:
    """Return all workloads, or the one of that name.

    Raises:
        ConfigError: there is none.
    """
    found = tuple(work for work in WORKLOADS if only is None or work.name.lower() == only.lower())
    if not found:
        known = [work.name for work in WORKLOADS]
        raise ConfigError(f"There is no workload {only!r}.", do=did_you_mean(str(only), known))
    return found


@dataclass(frozen=True)
class Speed:
    """What an engine made of a workload.

    Args:
        engine: in words, e.g. ``vectorised, chunk 8, 2 processes``.
        auto: whether it is the one that ``engine = "auto"`` chooses.
        seconds: of the median round.
        clients: a second.
        steps: local steps a second.
        share: of the peak.
    """

    engine: str
    auto: bool = False
    seconds: float = 0.0
    clients: float = 0.0
    steps: float = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class Peak:
    """Matrix products of float32 in a second.

    Args:
        device: ``cpu``, or the name of a GPU.
        processes: how many made them at once, of one thread each.
        rate: multiply-adds a second.
    """

    device: str
    processes: int
    rate: float


# ---- the peak -----------------------------------------------------------------------------------


def peak(processes: int, seconds: float) -> Peak:
    """Measure matrix products on the processor, in several processes at once.

    Args:
        processes: how many, of one thread each.
        seconds: how long, about.
    """
    context: Any = multiprocessing.get_context(beginning())
    barrier = context.Barrier(processes)
    pipes, workers = [], []
    for _ in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_multiply, args=(barrier, seconds, theirs), daemon=True)
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    try:
        rates = [pipe.recv() for pipe in pipes]
    except EOFError as error:
        raise RunError("A process that measured matrix products ended.", got=error) from None
    finally:
        for worker in workers:
            worker.join()
    return Peak("cpu", processes, sum(rates))


def _multiply(barrier: Barrier, seconds: float, pipe: Connection) -> None:
    """Send this process's rate, of rounds that begin in all processes at once."""
    torch.set_num_threads(1)
    pipe.send(_rate(torch.device("cpu"), SIDE, 4, seconds, barrier))


def gpus(seconds: float) -> Iterator[Peak]:
    """Measure matrix products on each GPU that there is."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        name = torch.cuda.get_device_name(device)
        yield Peak(name, 1, _rate(device, 8 * SIDE, 4, seconds, None))


def _rate(
    device: torch.device, side: int, products: int, seconds: float, barrier: Barrier | None
) -> float:
    """Return the multiply-adds a second of the median round of matrix products."""
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    out = a @ b
    spent: list[float] = []
    while len(spent) < 3 or sum(spent) < seconds:
        float(out[0, 0])  # waits for a GPU
        if barrier is not None and not spent:
            barrier.wait()
        began = time.perf_counter()
        for _ in range(products):
            torch.matmul(a, b, out=out)
        float(out[0, 0])
        spent.append(time.perf_counter() - began)
    return products * float(side) ** 3 / statistics.median(spent)


# ---- engines ------------------------------------------------------------------------------------


def speeds(
    work: Workload, rate: float, seconds: float, gpu: float | None = None
) -> Iterator[Speed]:
    """Measure each engine on a workload, and mark or add the one that auto chooses.

    Args:
        work: the workload.
        rate: multiply-adds a second at the peak.
        seconds: how long each engine trains, about; it makes three rounds at least.
        gpu: multiply-adds a second at the peak of the GPU; None where there is none.
    """
    ready = _prepared(work)
    adds = multiply_adds(ready)
    chosen = choose(ready)
    tried = [{**one, "device": "cpu"} for one in _engines(work.clients)]
    if gpu is not None:
        one = {"kind": "vectorised", "workers": 1, "device": "cuda"}
        tried += [{**one, "chunk": chunk} for chunk in sorted({1, work.clients})]
    auto = {name: chosen[name] for name in ("kind", "workers", "chunk", "device")}
    if auto not in tried:
        tried.append(auto)
    for engine in tried:
        most = gpu if engine["device"] == "cuda" and gpu else rate
        yield _speed(ready, work, engine, adds / most, seconds, engine == auto)


def _engines(clients: int) -> Iterator[dict[str, Any]]:
    """Give the engines that are measured whatever auto chooses."""
    workers = min(cores(), clients)
    yield {"kind": "sequential", "workers": 1, "chunk": 1}
    if workers > 1:
        yield {"kind": "workers", "workers": workers, "chunk": 1}
    share = -(-clients // workers)
    for chunk in sorted({1, min(8, share), min(32, share)}):
        yield {"kind": "vectorised", "workers": workers, "chunk": chunk}


def _prepared(work: Workload) -> Prepared:
    random, count = np.random.default_rng(0), work.clients * work.examples
    x = random.normal(size=(count, *work.shape)).astype(np.float32)
    y = random.integers(0, 10, size=count)
    clients = iid(x, y, clients=work.clients, classes=10)
    task = Task(lambda: models.make(work.model, work.shape, 10, work.args))
    settings = config.Run(
        rounds=100,
        local=config.Local(lr=0.01, epochs=1, batch_size=work.batch),
        cohort=config.Cohort(clients=work.clients),
    )
    test = dataset(x[:10], y[:10], classes=10)
    return prepare(settings, Ingredients(task, lambda _: clients, test, work.model))


def _speed(
    ready: Prepared,
    work: Workload,
    engine: dict[str, Any],
    share: float,
    seconds: float,
    auto: bool,
) -> Speed:
    """Train rounds on an engine; `share` is that of the peak for one example a second."""
    message = answered(server_message(ready.plan, ready.server, 0.01), ready.spec)
    clients, spent = np.arange(work.clients), list[float]()
    with kept(), make(ready, engine) as runner:
        runner.train(message, clients, lambda _: None)  # pays for what is made once
        while len(spent) < 3 or sum(spent) < seconds:
            began = time.perf_counter()
            trained = runner.train(message, clients, lambda _: None)
            spent.append(time.perf_counter() - began)
    took = statistics.median(spent)
    examples = int(trained.replies.processed.sum())
    return Speed(
        engine=words(engine),
        auto=auto,
        seconds=took,
        clients=work.clients / took,
        steps=int(trained.steps.sum()) / took,
        share=examples / took * share,
    )


def words(engine: dict[str, Any]) -> str:
    """Return an engine in words.

    >>> words({"kind": "vectorised", "workers": 2, "chunk": 8})
    'vectorised, chunk 8, 2 processes'
    >>> words({"kind": "sequential", "workers": 1, "chunk": 1})
    'sequential'
    """
    found = str(engine["kind"])
    if found == "vectorised":
        found += f", chunk {engine['chunk']}"
    if engine.get("device") == "cuda":
        found += ", GPU"
    return found + (f", {engine['workers']} processes" if engine["workers"] > 1 else "")
