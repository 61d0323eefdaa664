"""A round against a plain PyTorch loop, in one run: python benchmarks/round.py [--repeats 7]

The work: FedGH's 2NN (784-512-256-10), 20 clients of 640 examples, batch 128, one epoch, SGD. The
plain loop is what one would write with no library at all: one model, one optimiser, one thread, a
list of state dicts and their mean. Ours are the engines, server round and records included, without
evaluation. Pairs are run in turn and the ratios are taken pair by pair, because machines drift.

Also what the server's own work costs beside that round: FedGH, SGC, and GradMA-S with 100 stored
workers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedkeel import Cohort, Engine, Evaluation, Local, Task, dataset, federation
from fedkeel.config import Run
from fedkeel.data.cohort import select
from fedkeel.engine.prepared import Ingredients
from fedkeel.engine.process.malloc import keeping_freed_memory
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.workers import Workers
from fedkeel.method.server_memory import copy_memory
from fedkeel.method.server_round import server_message, server_round
from fedkeel.runner.manifest import environment
from fedkeel.runner.prepare import prepare
from fedkeel.task.models import make

CLIENTS, EXAMPLES, BATCH, LR = 20, 640, 128, 0.01


def two_nn() -> nn.Module:
    return make("2nn", (784,), 10)


def plain(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """One round of FedAvg with nothing but PyTorch."""
    model = two_nn()

    def round() -> None:
        start = {k: v.clone() for k, v in model.state_dict().items()}
        states = []
        for k in range(CLIENTS):
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            order = torch.randperm(EXAMPLES) + k * EXAMPLES
            for rows in order.split(BATCH):
                optimiser.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
            states.append({k: v.clone() for k, v in model.state_dict().items()})
        model.load_state_dict({k: sum(s[k] for s in states) / CLIENTS for k in start})

    return round


Engines = Workers | Sequential


class Ours:
    """Rounds of a method in an engine."""

    def __init__(self, method: str, x, y, workers: int, clients: int = CLIENTS) -> None:
        lists = [np.arange(k * EXAMPLES, (k + 1) * EXAMPLES) % len(y) for k in range(clients)]
        data = dataset(x, y)
        settings = Run(
            method=method,
            rounds=1000,
            weights="uniform",
            local=Local(lr=LR, epochs=1, batch_size=BATCH),
            cohort=Cohort(clients=CLIENTS),
            engine=Engine(),
            evaluation=Evaluation(),
        )
        held = dataset(x[:100], y[:100])
        parts = Ingredients(Task(two_nn), lambda _: federation(data, lists), held, "2nn")
        self.p = prepare(settings, parts)
        self.server = copy_memory(self.p.server)
        message = server_message(self.p.plan, self.server, LR)
        if workers:
            self.engine: Engines = Workers(self.p.setup, self.p.spec, CLIENTS, message, workers)
        else:
            self.engine = Sequential(self.p.setup, self.p.spec, CLIENTS)

    def round(self) -> None:
        p, number = self.p, self.server.round
        chosen = select(p.settings.cohort, p.setup.federation.sizes, 0, number)
        message = server_message(p.plan, self.server, LR)
        trained = self.engine.train(message, chosen.clients, lambda _: None)
        began = time.perf_counter()
        done = server_round(p.plan, self.server, message, trained.replies, p.population, 0)
        self.server_seconds = time.perf_counter() - began
        self.engine.commit(trained, chosen.clients)
        self.server = done.server

    def close(self) -> None:
        self.engine.__exit__(None, None, None)


def seconds(f: Callable[[], None], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        f()
    return (time.perf_counter() - began) / times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    repeats, rounds = parser.parse_args().repeats, parser.parse_args().rounds
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    x = torch.randn(CLIENTS * EXAMPLES, 784)
    y = torch.randint(0, 10, (CLIENTS * EXAMPLES,))
    theirs = plain(x, y)
    ours = {
        "sequential": Ours("fedavg", x, y, workers=0),
        "workers 2": Ours("fedavg", x, y, workers=2),
    }

    def single() -> None:
        torch.set_num_threads(1)
        for _ in range(rounds):
            theirs()
        torch.set_num_threads(threads)

    for engine in ours.values():
        engine.round()
    single()
    env = environment()
    print(f"{env.processor}, {env.cores} cores, torch {env.torch}")
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    base = []
    for _ in range(repeats):
        base.append(seconds(single, 1) / rounds)
        for name, engine in ours.items():
            with keeping_freed_memory():  # as a run does; the plain loop does not
                engine.round()
                spent = seconds(engine.round, rounds)
            ratios[name].append(spent / base[-1])
    print(f"plain loop, 1 thread      {statistics.median(base) * 1e3:7.1f} ms a round")
    for name, values in ratios.items():
        low, mid, high = min(values), statistics.median(values), max(values)
        print(f"{name:<25} {mid:7.3f} of it ({low:.3f} to {high:.3f})")
    for engine in ours.values():
        engine.close()
    print("server's round, of the plain loop's round")
    for method, clients in (
        ("fedavg", 20),
        ("fedgh", 20),
        ("fedgc.sgc", 20),
        ("fedgc.sgc(groups='model')", 20),
        ("gradma.s(memory=100)", 100),
    ):
        engine = Ours(method, x, y, workers=2, clients=clients)
        server = []
        with keeping_freed_memory():
            for i in range(8 + repeats):
                engine.round()
                if i >= 8:
                    server.append(engine.server_seconds)
        mid = statistics.median(server)
        print(f"{method:<25} {mid * 1e3:7.1f} ms  {mid / statistics.median(base):7.3f}")
        engine.close()


if __name__ == "__main__":
    main()
