"""fedkeel by its public interface: run_fedkeel.py RECIPE [--engine vectorized:parallel_clients=50]

An engine is a kind and options of `fedkeel.Engine`, such as ``workers:workers=2``. Seconds are
those of the rounds' own records: all phases of a round but its evaluation. The evaluation of single
clients after the last round, which the peers do not make, is held to one example of each client.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

import fedkeel as fk  # before torch: it says how torch's threads are to wait
from harness import Clock, arguments, metered, quiet_stdout, report


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", default="auto", help="kind[:option=value[,option=value]]")


def engine(text: str):
    """Read ``kind:option=value,...``."""
    kind, _, rest = text.partition(":")
    options = dict(item.split("=", 1) for item in rest.split(",") if item)
    values = {name: int(v) if v.isdigit() else v for name, v in options.items()}
    return fk.Engine(kind=kind, checkpoint_seconds=1e9, **values)


def dataset(x, y, data):
    """Examples as fedkeel takes them."""
    if not data.vocabulary:
        return fk.dataset(x, y)
    return fk.dataset(x, y, tokens=True, classes=None if data.every_place else data.classes)


def task(recipe):
    """The network with its loss; running averages of batch normalisation are averaged too."""
    loss = "token_cross_entropy" if recipe.data.every_place else "cross_entropy"
    return fk.Task(recipe.network(), loss=loss, buffers="average")


def clients(arrays, data):
    """The federation; of each client one example is looked at when clients are evaluated."""
    import numpy as np

    return fk.Federation(
        data=dataset(arrays.x, arrays.y, data),
        rows=np.arange(arrays.offsets[-1]),
        offsets=arrays.offsets,
        holdout_rows=arrays.offsets[:-1].copy(),
        holdout_offsets=np.arange(len(arrays.offsets)),
    )


def commit() -> str:
    """The commit of the package that is measured, with a plus where its files were changed."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(fk.__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", ".")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def main() -> None:
    given = arguments(__doc__, add_engine)
    import recipes

    from fedkeel.records.run_record import to_json

    recipe = recipes.RECIPES[given.recipe]
    arrays = recipes.load(recipe.data)
    with quiet_stdout(), metered(given.memory) as memory:
        began = time.perf_counter()
        result = fk.run(
            recipe.method,
            task=task(recipe),
            clients=clients(arrays, recipe.data),
            test=dataset(arrays.test_x, arrays.test_y, recipe.data),
            rounds=given.rounds or recipe.rounds,
            local=fk.Local(lr=recipe.lr, epochs=recipe.epochs, batch_size=recipe.batch),
            clients_per_round=recipe.per_round,
            seed=recipe.seed,
            evaluation=fk.Evaluation(every=recipe.every, batch_size=recipe.evaluation_batch),
            engine=engine(given.engine),
            progress=False,
        )
        total = time.perf_counter() - began
    clock = Clock()
    for row in result.rows:
        spent = dict(row.seconds)
        if row.test is not None:
            evaluated = sum(spent.pop(k) for k in list(spent) if k.startswith("evaluat"))
            if row.per_client is None:
                clock.evaluations.append(evaluated)
        if row.round:
            clock.rounds.append(sum(spent.values()))
    in_rounds = sum(sum(row.seconds.values()) for row in result.rows)
    ran = result.record.engine
    given.processes = ran.workers
    report(
        "fedkeel",
        "fedkeel",
        recipe,
        given,
        clock,
        start=total - in_rounds,
        accuracy=result.last,
        examples=[row.examples for row in result.rows[1:]],
        engine=given.engine,
        ran=to_json(ran),
        commit=commit(),
        **memory,
    )


if __name__ == "__main__":
    main()
