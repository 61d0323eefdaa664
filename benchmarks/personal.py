"""Personal methods beside loops written by hand: python benchmarks/personal.py [--network cnn]

Images of MNIST, where FEDKEEL_DATA has them, else the digits of scikit-learn: 20 clients, Dirichlet
0.1, a quarter of each client's examples held out, batches of 10, one epoch (FedRep two, one of them
for the head). Each round ends with the scores of all clients' models on what they hold out. Printed
are the processor seconds of a round with these scores, of this process and of those that it has
started: medians over the rounds after the third. The first one compiles, and in the second one
FedALA's weights settle. Some virtual machines count processor seconds in steps of 4 ms and miss
what is shorter; on a quiet machine `--clock` prints seconds by the clock.

The yardsticks are plain PyTorch after the published algorithms, one client after the other in one
process, a module for each client. `plain` indexes tensors and scores a client in one forward pass.
`loaders` takes batches from torch's `DataLoader`, and measures what PFLlib's public code does:
accuracy and area under the curve in batches of 10, and the loss of all training examples. Neither
of them is PFLlib.

With --many only the scores of 1,000 clients are measured, each of which has a head of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from population import children
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedkeel as fk
from fedkeel.base.values import only_tensor
from fedkeel.config import Data, Run
from fedkeel.data.read.hugging_face import load_any
from fedkeel.engine.base import ServerModel
from fedkeel.engine.personal import measure_personal
from fedkeel.engine.prepared import Ingredients
from fedkeel.method.context import ByPart
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.prepare import prepare

METHODS = {
    "fedavg": "fedavg",
    "fedper": "fedper",
    "ditto": "ditto",
    "apfl": "apfl",
    "fedrep": "fedrep",
    "fedbabu": "fedbabu(epochs=1)",
    "fedproto": "fedproto",
    "fedala": "fedala",
}
RATE, BATCH, SETTLED = 0.005, 10, 3
LAM = {"ditto": 0.1, "fedproto": 1.0}

# ---- the workload -------------------------------------------------------------------------------


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 1, 28, 28] and their labels."""
    random = np.random.default_rng(0)
    if "FEDKEEL_DATA" in os.environ:
        data, _ = load_any(Data(source="mnist"))
        rows = random.permutation(len(data))[:count]
        return only_tensor(data.x, "an image")[rows].numpy(), data.labels[rows]
    x, y = load_digits(return_X_y=True)
    x = np.kron(x.reshape(-1, 8, 8) / 8.0 - 1.0, np.ones((3, 3)))
    x = np.pad(x, ((0, 0), (2, 2), (2, 2)), constant_values=-1.0)[:, None].astype(np.float32)
    rows = random.permutation(count) % len(y)
    return x[rows], y[rows]


def small() -> nn.Sequential:
    """Return one hidden layer of 100 units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def cnn() -> nn.Sequential:
    """Return two unpadded 5 x 5 convolutions and 512 units: 582,026 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


NETWORKS = {"small": small, "cnn": cnn}


def divided(clients: int, examples: int, alpha: float) -> fk.Federation:
    """Return the clients, a quarter of whose examples is held out."""
    x, y = images(clients * examples)
    data = fk.dirichlet(x, y, clients=clients, alpha=alpha, seed=0, min_size=20)
    return data.hold_out(0.25, seed=0)


# ---- fedkeel ------------------------------------------------------------------------------------


Now = Callable[[], float]
"""Returns seconds, of the clock or of the processor."""


def processor_seconds() -> float:
    """Return the seconds of this process and of the processes that it has started."""
    pids = [os.getpid()]
    for pid in pids:
        pids += children(pid)
    files = [f for pid in pids for f in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


class Meter(Callback):
    """Reads the seconds after every round."""

    def __init__(self, now: Now) -> None:
        self.read: list[float] = []
        self._now = now

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        """Read them."""
        self.read.append(self._now())


def of_fedkeel(
    method: str, network: str, clients: fk.Federation, rounds: int, now: Now, kind: Any
) -> float:
    """Return the seconds of a round."""
    meter, few = Meter(now), slice(0, 10)
    fk.run(
        METHODS[method],
        task=fk.Task(NETWORKS[network]),
        clients=clients,
        test=(only_tensor(clients.data.x, "an image")[few], clients.data.labels[few]),
        rounds=rounds,
        local=fk.Local(lr=RATE, epochs=1 + (method == "fedrep"), batch_size=BATCH),
        evaluation=fk.Evaluation(model="personal", every=1),
        engine=fk.Engine(kind=kind),
        callbacks=[meter],
        progress=False,
    )
    return float(np.median(np.diff(meter.read)[SETTLED - 1 :]))


# ---- the loops ----------------------------------------------------------------------------------


class Loop:
    """Rounds of a method as one writes them by hand.

    Args:
        method: its name.
        network: makes the module, whose last layer is the head.
        clients: the clients' examples.
        loaders: whether batches come from `DataLoader`, and more is measured.
    """

    def __init__(self, method: str, network: str, clients: fk.Federation, loaders: bool) -> None:
        self.method, self.loaders, count = method, loaders, len(clients)
        self.server = NETWORKS[network]()
        self.models = [copy.deepcopy(self.server) for _ in range(count)]
        self.own = [copy.deepcopy(self.server) for _ in range(count)]  # Ditto's and APFL's
        self.alpha, self.mixing = [0.5] * count, [self._ones() for _ in range(count)]
        self.prototypes: dict[int, Tensor] = {}
        self.heads = {id(p) for model in self.models for p in model[-1].parameters()}
        x, y = only_tensor(clients.data.x, "an image"), torch.from_numpy(clients.data.labels)
        held = [torch.from_numpy(clients.own_rows(k)) for k in range(count)]
        rows = [torch.from_numpy(clients.client(k)) for k in range(count)]
        self.train = [(x[index], y[index]) for index in rows]
        self.held = [(x[index], y[index]) for index in held]

    def _ones(self) -> list[Tensor]:
        return [torch.ones_like(p) for p in self.server[-1].parameters()]

    def round(self) -> None:
        """Train all clients, add up their models, and score them."""
        parts = [(k, self.train_client(k)) for k in range(len(self.models))]
        self.add_up(dict(parts))
        self.score()

    # ---- batches ----

    def batches(self, k: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch."""
        x, y = self.train[k]
        if self.loaders:
            yield from DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
            return
        for rows in torch.split(torch.randperm(len(y)), BATCH):
            yield x[rows], y[rows]

    # ---- training ----

    def train_client(self, k: int) -> list[dict[int, Tensor]]:
        """Train a client's model from the server's; return its prototypes, where it has any."""
        model, method = self.models[k], self.method
        if method == "fedala":
            self.mix(k)
        elif method != "fedproto":
            self.receive(model)
        optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
        for epoch in range(1 + (method == "fedrep")):
            self.freeze(model, epoch)
            for x, y in self.batches(k):
                loss = self.loss(model, x, y)
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                if method == "ditto":
                    self.step_ditto(k, x, y)
                elif method == "apfl":
                    self.step_apfl(k, x, y)
        if method == "fedproto":
            return [self.means(model, k)]
        return []

    def receive(self, model: nn.Sequential) -> None:
        """Copy the server's model, but for a head of the client's own."""
        keeps = self.method in ("fedper", "fedrep", "fedbabu")
        with torch.no_grad():
            for p, q in zip(model.parameters(), self.server.parameters(), strict=True):
                if not (keeps and id(p) in self.heads):
                    p.copy_(q)

    def freeze(self, model: nn.Sequential, epoch: int) -> None:
        """Leave the head where it is in FedBABU; in FedRep train it first, and then the base."""
        for p in model.parameters():
            is_head = id(p) in self.heads
            if self.method == "fedrep":
                p.requires_grad_(is_head == (epoch == 0))
            elif self.method == "fedbabu":
                p.requires_grad_(not is_head)

    def loss(self, model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        if self.method != "fedproto":
            return F.cross_entropy(model(x), y)
        features = model[:-1](x)
        loss = F.cross_entropy(model[-1](features), y)
        if self.prototypes:
            goals = torch.stack(
                [self.prototypes.get(int(c), features[i].detach()) for i, c in enumerate(y)]
            )
            loss = loss + LAM["fedproto"] * F.mse_loss(features, goals)
        return loss

    def step_ditto(self, k: int, x: Tensor, y: Tensor) -> None:
        """Move the client's own model, which the server's draws."""
        own = list(self.own[k].parameters())
        grads = torch.autograd.grad(F.cross_entropy(self.own[k](x), y), own)
        with torch.no_grad():
            for p, g, w in zip(own, grads, self.server.parameters(), strict=True):
                p.sub_(RATE * (g + LAM["ditto"] * (p - w)))

    def step_apfl(self, k: int, x: Tensor, y: Tensor) -> None:
        """Move the client's own model and its share by the gradient at their mixture."""
        alpha, names = self.alpha[k], [name for name, _ in self.server.named_parameters()]
        own, local = (list(m[k].parameters()) for m in (self.own, self.models))
        with torch.no_grad():
            pairs = zip(own, local, strict=True)
            mixed = [alpha * v + (1 - alpha) * w for v, w in pairs]
        for p in mixed:
            p.requires_grad_()
        scores = torch.func.functional_call(self.server, dict(zip(names, mixed, strict=True)), x)
        grads = torch.autograd.grad(F.cross_entropy(scores, y), mixed)
        with torch.no_grad():
            change = 0.0
            for v, w, g in zip(own, local, grads, strict=True):
                change += float(((v - w) * g).sum())
                v.sub_(RATE * alpha * g)
        self.alpha[k] = min(1.0, max(0.0, alpha - RATE * change))

    def mix(self, k: int) -> None:
        """Start FedALA's round: learn what to take of the server's head, entry by entry."""
        model, weights = self.models[k], self.mixing[k]
        with torch.no_grad():
            last = [p.clone() for p in model[-1].parameters()]
            change = [q - p for p, q in zip(last, self.server[-1].parameters(), strict=True)]
            for p, q in zip(model[:-1].parameters(), self.server[:-1].parameters(), strict=True):
                p.copy_(q)
        head = list(model[-1].parameters())

        def put() -> None:
            with torch.no_grad():
                for p, old, c, w in zip(head, last, change, weights, strict=True):
                    p.copy_(old + w * c)

        put()
        for x, y in self.batches(k):
            with torch.no_grad():
                features = model[:-1](x)
            grads = torch.autograd.grad(F.cross_entropy(model[-1](features), y), head)
            for w, g, c in zip(weights, grads, change, strict=True):
                w.sub_(g * c).clamp_(0.0, 1.0)
            put()

    def means(self, model: nn.Sequential, k: int) -> dict[int, Tensor]:
        """Return the mean features of each class that a client has."""
        x, y = self.train[k]
        with torch.no_grad():
            features = model[:-1](x)
        return {c: features[y == c].mean(0) for c in sorted(set(y.tolist()))}

    def add_up(self, sent: dict[int, list[dict[int, Tensor]]]) -> None:
        """Make the server's model, or its prototypes, of what clients send."""
        if self.method == "fedproto":
            found = [means for of_client in sent.values() for means in of_client]
            classes = {c for means in found for c in means}
            self.prototypes = {
                c: torch.stack([means[c] for means in found if c in means]).mean(0) for c in classes
            }
            return
        sizes = [len(y) for _, y in self.train]
        with torch.no_grad():
            for q in self.server.parameters():
                q.zero_()
            for model, size in zip(self.models, sizes, strict=True):
                for q, p in zip(self.server.parameters(), model.parameters(), strict=True):
                    q.add_(p, alpha=size / sum(sizes))

    # ---- scores ----

    def personal_model(self, k: int) -> nn.Sequential:
        """Return the model by which a client is scored."""
        if self.method in ("fedavg", "many"):
            return self.server if self.method == "fedavg" else self.models[k]
        if self.method == "ditto":
            return self.own[k]
        if self.method == "apfl":
            mixed = copy.deepcopy(self.server)
            with torch.no_grad():
                for p, v in zip(mixed.parameters(), self.own[k].parameters(), strict=True):
                    p.mul_(1 - self.alpha[k]).add_(v, alpha=self.alpha[k])
            return mixed
        if self.method == "fedbabu":
            return self.tuned(k)
        return self.models[k]

    def tuned(self, k: int) -> nn.Sequential:
        """Return the server's model after an epoch at a client."""
        model = copy.deepcopy(self.server)
        optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
        for x, y in self.batches(k):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return model

    def score(self) -> list[tuple[int, float]]:
        """Return of each client how many answers are right, and its loss."""
        if self.method in ("fedper", "fedrep"):
            for model in self.models:
                self.receive(model)  # the mean base, with the own head
        return [self.score_client(k, self.personal_model(k)) for k in range(len(self.models))]

    def score_client(self, k: int, model: nn.Sequential) -> tuple[int, float]:
        """Return how many answers are right, and the loss."""
        with torch.no_grad():
            if not self.loaders:
                x, y = self.held[k]
                scores = model(x)
                right = int((scores.argmax(1) == y).sum())
                return right, float(F.cross_entropy(scores, y))
            right, of_all, truth, loss = 0, [], [], 0.0
            for x, y in DataLoader(TensorDataset(*self.held[k]), BATCH, shuffle=True):
                scores = model(x)
                right += int((scores.argmax(1) == y).sum())
                of_all.append(scores.numpy())
                truth.append(F.one_hot(y, 10).numpy())
            roc_auc_score(np.concatenate(truth), np.concatenate(of_all), average="micro")
            for x, y in DataLoader(TensorDataset(*self.train[k]), BATCH, shuffle=True):
                loss += float(F.cross_entropy(model(x), y)) * len(y)
            return right, loss


def of_loop(
    method: str, network: str, clients: fk.Federation, rounds: int, now: Now, loaders: bool
) -> float:
    """Return the seconds of a round."""
    loop, read = Loop(method, network, clients, loaders), list[float]()
    for _ in range(rounds):
        loop.round()
        read.append(now())
    return float(np.median(np.diff(read)[SETTLED - 1 :]))


# ---- the scores of many clients -----------------------------------------------------------------


def many(network: str, count: int) -> Iterator[tuple[str, float]]:
    """Yield names and processor seconds of one measurement of all clients' scores."""
    clients = divided(count, 40, alpha=100.0)
    task, settings = (
        fk.Task(NETWORKS[network]),
        Run(method="fedper", rounds=1, local=fk.Local(lr=RATE, steps=1)),
    )
    prepared = prepare(settings, Ingredients(task, lambda _: clients, clients.data, network))
    model = ServerModel(prepared.server.params, prepared.server.buffers, 0)
    names = prepared.setup.training.personal
    initial = prepared.setup.training.network.params
    states: dict[int, ByPart] = {
        k: {"personal": {name: torch.randn_like(initial[name]) for name in names}}
        for k in range(count)
    }
    loops = {
        name: Loop("many", network, clients, name == "loaders") for name in ("plain", "loaders")
    }
    for _ in range(4):
        began = time.thread_time()
        measure_personal(prepared.setup, model, states.__getitem__)
        yield "fedkeel", time.thread_time() - began
        for name, loop in loops.items():
            began = time.thread_time()
            loop.score()
            yield name, time.thread_time() - began


# ---- tables -------------------------------------------------------------------------------------


def main() -> None:
    """Print a table, and write a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, default="small")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--engines", default="auto,vectorized")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--clock", action="store_true", help="seconds by the clock")
    parser.add_argument("--rows", type=Path, help="a file to which lines are added")
    given = parser.parse_args()
    now = time.perf_counter if given.clock else processor_seconds
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if given.many:
        rows += [
            {"method": "scores of 1,000 clients", "by": by, "seconds": round(seconds, 5)}
            for by, seconds in many(given.network, 1000)
        ]
    else:
        clients = divided(20, 90, alpha=0.1)
        for repeat in range(given.repeats):
            for method in given.methods.split(","):
                shared = method, given.network, clients, given.rounds, now
                found = {kind: of_fedkeel(*shared, kind) for kind in given.engines.split(",")}
                found |= {"plain": of_loop(*shared, False), "loaders": of_loop(*shared, True)}
                print(repeat, method, {k: round(v, 4) for k, v in found.items()}, file=sys.stderr)
                rows += [
                    {"method": method, "by": by, "seconds": round(s, 5)} for by, s in found.items()
                ]
    shared_by_all = {
        "network": given.network,
        "data": "mnist" if "FEDKEEL_DATA" in os.environ else "digits",
        "torch": torch.__version__,
        "cpu": processor(),
        "rounds": given.rounds,
        "measured": "clock" if given.clock else "processor",
    }
    for row in rows:
        row.update(shared_by_all)
    if given.rows:
        with given.rows.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def table(rows: list[dict[str, Any]]) -> str:
    """Return medians in seconds, with what share of the yardsticks fedkeel's are."""
    columns = list(dict.fromkeys(row["by"] for row in rows))
    ours = [name for name in columns if name not in ("plain", "loaders")]
    shares = [f"{name} / {other}" for name in ours for other in ("plain", "loaders")]
    lines = ["| method | " + " | ".join([*columns, *shares]) + " |"]
    lines.append("|---|" + "---:|" * (len(columns) + len(shares)))
    for method in dict.fromkeys(row["method"] for row in rows):
        of = {
            name: [r["seconds"] for r in rows if (r["method"], r["by"]) == (method, name)]
            for name in columns
        }
        cells = [f"{statistics.median(of[name]):.3f}" for name in columns]
        for name in ours:
            for other in ("plain", "loaders"):
                ratios = [a / b for a, b in zip(of[name], of[other], strict=True)]
                cells.append(f"{statistics.median(ratios):.2f}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
