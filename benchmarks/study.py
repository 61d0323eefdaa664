"""What a study costs: python benchmarks/study.py [--only compare] [--out results.jsonl]

The digits demo (10 methods x 3 seeds), a search of 20 learning rates on it and one of 20 values of
FedProx's mu, each made by the command in a process of its own:

- `together`: as the command does it, with one process for each core, seeds, rates or numbers of a
  method side by side;
- `one by one`: `--jobs 1 -s engine.parallel_runs=1`, one run after the other, each with the engine
  that `auto` takes for it;
- `plain`: a loop of plain PyTorch in one process and one thread, FedAvg in place of every method;
- `pfl`: FedAvg by pfl-research in place of every method, in one process and one thread, where its
  environment is (`peers/make.sh`).

With --device cuda, recipes A, B2 and C100 of recipes.py on a GPU, in this process: one run, then
ten seeds side by side.

Prints seconds and their ratios, and appends them to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

PEERS = Path(__file__).resolve().parent / "peers"
RATES = 20
SEEDS = 10
GPU = {"A": 4.0, "B2": 2.0, "C100": 2.0}
"""Recipe -> how many times one run ten of them should take at most."""


def command(*words: str) -> dict[str, float]:
    """Run a command of fedkeel; return its wall and processor seconds."""
    return measured([sys.executable, "-m", "fedkeel", *words, "-q"])


def measured(words: list[str]) -> dict[str, float]:
    """Run a program; return its wall and processor seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - began, "processor": used}


def compare(*more: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        return command("compare", "--preset", "digits", "--out", f"{out}/c", *more)


def tune(*more: str) -> dict[str, float]:
    rates = [round(0.01 * 1.25**i, 4) for i in range(RATES)]
    return _search("fedavg", f'[tune.space]\n"local.lr" = {rates}', *more)


def tune_mu(*more: str) -> dict[str, float]:
    numbers = [round(0.001 * 1.5**i, 5) for i in range(RATES)]
    space = f'[tune.space]\n"local.lr" = [0.1]\n[tune.method.fedprox]\nmu = {numbers}'
    return _search("fedprox", space, *more)


def _search(method: str, space: str, *more: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        preset = Path(out) / "search.toml"
        preset.write_text(f"{_preset()}\n{space}\n")
        words = [str(preset), "--methods", method, "--out", f"{out}/t"]
        return command("tune", *words, *more)


def _preset() -> str:
    from importlib.resources import files

    return files("fedkeel.config").joinpath("presets/digits.toml").read_text()


def _demo() -> Any:
    """Return the settings and the ingredients of the demo."""
    from fedkeel.config import load
    from fedkeel.runner.ingredients import gather

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(_preset())
        file.flush()
        settings = load(Path(file.name))
    return settings, gather(settings)


def plain(runs: int, seeds: int) -> dict[str, float]:
    """Train FedAvg on the demo's data in a plain loop, with a test after each round."""
    import torch
    from torch import nn

    from fedkeel.base.values import only_tensor

    settings, ingredients = _demo()
    torch.set_num_threads(1)
    began, used = time.perf_counter(), time.process_time()
    for run in range(runs):
        torch.manual_seed(run)
        clients = ingredients.clients(run % seeds)
        x, y = only_tensor(clients.data.x, "data"), only_tensor(clients.data.y, "data")
        test_x, test_y = (
            only_tensor(ingredients.test.x, "test"),
            only_tensor(ingredients.test.y, "test"),
        )
        features = x[0].numel()
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, clients.data.classes)
        )
        params = list(model.parameters())
        optimiser, loss = torch.optim.SGD(params, lr=0.1), nn.CrossEntropyLoss()
        for _ in range(settings.rounds):
            start = [p.detach().clone() for p in params]
            total = [torch.zeros_like(p) for p in params]
            chosen, weight = torch.randperm(len(clients))[:5].tolist(), 0
            for k in chosen:
                rows = torch.from_numpy(clients.client(k))
                with torch.no_grad():
                    for p, s in zip(params, start, strict=True):
                        p.copy_(s)
                for _ in range(5):
                    for batch in torch.split(rows[torch.randperm(len(rows))], 20):
                        optimiser.zero_grad()
                        loss(model(x[batch]), y[batch]).backward()
                        optimiser.step()
                weight += len(rows)
                with torch.no_grad():
                    for t, p in zip(total, params, strict=True):
                        t.add_(p, alpha=len(rows))
            with torch.no_grad():
                for p, t in zip(params, total, strict=True):
                    p.copy_(t / weight)
                (model(test_x).argmax(1) == test_y).double().mean().item()
    return {"seconds": time.perf_counter() - began, "processor": time.process_time() - used}


def pfl(runs: int, seeds: int) -> dict[str, float]:
    """Train FedAvg on the demo's data by pfl, in a process of its own."""
    from fedkeel.base.values import only_tensor

    python = PEERS.parent / ".envs" / "pfl" / "bin" / "python"
    if not python.exists():
        return {}
    settings, ingredients = _demo()
    with tempfile.TemporaryDirectory() as folder:
        test_x, test_y = (only_tensor(v, "test") for v in (ingredients.test.x, ingredients.test.y))
        for seed in range(seeds):
            clients = ingredients.clients(seed)
            rows = [clients.client(k) for k in range(len(clients))]
            x, y = (only_tensor(v, "data") for v in (clients.data.x, clients.data.y))
            np.savez(
                Path(folder) / f"{seed}.npz",
                x=x.numpy()[np.concatenate(rows)],
                y=y.numpy()[np.concatenate(rows)],
                offsets=np.cumsum([0, *map(len, rows)]),
                test_x=test_x.numpy(),
                test_y=test_y.numpy(),
            )
        local = settings.local
        given = {
            "rounds": settings.rounds,
            "cohort": settings.cohort.clients,
            "epochs": local.epochs,
            "batch_size": local.batch_size,
            "lr": local.lr,
            "hidden": 64,
        }
        (Path(folder) / "settings.json").write_text(json.dumps(given))
        words = [str(python), str(PEERS / "study_pfl.py"), folder, "--runs", str(runs)]
        return measured(words)


ALONE = ("--jobs", "1", "-s", "engine.parallel_runs=1")

CASES: dict[str, dict[str, Callable[[], dict[str, float]]]] = {
    "compare": {
        "together": compare,
        "one by one": partial(compare, *ALONE),
        "plain": partial(plain, 30, 3),
        "pfl": partial(pfl, 30, 3),
    },
    "tune": {
        "together": tune,
        "one by one": partial(tune, *ALONE),
        "plain": partial(plain, RATES, 1),
    },
    "tune-mu": {
        "together": tune_mu,
        "one by one": partial(tune_mu, *ALONE),
        "plain": partial(plain, RATES, 1),
    },
}


def seeds_of(name: str, device: Literal["cpu", "cuda"], rounds: int | None) -> dict[str, Any]:
    """Train a recipe once, and with `SEEDS` seeds side by side, after a run that warms up."""
    sys.path.insert(0, str(Path(__file__).parent / "peers"))
    import recipes
    import run_fedkeel

    import fedkeel as fk

    recipe = recipes.RECIPES[name]
    arrays = recipes.load(recipe.data)
    simulation = fk.Simulation(
        task=run_fedkeel.task(recipe),
        clients=run_fedkeel.clients(arrays, recipe.data),
        test=run_fedkeel.dataset(arrays.test_x, arrays.test_y, recipe.data),
        rounds=rounds or recipe.rounds,
        local=fk.Local(lr=recipe.lr, epochs=recipe.epochs, batch_size=recipe.batch),
        clients_per_round=recipe.per_round,
        evaluation=fk.Evaluation(every=recipe.rounds),
        engine=fk.Engine(kind="vectorized", device=device, workers=1),
    )

    def timed(seeds: int) -> float:
        began = time.perf_counter()
        simulation.compare("fedavg", seeds=seeds, progress=False)
        return time.perf_counter() - began

    timed(1)
    one, ten = timed(1), timed(SEEDS)
    return {"case": f"{SEEDS} seeds of {name}", "one": one, "together": ten, "ratio": ten / one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*CASES, *GPU])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.device == "cuda":
        for name in GPU:
            if given.only in (None, name):
                rows.append(seeds_of(name, "cuda", None))
                print(json.dumps(rows[-1]), flush=True)
    for case, ways in CASES.items() if given.device == "cpu" else ():
        if given.only not in (None, case):
            continue
        for way, run in ways.items():
            if not (spent := run()):
                print(f"{case:8} {way:11} is not installed", flush=True)
                continue
            rows.append({"case": case, "way": way, **spent})
            print(f"{case:8} {way:11} {rows[-1]['seconds']:7.1f} s", end="")
            print(f", {rows[-1]['processor']:7.1f} s of the processor", flush=True)
    if given.out is not None:
        with given.out.open("a") as file:
            for row in rows:
                file.write(json.dumps({**row, "day": time.strftime("%Y-%m-%d")}) + "\n")


if __name__ == "__main__":
    main()
