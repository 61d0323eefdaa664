"""Settings of a stranger, in an experiment file and as a server sends them to a node."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import tempfile
import tomllib
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from flwr.app import Context, Message, RecordDict
from pydantic import BaseModel
from trial import Ended, arguments, attempt, command_ended, tally
from values import NUMBERS, OTHERS, damage

from commands import EXPERIMENT, call
from fedkeel import config
from fedkeel.flower.apps import client_app
from fedkeel.flower.wire import HEADER, Header
from in_process_grid import InProcessGrid

MARKER = "marker"
INTERRUPT_SECONDS = 4.0
"""Processor seconds after which a run is asked to end, as Ctrl-C does."""

TABLE = """\
name = "table"
rounds = 2
method = "fedprox(mu=0.1)"

[data]
source = ["a.csv", "b.csv"]
label = "kind"
test_fraction = 0.2

[partition]
kind = "source"

[model]
name = "mlp"

[local]
lr = 0.05
epochs = 1
batch_size = 8

[engine]
kind = "sequential"
"""

OWN_MODULE = '''\
"""A module of the user's, which imports what nobody may name."""
import os
import subprocess
from os import system

import torch
from torch import nn

run = subprocess.run
handy = system


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(6, width)

    def forward(self, x):
        return self.layer(x)
'''

NAMES_OF_CODE = (
    "os:system", "subprocess:run", "subprocess:check_output", "subprocess:Popen", "builtins:exec",
    "builtins:eval", "builtins:__import__", "posix:system", "pty:spawn", "shutil:copy",
    "own:system", "own:run", "own:handy", "own:os", "own:subprocess", "own:torch", "pathlib:Path",
    "timeit:timeit",
    "code:InteractiveInterpreter", "runpy:run_path", "importlib:import_module", "torch:load",
    "torch.hub:load", "torch.utils.collect_env:run", "numpy:load", "fedkeel.cli:main", "pdb:run",
    "commands:call", "commands:shell", "cProfile:run", "own:Net.__init__", "own.Net:forward",
    "torch.serialization:load", "pydoc:pipepager", "doctest:debug_script", "nn:os", "own :system",
    "OS:system", "os.path:os", "own:__builtins__", "own:__loader__", "webbrowser:open",
)  # fmt: skip

CODE_KEYS = (
    "model.name", "task.loss", "task.metrics", "task.score", "data.augment", "method",
    "task.metric",
    "local.optimiser", "data.source", "data.train", "plugins", "callbacks", "track.kind",
    "model.weights",
    "data.prepare", "diagnose.kinds", "partition.kind", "privacy.key_file",
    "system.trace", "data.name",
)  # fmt: skip

METHODS = ("scaffold", "fedgc", "dpclient(norm=1.0, sigma=1.0)", "trimmed_mean", "fedper", "local")


def write_data(folder: Path) -> None:
    """Write what the experiments read."""
    draw = np.random.default_rng(0)
    y = draw.integers(0, 4, size=200)
    x = (draw.normal(size=(4, 6))[y] * 2 + draw.normal(size=(200, 6))).astype(np.float32)
    np.savez(folder / "toy.npz", x=x, y=y)
    for name in ("a", "b"):
        rows = [
            ",".join([*(f"{v:.4f}" for v in draw.normal(size=3)), "yn"[i % 2]]) for i in range(40)
        ]
        (folder / f"{name}.csv").write_text("\n".join(["u,v,w,kind", *rows]) + "\n")
    (folder / "own.py").write_text(OWN_MODULE)


@cache
def fields() -> tuple[str, ...]:
    """The dotted names of all settings."""

    def below(kind: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in kind.model_fields.items():
            yield prefix + name
            for one in _models(field.annotation):
                yield from below(one, f"{prefix}{name}.")

    return tuple(sorted(set(below(config.Experiment, ""))))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [one for part in typing.get_args(annotation) for one in _models(part)]


def base(draw: random.Random) -> dict[str, Any]:
    """Return an experiment that works."""
    document = tomllib.loads(draw.choice([EXPERIMENT, EXPERIMENT, TABLE]))
    document["rounds"] = 2
    if draw.random() < 0.3:
        document["method"] = draw.choice(METHODS)
    return document


def put(document: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its dotted name."""
    *tables, last = key.split(".")
    for table in tables:
        inner = document.setdefault(table, {})
        if not isinstance(inner, dict):
            return
        document = inner
    document[last] = value


def strange(document: dict[str, Any], marker: Path, draw: random.Random) -> str:
    """Change an experiment; return what was done in words."""
    way = draw.random()
    if way < 0.35:
        name, key = draw.choice(NAMES_OF_CODE), draw.choice(CODE_KEYS)
        command = f"touch {marker}"
        arguments = draw.choice(
            [{"command": command}, {"args": ["touch", str(marker)]}, {"cmd": command},
             {"source": f"open({str(marker)!r}, 'w')"}, {"width": 3}, {}]
        )  # fmt: skip
        if key == "method":
            inner = ", ".join(f"{k}={v!r}" for k, v in arguments.items() if k != "args")
            name = f"{name}({inner})" if draw.random() < 0.7 else name
        put(document, key, [name] if key in ("task.metrics", "plugins", "callbacks") else name)
        if key == "model.name":
            document["model"]["args"] = arguments
        return f"{key} = {name} {sorted(arguments)}"
    if way < 0.75:
        key, value = draw.choice(fields()), draw.choice((*NUMBERS, *OTHERS))
        put(document, key, value)
        return f"{key} = {value!r:.40}"
    return damage(document, draw)


def writable(value: Any) -> Any:
    """Return a document as TOML can hold it."""
    if isinstance(value, dict):
        return {str(k): writable(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [writable(v) for v in value if v is not None]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        return 10**300
    return value


def one(number: int, seed: int, marker: Path) -> Ended:
    """Make one trial."""
    draw = random.Random(f"{seed} {number}")
    document = base(draw)
    before = copy.deepcopy(document)
    said = strange(document, marker, draw)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        here = Path(folder)
        write_data(here)
        way = draw.choice(["check", "check", "run", "node", "node"])
        if way == "node":
            ended = on_node(here, before, document)
        else:
            file = here / "toy.toml"
            file.write_text(tomli_w.dumps(writable(document)), errors="surrogatepass")
            ended = by_command(way, file)
    return Ended(ended.how, f"{way}: {said}\n{ended.detail}")


def by_command(way: str, file: Path) -> Ended:
    """Check or run an experiment file, as a reader of it would."""
    signal.signal(signal.SIGVTALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_VIRTUAL, INTERRUPT_SECONDS)
    words = ["--quiet"] if way == "run" else []
    done = call(way, file, *words)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return command_ended(done.code, done.out, done.err) or Ended("the same", done.out[-300:])


def on_node(here: Path, installed: dict[str, Any], sent: dict[str, Any]) -> Ended:
    """Let a server send the changed settings to a node that has the app as it was."""
    (here / "app").mkdir()
    file = here / "app" / "experiment.toml"
    file.write_text(tomli_w.dumps(writable(installed)))
    InProcessGrid({})  # gives this process an identity
    words = ";".join(
        f"{key}={as_word(value)}" for key, value in flat(writable(sent)) if ";" not in str(value)
    )
    hello = RecordDict({HEADER: Header().record()})
    context = Context(
        1,
        1,
        {"partition-id": 0, "num-partitions": 2, "state": str(here / "state")},
        RecordDict(),
        {"settings": words},
    )
    reply = client_app(file)(Message(hello, 1, "query.describe", ttl=60.0), context)
    if not reply.has_error():
        return Ended("the same", "the node answered")
    log = here / "state" / "node.log"
    text = log.read_text() if log.exists() else ""
    if "Traceback" in text:
        return Ended("traceback", text[-3000:])
    return Ended("refused in words", reply.error.reason)


def flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting."""
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def as_word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip().replace("\n", "")


def main() -> int:
    """Make all trials."""
    options = arguments(500)
    torch.set_num_threads(1)
    sys.setrecursionlimit(3000)

    def trials() -> Iterator[tuple[int, str, Ended]]:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(options.first, options.first + options.trials):
                marker = Path(folder) / MARKER
                ended = attempt(lambda n=number, m=marker: one(n, options.seed, m), marker)
                yield number, ended.detail.split("\n")[0], ended

    return tally("settings", options, trials()).show()


if __name__ == "__main__":
    sys.exit(main())
