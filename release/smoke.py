"""Smoke tests of an installed fedkeel: run by `check.py` in an environment that has nothing else.

python smoke.py base
python smoke.py EXTRA
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import distribution, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

BIN = Path(sys.executable).parent


def command(*words: str) -> str:
    """Run the installed command, and return what it prints."""
    done = subprocess.run(
        [str(BIN / "fedkeel"), *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"fedkeel {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def base() -> None:
    """Data of a user become an experiment, a run, a report, predictions and a torch program."""
    import fedkeel

    assert find_spec("flwr") is None, "the base install brings Flower"
    assert "site-packages" in str(fedkeel.__file__), f"not the installed one: {fedkeel.__file__}"
    assert (Path(fedkeel.__file__).parent / "py.typed").is_file()
    assert command("--version").splitlines()[0] == distribution("fedkeel").version
    write_table()
    command("new", "try", "--data", "table.csv", "--label", "outcome", "--client", "site")
    score = json.loads(command("run", "try.toml", "--json", "-q", "-s", "rounds=5"))["last"]
    assert score > 0.6, score
    assert "<html" in Path("runs/try/report.html").read_text(encoding="utf-8")
    rows = list(csv.DictReader(command("predict", "runs/try", "table.csv").splitlines()))
    assert {row["prediction"] for row in rows} == {"low", "high"}
    command("export", "runs/try", "model.pt2")
    assert "FedGC" in command("methods", "fedgc")
    command("check", "--preset", "digits")
    assert len(json.loads(command("reproduce", "--json"))) > 10  # the papers' tables are in it


def write_table() -> None:
    """Write 90 examples of three sites: is the number above 44?"""
    lines = [f"{i % 3},{i},{'high' if i > 44 else 'low'}\n" for i in range(90)]
    Path("table.csv").write_text("site,x,outcome\n" + "".join(lines), encoding="utf-8")


def flower() -> None:
    """A federation of two nodes on this machine."""
    command("flower", "up", "--preset", "digits", "--nodes", "2", "-q", "-s", "rounds=1")


def hf() -> None:
    """Adapters of peft on a model of transformers, made from a configuration."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def metrics() -> None:
    """A metric of torchmetrics in a run."""
    import torchmetrics

    run(metrics=[torchmetrics.MeanAbsoluteError()], loss="mse")


def privacy() -> None:
    """Noise is calibrated for a budget."""
    budget = ("privacy.epsilon=8", "privacy.delta=1e-5", "weights=uniform", "rounds=1")
    command(
        "run", "--preset", "digits", "-q", *(word for value in budget for word in ("-s", value))
    )


def run(**task: object) -> None:
    """Train a linear model on nine numbers for one round."""
    import numpy as np
    from torch import nn

    import fedkeel as fk

    x = np.linspace(-1, 1, 9, dtype=np.float32)[:, None]
    fk.run(
        "fedavg",
        task=fk.Task(nn.Linear(1, 1), **task),  # type: ignore[arg-type]
        clients=fk.from_clients({"a": (x[:5], x[:5, 0]), "b": (x[5:], x[5:, 0])}),
        test=(x, x[:, 0]),
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1),
    )


def digits(*words: str) -> Callable[[], None]:
    """Return a test that makes a run of the digits."""
    return lambda: print(command(*words, "--preset", "digits", "-q", "-s", "rounds=1"))


def onnx() -> None:
    """A model is written as ONNX, and holds the names of its columns."""
    import onnx

    base_run()
    command("export", "runs/try", "model.onnx")
    names = [entry.key for entry in onnx.load("model.onnx").metadata_props]
    assert "columns" in names, names


def figures() -> None:
    """The figures of a paper."""
    base_run()
    command("report", "runs/try", "--figures", "figures")
    assert list(Path("figures").glob("*.svg"))


def base_run() -> None:
    """Make a run in runs/try."""
    write_table()
    command("new", "try", "--data", "table.csv", "--label", "outcome", "--client", "site")
    command("run", "try.toml", "-q", "-s", "rounds=1")


TESTS: dict[str, Callable[[], None]] = {
    "base": base,
    "figures": figures,
    "flower": flower,
    "hf": hf,
    "metrics": metrics,
    "onnx": onnx,
    "privacy": privacy,
    "ray": digits("run", "-s", "engine.kind=ray", "-s", "engine.workers=1"),
    "tune": digits("tune", "-s", "tune.sampler=tpe", "-s", "tune.trials=2"),
}


def imports(extra: str) -> None:
    """Import every package that an extra asks for."""
    wanted = {
        text.split(";")[0].split(">")[0].split("=")[0].split("[")[0].split("<")[0].strip().lower()
        for text in requires("fedkeel") or []
        if f'extra == "{extra}"' in text
    }
    for module, names in packages_distributions().items():
        if wanted & {name.lower() for name in names} and module.isidentifier():
            __import__(module)


if __name__ == "__main__":
    what = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        import os

        os.chdir(folder)
        if what != "base":
            imports(what)
        TESTS.get(what, lambda: None)()
        os.chdir("/")
    print(f"{what}: works")
