"""A loop with no library at all: python run_plain.py RECIPE [--processes 2]

One model whose parameters are reset in place, a running sum of the clients' parameters, batches
gathered from a fresh permutation. With two processes each trains every other client of the cohort
and keeps its own running sum in shared memory. FedAvg only.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

from harness import Clock, arguments, metered, quiet_stdout, report


class Trainer:
    """Trains clients and adds their parameters, weighted by examples, to `total`."""

    def __init__(self, recipe, arrays, device: str) -> None:
        import torch

        self.recipe, self.arrays, self.device = recipe, arrays, device
        self.model = recipe.network().to(device)
        self.params = list(self.model.parameters())
        self.start = [p.detach().clone().share_memory_() for p in self.params]
        self.total = [torch.zeros_like(p).share_memory_() for p in self.params]
        self.loss = torch.nn.CrossEntropyLoss()

    def train(self, clients) -> None:
        import torch

        for total in self.total:
            total.zero_()
        self.model.train()
        for k in clients:
            with torch.no_grad():
                for p, start in zip(self.params, self.start, strict=True):
                    p.copy_(start)
            count = self._client(int(self.arrays.offsets[k]), int(self.arrays.offsets[k + 1]))
            with torch.no_grad():
                for total, p in zip(self.total, self.params, strict=True):
                    total.add_(p, alpha=count)

    def _client(self, first: int, end: int) -> int:
        import torch

        optimiser = torch.optim.SGD(self.params, lr=self.recipe.lr)
        for _ in range(self.recipe.epochs):
            order = first + torch.randperm(end - first, device=self.device)
            for rows in order.split(self.recipe.batch):
                optimiser.zero_grad()
                scores, y = self.model(self.arrays.x[rows]), self.arrays.y[rows]
                if y.ndim > 1:  # a token at each place
                    scores, y = scores.flatten(0, 1), y.flatten()
                self.loss(scores, y).backward()
                optimiser.step()
        return end - first


def helper(trainer: Trainer, pipe: Connection, number: int) -> None:
    """Train what is asked for until there is no more; the sum lies in shared memory."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(number)
    while (clients := pipe.recv()) is not None:
        trainer.train(clients)
        pipe.send(len(clients))


def main() -> None:
    given = arguments(__doc__)
    import recipes
    import torch

    torch.set_num_threads(given.threads)
    recipe = recipes.RECIPES[given.recipe]
    if recipe.method != "fedavg":
        raise SystemExit(f"{recipe.name} needs {recipe.method}; the plain loop knows FedAvg only")
    arrays = recipes.load(recipe.data).to(given.device)
    with quiet_stdout(), metered(given.memory) as memory:
        clock = Clock(given.device)
        values = run(recipe, arrays, given.rounds or recipe.rounds, given.processes, clock)
    report("plain", None, recipe, given, clock, **values, **memory)


def run(recipe, arrays, count: int, processes: int, clock: Clock) -> dict:
    """Make rounds; return the seconds before the first, and what is reported of the model."""
    trainers = [Trainer(recipe, arrays, arrays.x.device) for _ in range(processes)]
    for other in trainers[1:]:
        other.start = trainers[0].start
    context, pipes, helpers = multiprocessing.get_context("fork"), [], []
    for number, trainer in enumerate(trainers[1:], start=1):
        client_state, its = context.Pipe()
        helpers.append(context.Process(target=helper, args=(trainer, its, number), daemon=True))
        helpers[-1].start()
        pipes.append(client_state)
    start = clock.skip()
    examples, score = rounds(count, recipe, trainers, pipes, clock)
    for pipe in pipes:
        pipe.send(None)
    for process in helpers:
        process.join()
    return {"start": start, "accuracy": score, "examples": examples}


def rounds(count: int, recipe, trainers, pipes, clock: Clock) -> tuple[list[int], float]:
    import recipes
    import torch

    first, arrays = trainers[0], trainers[0].arrays
    sizes, examples, score = recipe.data.sizes(), [], 0.0
    for number in range(1, count + 1):
        cohort = recipe.cohort(number)
        cohort = cohort[sizes[cohort].argsort()[::-1]]  # the longest first, dealt out in turn
        for i, pipe in enumerate(pipes, start=1):
            pipe.send(cohort[i :: len(trainers)])
        first.train(cohort[:: len(trainers)])
        for pipe in pipes:
            pipe.recv()
        weight = int(sizes[cohort].sum())
        with torch.no_grad():
            for i, start in enumerate(first.start):
                start.copy_(sum(t.total[i] for t in trainers)).div_(weight)
        examples.append(weight * recipe.epochs)
        clock.round()
        if number % recipe.every == 0 or number == count:
            with torch.no_grad():
                for p, start in zip(first.params, first.start, strict=True):
                    p.copy_(start)
            score = recipes.accuracy(first.model, arrays, recipe.evaluation_batch)
            clock.evaluation()
    return examples, score


if __name__ == "__main__":
    main()
