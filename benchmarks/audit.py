"""What methods reveal: python benchmarks/audit.py [--rows FILE] [--page FILE]

scikit-learn's digits (8 x 8) and the LeNet with sigmoids of Deep Leakage from Gradients, one local
step on all of a client's examples with rate 0.1; a single example for each client, unless a
setting says ten. DLG has one start of at most 20 iterations of L-BFGS, labels are read off the last
layer. Membership of the released model is told by likelihood ratios (LiRA) with 8 runs on halves
of 300 digits at 10 clients, 10 rounds of 3 local epochs, a network with 64 hidden units. 3 seeds of
the run and of the attacker, 8 of FedReg with MG. Each finished row is a line of the file of rows,
and is not made again. With --only it makes the rows of some settings; with --mnist it measures DLG
on one MNIST digit of each of 3 clients (FEDKEEL_DATA). With --page it writes the page of what is in
that file, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedkeel as fk
from fedkeel import config
from fedkeel.config import build
from fedkeel.records.paired import paired_difference
from fedkeel.runner.ingredients import gather
from fedkeel.study.audit.examine import examine
from fedkeel.task.models import make

SEEDS = (0, 1, 2)
ROUNDS = 20
DELTA = 1e-3
MG = "fedreg with MG"
PLAIN, KNOWS = "attacker of the plain gradient", "attacker who knows MG"
SETTINGS: dict[str, dict[str, Any]] = {
    "fedsgd, one client": {},
    "fedsgd, one client with ten examples": {"examples": 10},
    "fedsgd, the sum of ten clients": {"view": "sum"},
    "fedavg of five local steps, one client": {"method": "fedavg", "epochs": 5},
    "one class a client, round 9: fedsgd": {"round": 9, "classes": True},
    "one class a client, round 9: fedgc, attacker of the plain gradient": {
        "method": "fedsgd+fedgc.cgc",
        "round": 9,
        "classes": True,
        "adaptive": False,
    },
    "one class a client, round 9: fedgc, attacker who knows the projection": {
        "method": "fedsgd+fedgc.cgc",
        "round": 9,
        "classes": True,
    },
    f"{MG}, one client, {PLAIN}": {
        "method": "fedsgd+fedreg(gamma=0.4, eta_s=0.03, mg=True)",
        "adaptive": False,
        "seeds": 8,
    },
    f"{MG}, one client, {KNOWS}": {
        "method": "fedsgd+fedreg(gamma=0.4, eta_s=0.03, mg=True)",
        "attacks": "dlg",
        "seeds": 8,
    },
    "dpsgd, sigma 0.01": {"method": "fedsgd+dpsgd(sigma=0.01)"},
    "dpsgd, sigma 0.05": {"method": "fedsgd+dpsgd(sigma=0.05)"},
    "epsilon 8 for each example": {"epsilon": 8.0, "unit": "example"},
    "epsilon 2 for each example": {"epsilon": 2.0, "unit": "example"},
    "epsilon 0.5 for each example": {"epsilon": 0.5, "unit": "example"},
    "the released models, no privacy": {"view": "release"},
    "the released models, epsilon 8 for each client": {"view": "release", "epsilon": 8.0},
    "the released models, epsilon 2 for each client": {"view": "release", "epsilon": 2.0},
    "the released models, epsilon 0.5 for each client": {"view": "release", "epsilon": 0.5},
}
MEMBERSHIP: dict[str, dict[str, Any]] = {
    "no privacy": {},
    "epsilon 8": {"epsilon": 8.0},
    "epsilon 2": {"epsilon": 2.0},
    "epsilon 0.5": {"epsilon": 0.5},
}


def lenet() -> nn.Module:
    return make("lenet_dlg", (1, 8, 8), 10)


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    return (x[order] / 16.0).astype(np.float32).reshape(-1, 1, 8, 8), y[order].astype(np.int64)


def budget(setting: dict[str, Any]) -> fk.Privacy | None:
    if "epsilon" not in setting:
        return None
    unit = setting.get("unit", "client")
    return fk.Privacy(epsilon=setting["epsilon"], delta=DELTA, unit=unit)


def inversion(name: str, seed: int) -> dict[str, Any]:
    """Attack one round of ten clients."""
    setting, (x, y) = SETTINGS[name], data(seed)
    size = setting.get("examples", 1)
    places = [np.arange(k * size, (k + 1) * size) for k in range(10)]
    if "classes" in setting:
        places = [np.flatnonzero(y == k)[:1] for k in range(10)]
    clients = [(x[rows], y[rows]) for rows in places]
    attack = {
        "attacks": setting.get("attacks", "dlg,labels,updates"),
        "view": setting.get("view", "client"),
        "round": setting.get("round", 1),
        "adaptive": setting.get("adaptive", True),
        "targets": 2 if "classes" in setting else 1,
        "images": 10,
        "lbfgs": 20,
        "tries": 1,
        "seed": seed,
    }
    record = fk.audit(
        setting.get("method", "fedsgd"),
        task=fk.Task(lenet),
        clients=fk.from_clients(clients, classes=10),
        test=(x[1000:], y[1000:]),
        rounds=ROUNDS,
        local=fk.Local(lr=0.1, epochs=setting.get("epochs", 1), batch_size="all"),
        attack=build(fk.Audit, attack, "audit"),
        seed=seed,
        weights="uniform",
        engine=fk.Engine(kind="sequential"),
        privacy=budget(setting),
        progress=False,
    )
    numbers = {
        result.attack: {key: record.mean(result.attack, key) for key in result.numbers}
        for result in record.results
    }
    return {"kind": "inversion", "setting": name, "seed": seed, "numbers": numbers}


def membership(name: str, seed: int) -> dict[str, Any]:
    """Likelihood ratios on the model after the last round."""
    setting, (x, y) = MEMBERSHIP[name], data(seed)
    record = fk.audit(
        "fedavg",
        task=fk.Task(wide),
        clients=fk.iid(x[:300], y[:300], clients=10, seed=seed),
        test=(x[1000:], y[1000:]),
        rounds=10,
        local=fk.Local(lr=0.2, epochs=3, batch_size=10),
        attack=fk.Audit(attacks=("lira",), view="release", round=10, shadows=8, seed=seed),
        seed=seed,
        weights="uniform",
        engine=fk.Engine(kind="sequential"),
        privacy=budget(setting),
        progress=False,
    )
    numbers = {"lira": dict(record.results[0].numbers), "accuracy": record.score}
    return {"kind": "membership", "setting": name, "seed": seed, "numbers": numbers}


def mnist(seed: int) -> dict[str, Any]:
    """DLG on one FedSGD gradient of one MNIST digit, of each of three clients."""
    values = {
        "method": "fedsgd",
        "rounds": 1,
        "seed": seed,
        "data": {"source": "mnist", "limit": 200},
        "partition": {"kind": "iid", "clients": 200},
        "model": {"name": "lenet_dlg"},
        "local": {"lr": 0.1, "epochs": 1, "batch_size": "all"},
        "cohort": {"clients": 3},
    }
    experiment = build(config.Experiment, values, "experiment")
    attack = config.Audit(attacks=("dlg",), targets=3, tries=2, lbfgs=60, seed=seed)
    record = examine(experiment, gather(experiment), attack)
    numbers = {key: [r.numbers[key] for r in record.results] for key in ("psnr", "ssim")}
    return {"kind": "mnist", "setting": "mnist", "seed": seed, "numbers": numbers}


KINDS = {"inversion": inversion, "membership": membership}


def jobs() -> Iterator[tuple[str, str, int]]:
    for seed in range(8):
        for name, setting in SETTINGS.items():
            if seed < setting.get("seeds", len(SEEDS)):
                yield "inversion", name, seed
    for seed in SEEDS:
        for name in MEMBERSHIP:
            yield "membership", name, seed


# ---- the page -----------------------------------------------------------------------------------


def spread(values: list[float], factor: float = 1.0, places: int = 1) -> str:
    """Return mean and sample standard deviation."""
    if len(values) < 2:
        return "" if not values else f"{factor * values[0]:.{places}f}"
    deviation = factor * statistics.stdev(values)
    return f"{factor * statistics.mean(values):.{places}f} ± {deviation:.{places}f}"


def of_mg(rows: list[dict[str, Any]]) -> str:
    """Return how much more an attacker finds who knows MG, by the seeds that have both."""

    def psnr(who: str) -> dict[int, float]:
        chosen = [r for r in rows if r["setting"] == f"{MG}, one client, {who}"]
        return {r["seed"]: r["numbers"]["dlg"]["psnr"] for r in chosen}

    plain, knows = psnr(PLAIN), psnr(KNOWS)
    gain = paired_difference(knows, plain)
    if gain is None or gain.interval is None:
        return ""
    found = ", ".join(f"{knows[seed]:.0f}" for seed in sorted(knows) if seed in plain)
    return (
        f"\nAgainst MG the attacker who knows it comes to {found} dB, seed by seed: "
        f"{min(gain.values):.0f} to {max(gain.values):.0f} dB more than by matching the plain "
        f"gradient. The mean of the gain is {gain.stat.mean:.0f} dB, its 95 % interval, paired by "
        f"seed, [{gain.interval.low:.0f}, {gain.interval.high:.0f}]."
    )


def page(rows: list[dict[str, Any]]) -> str:
    out = [INTRODUCTION]

    def values(kind: str, setting: str, attack: str, key: str) -> list[float]:
        chosen = [r for r in rows if r["kind"] == kind and r["setting"] == setting]
        numbers = [r["numbers"].get(attack, {}).get(key) for r in chosen]
        return [value for value in numbers if value is not None]

    out += [
        "\n| what is seen | seeds | PSNR, dB | of other digits | recovered, % | labels right, % "
        "| AUC of the update |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in SETTINGS:
        psnr = values("inversion", name, "dlg", "psnr")
        if psnr:
            cells = [
                str(len(psnr)),
                spread(psnr),
                spread(values("inversion", name, "dlg", "psnr_of_others")),
                spread(values("inversion", name, "dlg", "recovered"), 100.0, 0),
                spread(values("inversion", name, "labels", "labels_right"), 100.0, 0),
                spread(values("inversion", name, "updates", "auc"), 1.0, 2),
            ]
            out.append(f"| {name} | " + " | ".join(cells) + " |")
    out += [
        of_mg(rows),
        MEMBERS,
        "| budget for each client | seeds | accuracy, % | AUC | told at 1 % |",
    ]
    out.append("| --- | ---: | ---: | ---: | ---: |")
    for name in MEMBERSHIP:
        auc = values("membership", name, "lira", "auc")
        chosen = [r for r in rows if r["kind"] == "membership" and r["setting"] == name]
        if auc:
            accuracy = spread([r["numbers"]["accuracy"] for r in chosen], 100.0)
            told = spread(values("membership", name, "lira", "tpr_at_1%"), 100.0)
            cells = [str(len(auc)), accuracy, spread(auc, 1.0, 2), told]
            out.append(f"| {name} | " + " | ".join(cells) + " |")
    digits = [r["numbers"] for r in rows if r["kind"] == "mnist"]
    if digits:
        psnr = [value for numbers in digits for value in numbers["psnr"]]
        out.append(
            f"\n## One MNIST digit\n\nDLG (two starts of at most 60 iterations) on one FedSGD "
            f"gradient of the LeNet with sigmoids at 28 x 28, {len(psnr)} clients of one digit "
            f"each: PSNR {min(psnr):.1f} to {max(psnr):.1f} dB."
        )
    return "\n".join(out) + "\n"


INTRODUCTION = """\
# What methods reveal

Written by `python benchmarks/audit.py --page`, from the rows that it made
(`benchmarks/results/audit.jsonl`). scikit-learn's digits (8 x 8), ten clients in a round, the
LeNet with sigmoids of Deep Leakage from Gradients, one local step on all of a client's examples
with rate 0.1, one example for each client unless a line says ten. Round 1 is attacked unless a line
says 9: FedGC's projection changes little before the clients' gradients disagree. DLG has one start
of at most 20 iterations of L-BFGS: an attacker with more time does better, so a low PSNR is no
proof of safety. Mean and sample standard deviation over the seeds; on lines of round 9 two clients
are attacked for each seed, and their mean counts once. *Of other digits* is the PSNR of test digits
in place of reconstructions: what an attacker has who saw nothing. Recovered: 20 dB or more. Where a
client has one example, the AUC is the share of the test digits of its class whose gradients are
less like the update than that example's, so it is coarse. Privacy budgets are for 20 rounds, delta
1e-3, clip 1. The number of seeds stands on each line; the script without `--page` goes on to
three."""

MEMBERS = """
## Who was trained on

Likelihood ratios (LiRA) on the released model: 300 digits at 10 clients, 10 rounds of 3 local
epochs, a network with 64 hidden units, clients counted equally, no hyper-parameter tuned. 8 runs on
halves of the examples, each the target once; the attacker knows the candidates. *Told at 1 %*:
share of the members that are told where 1 % of the others are taken for members.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results/audit.jsonl"))
    parser.add_argument("--page", type=Path, help="write the page and run nothing")
    parser.add_argument("--only", default="", help="only settings with this text in their name")
    parser.add_argument("--mnist", action="store_true", help="measure DLG on MNIST alone")
    options = parser.parse_args()
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    rows = [json.loads(line) for line in lines]
    if options.page is not None:
        options.page.write_text(page(rows), encoding="utf-8")
        return
    done = {(row["kind"], row["setting"], row["seed"]) for row in rows}
    torch.set_num_threads(1)
    wanted = [("mnist", "mnist", 0)] if options.mnist else list(jobs())
    for kind, name, seed in wanted:
        if (kind, name, seed) in done or options.only not in name:
            continue
        row = mnist(seed) if kind == "mnist" else KINDS[kind](name, seed)
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
