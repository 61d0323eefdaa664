"""Attacks and defences on digits: python benchmarks/robust.py [--rows FILE] [--page FILE]

15 clients, all of which train in each of 15 rounds: one epoch of batches of 16 with rate 0.1, a
network with one hidden layer of 32 units, clients counted equally. A fifth of the clients attack.
Every attack with every defence, on clients whose classes are mixed evenly (Dirichlet 100) and
unevenly (Dirichlet 0.3), with 3 seeds. And without attackers: ten clients, one of which has all
examples of two classes. Each finished run is a line of the file of rows, and is not made again.
With --page it writes the page of what is in that file, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedkeel as fk

SEEDS = (0, 1, 2)
SKEWS = {"even": 100.0, "uneven": 0.3}
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "sign_flip": {"factor": 4.0},
    "alie": {},
    "backdoor": {"factor": 5.0, "trigger": 2},
    "label_flip": {},
    "min_max": {},
    "ipm": {"factor": 0.5},
    "mimic": {},
    "gaussian": {"factor": 10.0},
}
DEFENCES = (
    "fedavg",
    "median",
    "trimmed_mean(beta=0.2)",
    "geomedian",
    "krum(beta=0.2)",
    "multikrum(beta=0.2)",
    "bulyan(beta=0.2)",
    "nnm(beta=0.2)+median",
)
MINORITY = (8, 9)
LOCAL = fk.Local(lr=0.1, epochs=1, batch_size=16)


def data(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Digits, a fifth of them as the test set: x and y to train on, x and y to test on."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    x, y = (x[order] / 16.0).astype(np.float32).reshape(-1, 1, 8, 8), y[order]
    cut = len(y) // 5
    return x[cut:], y[cut:], x[:cut], y[:cut]


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def jobs() -> Iterator[dict[str, Any]]:
    """All runs, one attack after the other."""
    for seed in SEEDS:
        for defence in DEFENCES:
            yield {"skew": "minority", "attack": "none", "defence": defence, "seed": seed}
    for attack in ATTACKS:
        for skew in SKEWS:
            for seed in SEEDS:
                for defence in DEFENCES:
                    yield {"skew": skew, "attack": attack, "defence": defence, "seed": seed}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job with its results after the last round."""
    seed, attack = job["seed"], job["attack"]
    x, y, x_test, y_test = data(seed)
    if job["skew"] == "minority":
        rare = np.isin(y, MINORITY)
        order = np.flatnonzero(~rare)
        parts = [order[k::9] for k in range(9)]
        clients = fk.from_clients([(x[rare], y[rare]), *((x[p], y[p]) for p in parts)])
    else:
        clients = fk.dirichlet(x, y, clients=15, alpha=SKEWS[job["skew"]], seed=seed, min_size=4)
    adversary = None
    if attack != "none":
        adversary = fk.Adversary(kind=attack, share=0.2, **ATTACKS[attack])
    result = fk.run(
        job["defence"],
        task=fk.Task(model),
        clients=clients,
        test=(x_test, y_test),
        rounds=15,
        local=LOCAL,
        seed=seed,
        weights="uniform",
        evaluation=fk.Evaluation(every=15),
        adversary=adversary,
        engine=fk.Engine(kind="sequential"),
        progress=False,
    )
    last = result.rows[-1]
    scores = {} if last.test is None else last.test.values
    found = {**job, "accuracy": scores["accuracy"], "success": scores.get("attack_success")}
    if job["skew"] == "minority":
        module = model()
        module.load_state_dict(result.state_dict())
        with torch.no_grad():
            right = module(torch.from_numpy(x_test)).argmax(dim=1).numpy() == y_test
        rare = np.isin(y_test, MINORITY)
        found |= {"rare": float(right[rare].mean()), "common": float(right[~rare].mean())}
        chosen = [row.diagnostics.get("krum.client") for row in result.rows[1:]]
        found["chosen"] = None if None in chosen else chosen.count(0.0)
    return found


# ---- the page -----------------------------------------------------------------------------------


def cell(values: list[float]) -> str:
    """Return mean and sample standard deviation in per cent."""
    spread = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"


def page(rows: list[dict[str, Any]]) -> str:
    """Return the tables of the cells of which all seeds are there."""
    out = [INTRODUCTION]

    def values(key: str, **where: str) -> list[float]:
        chosen = [row for row in rows if all(row[k] == v for k, v in where.items())]
        return [row[key] for row in sorted(chosen, key=lambda row: row["seed"])]

    for skew, alpha in SKEWS.items():
        out += [f"\n## {skew.capitalize()} classes (Dirichlet {alpha:g})\n"]
        attacks = [
            attack
            for attack in ATTACKS
            if all(
                len(values("accuracy", skew=skew, attack=attack, defence=d)) == len(SEEDS)
                for d in DEFENCES
            )
        ]
        out.append("Test accuracy, %.\n")
        out.append("| defence | " + " | ".join(attacks) + " |")
        out.append("| --- |" + " ---: |" * len(attacks))
        for defence in DEFENCES:
            where = {"skew": skew, "defence": defence}
            cells = [cell(values("accuracy", attack=a, **where)) for a in attacks]
            out.append(f"| `{defence}` | " + " | ".join(cells) + " |")
        if "backdoor" in attacks:
            out += ["\nAttack success rate of the backdoor, %: lower is better.\n"]
            out += ["| defence | success |", "| --- | ---: |"]
            for defence in DEFENCES:
                rates = values("success", skew=skew, attack="backdoor", defence=defence)
                out.append(f"| `{defence}` | {cell(rates)} |")
    out.append(NO_ATTACKER)
    out += ["| defence | classes 8 and 9 | the other classes |", "| --- | ---: | ---: |"]
    for defence in DEFENCES:
        rare, common = (values(k, skew="minority", defence=defence) for k in ("rare", "common"))
        if len(rare) == len(SEEDS):
            out.append(f"| `{defence}` | {cell(rare)} | {cell(common)} |")
    chosen = values("chosen", skew="minority", defence="krum(beta=0.2)")
    if len(chosen) == len(SEEDS):
        times = ", ".join(f"{n:g}" for n in chosen)
        out.append(f"\nKrum chose the client with classes 8 and 9 in {times} of 15 rounds.")
    return "\n".join(out) + "\n"


INTRODUCTION = """\
# Attackers and defences on digits

Written by `python benchmarks/robust.py --page`, from the rows that it made. scikit-learn's digits,
15 clients, all of which train in each of 15 rounds: one epoch of batches of 16 with rate 0.1, a
network with one hidden layer of 32 units, clients counted equally. 3 of the 15 clients attack,
drawn by the seed. Mean and sample standard deviation of 3 seeds, after the last round; no
hyper-parameter was tuned, neither of an attack nor of a defence. Factors: sign flip 4, Gaussian 10,
IPM 0.5, backdoor 5.
With 3 seeds a difference of less than about two standard deviations says nothing."""

NO_ATTACKER = """
## Without any attacker: a client whose classes nobody else has

Ten clients. One has all examples of the classes 8 and 9, the others share the other classes evenly.
Accuracy on the test examples of each, %.
"""


def make(
    about: str | None,
    file: str,
    keys: Sequence[str],
    jobs: Iterable[dict[str, Any]],
    run: Callable[[dict[str, Any]], dict[str, Any]],
    page: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Read the command line, and make the rows that are missing, or the page of those there are."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results", file))
    parser.add_argument("--page", type=Path, help="write the page and run nothing")
    options = parser.parse_args()
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    rows = [json.loads(line) for line in lines]
    if options.page is not None:
        options.page.write_text(page(rows), encoding="utf-8")
        return
    done = {tuple(row[key] for key in keys) for row in rows}
    torch.set_num_threads(1)
    for job in jobs:
        if tuple(job[key] for key in keys) not in done:
            with options.rows.open("a") as rows_file:
                rows_file.write(json.dumps(run(job)) + "\n")


if __name__ == "__main__":
    make(__doc__, "robust.jsonl", ("skew", "attack", "defence", "seed"), jobs(), run, page)
