"""Digests of final parameters and of round records, to compare two versions of the source.

A change that moves code and no number leaves each digest as it was, on one machine:

    python benchmarks/digests.py > before.txt     # in the version before
    python benchmarks/digests.py > after.txt      # in the version after
    diff before.txt after.txt

Each line is the name of a run, the digest of its final parameters and buffers, and that of its
rows without times. An argument takes only runs whose names contain it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from fedkeel import config
from fedkeel.errors import FedkeelError
from fedkeel.method.parts.index import METHODS
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start

PRESET = [
    "fedavg",
    "fedprox",
    "scaffold",
    "fednova",
    "momentum",
    "fedgc",
    "gcfed",
    "fedgh",
    "gradma",
    "fedreg",
]
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"kind": "sequential"},
    "workers": {"kind": "workers", "workers": 2},
    "vectorized": {"kind": "vectorized"},
    "float64": {"kind": "sequential", "dtype": "float64"},
}
PAIRS = "scaffold+gcfed fedprox+fedgh momentum+fedgc fednova+gradma.s fedper+gcfed ditto+fedgh"
FEATURES: dict[str, dict[str, Any]] = {
    "budget of clients": {
        "privacy": {"epsilon": 8.0, "delta": 1e-3, "clip": 0.5},
        "weights": "uniform",
    },
    "adaptive budget": {
        "privacy": {"epsilon": 20.0, "delta": 1e-3, "quantile": 0.5},
        "weights": "uniform",
    },
    "budget of examples": {
        "privacy": {"epsilon": 50.0, "delta": 1e-3, "unit": "example"},
        "local": {"lr": 0.1, "steps": 3, "sampling": "poisson", "batch_size": 20},
    },
    "budget overrun": {
        "privacy": {"epsilon": 12.0, "delta": 1e-3},
        "weights": "uniform",
        "method": "dpclient(sigma=0.8)",
        "rounds": 12,
    },
    "sign flips": {"adversary": {"kind": "sign_flip", "share": 0.2}, "method": "median"},
    "wrong labels": {"adversary": {"kind": "label_flip", "share": 0.2}},
    "secure sums": {"flower": {"secure_aggregation": True}},
    "virtual time": {"system": {"speed": "lognormal", "mbit_up": 1.0, "enough": 0.8}},
    "fedbuff": {"system": {"speed": "lognormal"}, "method": "fedbuff"},
    "fedbuff without time": {"method": "fedbuff"},
    "fedasync": {"system": {"speed": "lognormal"}, "method": "fedasync"},
    "power of choice": {"cohort": {"clients": 5, "sampling": "power_of_choice"}},
    "oort": {"cohort": {"clients": 5, "sampling": "oort"}},
    "fedper": {"method": "fedper"},
    "ditto": {"method": "ditto", "evaluation": {"model": "personal"}},
    "local": {"method": "local"},
    "centralised": {"method": "centralised"},
    "diagnostics": {"diagnose": {"kinds": ["drift", "conflict", "forgetting"], "every": 2}},
    "tensorboard": {"track": {"to": ["tensorboard"]}},
    "patience": {"stop": {"patience": 2}, "rounds": 12},
    "target": {"stop": {"target": 0.5}, "rounds": 12},
    "scores of clients": {"evaluation": {"clients_every": 2}},
    "holdout": {"partition": {"holdout": 0.2}, "evaluation": {"clients_every": 2}},
    "dropout": {"cohort": {"clients": 5, "dropout": 0.3}},
}
TIMES = ("seconds", "processor_seconds")


def main() -> None:
    """Print the digest of each run."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    warnings.simplefilter("ignore")
    for name, settings in runs():
        if wanted in name:
            print(f"{name:60} {digest(settings)}", flush=True)


def runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names of runs, and what their settings have beside those of the preset."""
    for method in PRESET:
        for engine in ("sequential", "workers", "vectorized"):
            yield (
                f"preset {method} {engine}",
                {"method": method, "engine": ENGINES[engine]},
            )
    expressions = [*METHODS, *PAIRS.split()]
    for expression in expressions:
        for engine, values in ENGINES.items():
            yield (
                f"expression {expression} {engine}",
                {"method": expression, "engine": values, "rounds": 3},
            )
    for name, values in FEATURES.items():
        yield f"feature {name}", {"rounds": 6, **values}


def digest(values: dict[str, Any]) -> str:
    """Return the digests of a run in a folder of its own, or why it is refused."""
    file = files("fedkeel.config").joinpath("presets", "digits.toml")
    preset = config.load(str(file)).model_dump(mode="json", exclude_unset=True)
    merged = {**preset, **values}
    for name in ("partition", "evaluation"):
        merged[name] = {**preset[name], **values.get(name, {})}
    with tempfile.TemporaryDirectory() as folder:
        try:
            experiment = config.build(config.Experiment, merged, "run")
            result = start(prepare(experiment, gather(experiment)), Path(folder) / "run")
        except FedkeelError as error:
            return f"refused: {error.what}"
        rows = [json.loads(row.line()) for row in result.rows]
    for row in rows:
        for name in TIMES:
            row.pop(name, None)
    params = hashlib.blake2b(digest_size=6)
    for name, tensor in sorted({**result.params, **result.buffers}.items()):
        params.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    text = hashlib.blake2b(json.dumps(rows, sort_keys=True).encode(), digest_size=6)
    return f"{params.hexdigest()} {text.hexdigest()} {result.record.status}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
