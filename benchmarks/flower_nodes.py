"""Two nodes beside plain Flower clients: python benchmarks/flower_nodes.py --device cuda

Each federation is a SuperLink and two SuperNodes in processes of this machine, with the same data,
model, optimiser, batches and number of local epochs, and FedAvg. The plain app trains by a plain
loop of PyTorch and is started by Flower's own program for each message, as any Flower app is. A
round is timed from one to the next line in a file that the server writes. The two run in turn,
several times over, and ratios are taken within one repetition. The first round of each is on its
own: there the libraries are loaded and steps are compiled.

Wall time: nothing else may work on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeel.config import load
from fedkeel.flower.export import export
from fedkeel.flower.local.federation import shared_configs
from fedkeel.flower.local.processes import FlowerProcesses

NODES, CLASSES = 2, 10


@dataclass(frozen=True)
class Network:
    """A network by its name in fedkeel, its arguments, and the learning rate."""

    name: str
    args: dict[str, int]
    lr: float


NETWORKS = {
    "resnet18_gn": Network("resnet18_gn", {}, 0.05),
    "transformer": Network("vit", {"depth": 4}, 0.01),
}

EXPERIMENT = """\
name = "nodes"
rounds = {rounds}
method = "fedavg"

[data]
source = {data}

[partition]
kind = "iid"
clients = {nodes}

[model]
name = "{model}"

[model.args]
{args}

[local]
lr = {lr}
epochs = {epochs}
batch_size = {batch}

[cohort]
clients = {nodes}

[evaluation]
every = {rounds}

[engine]
device = "{wish}"
kind = "auto"
precision = "{precision}"
checkpoint_seconds = 1e9

[flower]
deadline_seconds = 3600.0
poll_seconds = 0.05
"""

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "plain"
version = "1.0.0"
description = "FedAvg by a plain loop"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "plain.server:app"
clientapp = "plain.client:app"

[tool.flwr.app.config]
out = ""
"""

COMMON = """\
import json

from fedkeel.task.models import make

GIVEN = json.loads('''{given}''')


def make_model():
    import torch

    torch.manual_seed(0)
    return make(GIVEN["model"], (3, 32, 32), {classes}, GIVEN["args"])
"""

CLIENT = """\
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from plain.common import GIVEN, make_model

app = ClientApp()


@app.train()
def train(message, context):
    node, count = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    device = torch.device(GIVEN["device"])
    arrays = np.load(GIVEN["data"])
    x = torch.from_numpy(arrays["x"][node::count]).to(device)
    y = torch.from_numpy(arrays["y"][node::count]).to(device)
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.to(device).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=GIVEN["lr"])
    mixed = GIVEN["precision"] == "bf16-mixed"
    losses = []
    for _ in range(GIVEN["epochs"]):
        for rows in torch.randperm(len(y), device=device).split(GIVEN["batch"]):
            optimiser.zero_grad()
            with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext():
                output = model(x[rows])
            loss = F.cross_entropy(output.float(), y[rows])
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
    model.cpu()
    numbers = {"num-examples": len(y), "loss": float(torch.stack(losses).mean())}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(numbers)}
    return Message(RecordDict(content), reply_to=message)
"""

SERVER = """\
import time
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from plain.common import GIVEN, make_model

app = ServerApp()


@app.main()
def main(grid, context):
    class Timed(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            done = super().aggregate_train(server_round, replies)
            ok = [reply for reply in replies if reply.has_content()]
            with Path(GIVEN["lines"]).open("a") as lines:
                lines.write(f"{len(ok)}\\n")
            return done

    nodes = GIVEN["nodes"]
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.1)
    Path(GIVEN["lines"]).write_text("0\\n")
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=GIVEN["rounds"])
"""


class PlainProcesses(FlowerProcesses):
    """A federation whose messages are answered by Flower's own program."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process, without fedkeel's stand-in for that program."""
        before = super().environment
        folders = before["PATH"].split(os.pathsep)
        path = os.pathsep.join(item for item in folders if item != str(self._resident))
        return {**before, "PATH": path}


@dataclass(frozen=True)
class Setting:
    """What both federations do."""

    network: Network
    data: Path
    given: argparse.Namespace

    def values(self, folder: Path) -> dict[str, object]:
        """Return what the plain app reads."""
        return {
            "model": self.network.name,
            "args": self.network.args,
            "lr": self.network.lr,
            "data": str(self.data),
            "device": self.given.device,
            "precision": self.given.precision,
            "epochs": self.given.epochs,
            "batch": self.given.batch,
            "rounds": self.given.rounds,
            "nodes": NODES,
            "lines": str(folder / "rounds.txt"),
        }


def ours(setting: Setting, folder: Path) -> list[float]:
    """Return the seconds of each round of two nodes of fedkeel."""
    given = setting.given
    text = EXPERIMENT.format(
        rounds=given.rounds,
        data=json.dumps(str(setting.data)),
        nodes=NODES,
        model=setting.network.name,
        args="\n".join(f"{name} = {value}" for name, value in setting.network.args.items()),
        lr=setting.network.lr,
        epochs=given.epochs,
        batch=given.batch,
        wish="cuda" if given.device.startswith("cuda") else "auto",
        precision=given.precision,
    )
    (folder / "experiment.toml").write_text(text)
    app, out = folder / "app", folder / "run"
    export(load(folder / "experiment.toml"), app)
    hardware = f'device="{given.device}" engine="{given.engine}" state="{folder / "state"}"'
    nodes = [f"{config} {hardware}" for config in shared_configs(NODES)]
    with FlowerProcesses(folder / "processes", nodes) as federation:
        federation.submit(app, {"out": str(out)})
        return times(out / "rounds.jsonl", given.rounds, federation)


def plain(setting: Setting, folder: Path) -> list[float]:
    """Return the seconds of each round of two plain Flower clients."""
    app = folder / "app"
    (app / "plain").mkdir(parents=True)
    values = json.dumps(setting.values(folder))
    texts = {
        "pyproject.toml": PROJECT,
        "plain/__init__.py": "",
        "plain/common.py": COMMON.format(given=values, classes=CLASSES),
        "plain/client.py": CLIENT,
        "plain/server.py": SERVER,
    }
    for name, text in texts.items():
        (app / name).write_text(text)
    with PlainProcesses(folder / "processes", shared_configs(NODES)) as federation:
        federation.submit(app, {"out": ""})
        return times(folder / "rounds.txt", setting.given.rounds, federation)


def times(file: Path, rounds: int, federation: FlowerProcesses) -> list[float]:
    """Return the seconds from line to line of a file that a server writes: line 0 is the start."""
    seen: list[float] = []
    last_life = time.monotonic()
    while len(seen) <= rounds:
        lines = len(file.read_bytes().splitlines()) if file.exists() else 0
        seen += [time.monotonic()] * (lines - len(seen))
        if time.monotonic() - last_life > 10:
            last_life = time.monotonic()
            if not federation.is_alive("superlink") or len(federation.ended_nodes()) > 0:
                raise SystemExit(f"a process has ended: {federation.tail('superlink')}")
        time.sleep(0.01)
    return [after - before for before, after in itertools.pairwise(seen)]


def make_data(file: Path, examples: int) -> None:
    """Write images of random numbers, and classes."""
    random = np.random.default_rng(0)
    x = random.standard_normal((examples, 3, 32, 32), dtype=np.float32)
    np.savez(file, x=x, y=random.integers(0, CLASSES, size=examples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--engine", default="vectorized", choices=["auto", "sequential", "vectorized"]
    )
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16-mixed"])
    parser.add_argument("--examples", type=int, default=20_000, help="of both nodes together")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    found: dict[tuple[str, str], list[list[float]]] = {}
    ways: dict[str, Callable[[Setting, Path], list[float]]] = {"fedkeel": ours, "plain": plain}
    with tempfile.TemporaryDirectory(prefix="flower-nodes-") as temporary:
        root = Path(temporary)
        make_data(root / "data.npz", given.examples)
        for repeat in range(given.repeats):
            for name in given.networks.split(","):
                setting = Setting(NETWORKS[name], root / "data.npz", given)
                for way, measure in ways.items():
                    folder = root / f"{name}-{way}-{repeat}"
                    folder.mkdir()
                    seconds = measure(setting, folder)
                    found.setdefault((name, way), []).append(seconds)
                    text = " ".join(f"{second:.2f}" for second in seconds)
                    print(f"{name:12} {way:8} {text}", file=sys.stderr, flush=True)
    print(
        f"Two nodes, {given.examples} images, batch {given.batch}, {given.epochs} epochs, "
        f"{given.precision}, {given.device}; seconds of a round\n"
    )
    print(
        "| network | fedkeel | plain | plain / fedkeel | first rounds |\n|---|---:|---:|---:|---:|"
    )
    for name in given.networks.split(","):
        middles = {
            way: [statistics.median(seconds[1:] or seconds) for seconds in found[name, way]]
            for way in ways
        }
        ratios = [b / a for a, b in zip(middles["fedkeel"], middles["plain"], strict=True)]
        firsts = [statistics.median(seconds[0] for seconds in found[name, way]) for way in ways]
        print(
            f"| {name} | {statistics.median(middles['fedkeel']):.2f} "
            f"| {statistics.median(middles['plain']):.2f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {firsts[0]:.1f}, {firsts[1]:.1f} |"
        )


if __name__ == "__main__":
    main()
