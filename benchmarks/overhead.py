"""What each method costs beside FedAvg in the same engine: python benchmarks/overhead.py

Methods run in turn, several times over, and ratios are taken within one repetition. A pass is one
gradient of the network over a step's batch. Forward passes and gradients with respect to inputs are
the share of it that their multiply-adds are, which depends on the network: where its first layer is
most of it, a gradient with respect to inputs is nearly a whole pass. A method of p passes may take
p times as long as FedAvg; what it takes beyond that is its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "peers"))

import recipes
from run_fedkeel import clients, engine

import fedkeel as fk

PASSES = {
    "gcfed": (1, 0, 0),
    "fedgh": (1, 0, 0),
    "fedgc": (1, 0, 0),
    "gradma.s": (1, 0, 0),
    "fedprox": (1, 0, 0),
    "scaffold": (1, 0, 0),
    "fednova": (1, 0, 0),
    "fedsam": (2, 0, 0),
    "fedsol": (2, 1, 0),
    "moon": (1, 2, 0),
    "fedntd": (1, 1, 0),
    "gradma.w": (3, 0, 0),
    "fedreg": (3, 1, 2 * 10),
}
"""Gradients, forward passes and gradients by inputs of a step; FedReg's with E = 10, one epoch."""


def passes(method: str, work: recipes.Work) -> float:
    """Return how many of FedAvg's gradients a method's step is."""
    gradients, forwards, by_inputs = PASSES[method]
    more = forwards * work.forward + by_inputs * work.input_gradient
    return gradients + more / work.gradient


def seconds(method: str, recipe: recipes.Recipe, arrays: recipes.Arrays, how: str, n: int) -> float:
    """Return the median seconds of a round, without its evaluation and the first round."""
    result = fk.run(
        method,
        task=fk.Task(recipe.network()),
        clients=clients(arrays),
        test=(arrays.test_x[:100], arrays.test_y[:100]),
        rounds=n + 1,
        local=fk.Local(lr=recipe.lr, epochs=recipe.epochs, batch_size=recipe.batch),
        clients_per_round=recipe.per_round,
        evaluation=fk.Evaluation(every=n + 1),
        engine=engine(how),
        progress=False,
    )
    each = [
        sum(v for k, v in row.seconds.items() if not k.startswith("eval"))
        for row in result.rows
        if row.round > 1
    ]
    return statistics.median(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="B")
    parser.add_argument("--engine", default="vectorized:parallel_clients=1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default=",".join(PASSES))
    given = parser.parse_args()
    recipe = recipes.RECIPES[given.recipe]
    arrays = recipes.load(recipe.data)
    work = recipes.work(recipe.network(), recipe.data)
    methods = ["fedavg", *given.methods.split(",")]
    found: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(given.repeats):
        for method in methods:
            spent = seconds(method, recipe, arrays, given.engine, given.rounds)
            found[method].append(spent)
            print(f"{method:12} {spent:.4f} s", file=sys.stderr, flush=True)
    base = found["fedavg"]
    print(
        f"Recipe {given.recipe}, {given.engine}; FedAvg {statistics.median(base):.4f} s a round\n"
    )
    print("| method | passes | times FedAvg | beyond its passes |\n|---|---:|---:|---:|")
    for method in methods[1:]:
        ratios = [one / other for one, other in zip(found[method], base, strict=True)]
        middle, count = statistics.median(ratios), passes(method, work)
        spread = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| `{method}` | {count:.3g} | {spread} | {middle / count:.2f} |")


if __name__ == "__main__":
    main()
