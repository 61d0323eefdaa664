"""A tiny federation, networks that misbehave on purpose, and watchdogs.

The module is importable by name, so that spawned worker processes find the classes in it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.features.own_training.given import ClientExamples, TrainingRound
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.task.metrics.base import TaskInfo
from fedkeel.task.metrics.metric_set import make_metric_set
from fedkeel.task.network import Network
from fedkeel.tree import Tree

MARK = 100.0
"""First input of every example of a marked client; the others' stay below 10."""


class Net(nn.Module):
    """Two layers, with dropout or batch normalisation where asked for."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, width: int = 6) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(torch.tanh(self.norm(self.fc1(x)))))


class Mapped(nn.Module):
    """Batch normalisation over positions too, which takes one example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x[:, None])).flatten(1))


class Marked(Net):
    """Does something else where a batch of training holds a marked example."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] == MARK).any()):
            return self.marked(Net.forward(self, x.clamp(max=1.0)))
        return Net.forward(self, x)

    def marked(self, scores: Tensor) -> Tensor:
        return scores


class NaN(Marked):
    """Gives NaN for marked examples."""

    def marked(self, scores: Tensor) -> Tensor:
        return scores * float("nan")


class Raises(Marked):
    """Raises for marked examples."""

    def marked(self, scores: Tensor) -> Tensor:
        raise ArithmeticError("this example is marked")


class Kills(Marked):
    """Kills its process at a marked example: each time, or until a file says that it has.

    Args:
        once: the file; the process is killed only where it does not exist yet.
    """

    def __init__(self, once: Path | None = None, norm: bool = False) -> None:
        super().__init__(norm=norm)
        self.once, self.parent = once, os.getpid()

    def marked(self, scores: Tensor) -> Tensor:
        if os.getpid() != self.parent and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return scores


class Noisy(Net):
    """Adds noise to its scores, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        scores = Net.forward(self, x)
        return scores + torch.randn_like(scores)


class Slow(Net):
    """Takes its time over every batch."""

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return Net.forward(self, x)


def federation(clients: int = 6, marked: int | None = None, seed: int = 0) -> fk.Federation:
    """Unequal clients of one to three noisy classes; every example of one of them is marked."""
    random = np.random.default_rng(seed)
    lists, labels = [], []
    for k in range(clients):
        own = random.choice(3, size=1 + k % 3, replace=False)
        start = sum(map(len, labels))
        labels.append(random.choice(own, size=5 + 3 * (k % 7)))
        lists.append(np.arange(start, start + len(labels[-1])))
    y = np.concatenate(labels)
    x = _inputs(y, random)
    if marked is not None:
        x[lists[marked], 0] = MARK
    return fk.federation(fk.dataset(x, y, classes=3), lists)


def held(examples: int = 60) -> fk.Dataset:
    """A test set, of more examples than fit into one forward pass."""
    random = np.random.default_rng(99)
    y = random.integers(0, 3, size=examples)
    return fk.dataset(_inputs(y, random), y, classes=3, name="test")


def of_sizes(*sizes: int) -> fk.Federation:
    """Clients of these sizes."""
    data = held(sum(sizes))
    cuts = np.split(np.arange(len(data)), np.cumsum(sizes)[:-1])
    return fk.federation(data, cuts)


def _inputs(y: np.ndarray, random: np.random.Generator) -> np.ndarray:
    centres = np.random.default_rng(7).normal(size=(3, 5)) * 1.5
    return (centres[y] + random.normal(size=(len(y), 5))).clip(-9, 9).astype(np.float32)


def prepared(
    method: str = "fedavg",
    model: nn.Module | Callable[[], nn.Module] = Net,
    *,
    rounds: int = 3,
    clients: fk.Federation | None = None,
    per_round: int = 4,
    buffers: str = "refuse",
    local: fk.Local | None = None,
    cohort: fk.Cohort | None = None,
    evaluation: fk.Evaluation | None = None,
    stop: fk.Stop | None = None,
    adversary: fk.Adversary | None = None,
    root: fk.Root | None = None,
    test: fk.Dataset | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    metrics: list[Any] | None = None,
    seed: int = 0,
    name: str = "toy",
    privacy: fk.Privacy | None = None,
    weights: str | None = None,
    system: fk.System | None = None,
    flower: config.Flower | None = None,
    others: Mapping[str, fk.ClientNetwork] | None = None,
    public: fk.Dataset | None = None,
    **engine: object,
) -> Prepared:
    """Prepare a run of a method on the toy federation."""
    values = {"kind": "sequential", "checkpoint_seconds": 0.0, **engine}
    settings = config.Run(
        name=name,
        method=method,
        rounds=rounds,
        seed=seed,
        local=local or fk.Local(lr=0.05, epochs=2, batch_size=4, momentum=0.5),
        cohort=cohort or fk.Cohort(clients=per_round),
        evaluation=evaluation or fk.Evaluation(batch_size=16),
        stop=stop or fk.Stop(),
        adversary=adversary or fk.Adversary(),
        root=root,
        engine=config.build(config.Engine, values, "test"),
        privacy=privacy,
        weights=weights,
        system=system,
        flower=flower or config.Flower(),
    )
    more: dict[str, Any] = {} if loss is None else {"loss": loss}
    if metrics is not None:
        more["metrics"] = metrics
    data = clients or federation()
    task = fk.Task(model, buffers=buffers, others=others or {}, **more)
    made = Ingredients(task, lambda _: data, test or held(), "toy", public=public or held(30))
    return prepare(settings, made)


def own_steps(model: nn.Module, data: ClientExamples, round: TrainingRound) -> dict[str, float]:
    """Local training of a user's own, whose momentum goes on from round to round."""
    optimiser = torch.optim.SGD(model.parameters(), lr=round.lr, momentum=0.5)
    for number, parameter in enumerate(model.parameters()):
        if round.state:
            optimiser.state[parameter]["momentum_buffer"] = round.state[str(number)]
    loss = torch.zeros(())
    for x, y in data.batches:
        optimiser.zero_grad()
        loss = round.loss(model(x), y)
        loss.backward()
        optimiser.step()
    for number, parameter in enumerate(model.parameters()):
        round.state[str(number)] = optimiser.state[parameter]["momentum_buffer"]
    return {"loss": loss.item(), "drawn": torch.rand(()).item()}


OWN_STEPS = fk.Local(lr=0.05, epochs=2, batch_size=4, keep_state=True, train="toys:own_steps")


def same(a: Result, b: Result) -> bool:
    """Whether two runs have the same parameters, buffers and rows, seconds left out."""
    trees = [(a.params, b.params), (a.buffers, b.buffers)]
    return plain(a) == plain(b) and all(
        list(x) == list(y) and all(torch.equal(x[k], y[k]) for k in x) for x, y in trees
    )


def plain(result: Result) -> list[str]:
    """The rows without seconds; as text, in which NaN equals NaN."""
    without = {"seconds": None, "processor_seconds": None}
    return [repr({**vars(row), **without}) for row in result.rows]


def forget(folder: Path) -> None:
    """Take out of memory what was imported from a folder."""
    for name, module in sys.modules.copy().items():
        if str(folder) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run, Python's own helpers left out."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if alive(child) and b"resource_tracker" not in command(child)]


def command(pid: int) -> bytes:
    """The command line of a process, empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def living(folder: Path) -> list[str]:
    """The command lines of processes that were started for something in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        if place.name == str(os.getpid()):
            continue
        with suppress(OSError):
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (place / "environ").read_bytes()
            if str(folder).encode() in environment or str(folder) in words:
                found.append(words)
    return found


def eventually(holds: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait until something holds; false where it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Let a test fail that hangs."""

    def handle(number: int, frame: object) -> None:
        raise TimeoutError(f"still running after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "dropout": partial(Net, dropout=0.5),
    "norm": partial(Net, norm=True),
}


def four_each(clients: int, **engine: object) -> Prepared:
    """Return a run on clients of four examples, which can be prepared in no time."""
    x = torch.randn(clients * 4, 6, generator=torch.Generator().manual_seed(0))
    data = fk.dataset(x, torch.arange(clients * 4) % 3)
    lists = [np.arange(4 * k, 4 * k + 4) for k in range(clients)]
    settings = config.Run(
        method="fedavg",
        rounds=3,
        local=fk.Local(lr=0.1, epochs=1, batch_size=2),
        cohort=fk.Cohort(clients=clients),
        engine=fk.Engine(**{"workers": None, **engine}),
    )
    task = fk.Task(lambda: nn.Linear(6, 3))
    return prepare(settings, Ingredients(task, lambda _: fk.federation(data, lists), data, "net"))


def measure(network: Network, params: Tree, buffers: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Return [B, 3] of labelled examples: hit, hit within rank 3, loss."""
    with torch.no_grad():
        scores = network.test_logits(params, buffers, x)
    info = TaskInfo(tuple(scores.shape[1:]), (), int(y.max()) + 1)
    metrics = make_metric_set(network, None, None, info, x, y)
    predict = partial(network.test_output, params, buffers)
    return metrics.measure(predict, x, y, torch.arange(len(y)), len(y)).states
