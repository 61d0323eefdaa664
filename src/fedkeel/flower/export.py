"""A complete Flower app for an experiment: thin, for all it does is in the installed library."""

from __future__ import annotations

import importlib.util
import re
import shutil
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from fedkeel.config import Experiment, to_toml
from fedkeel.errors import RunError
from fedkeel.flower.node.local_data import away
from fedkeel.flower.server.serve import refuse_secure_aggregation
from fedkeel.method.grammar import parse
from fedkeel.source_digest import imported
from fedkeel.task.models import builder
from fedkeel.user_code import working_directory_first
from fedkeel.version import __version__

PACKAGE = "federation"

NODES, LISTED = 3, 10
"""Nodes that the README is written for where any number can share the clients; nodes that it
registers one by one."""

OWN = """\
`partition-id` is the client's number, from 0 to {last}: each node has one of its own, which it
keeps for ever. `data` is a file or folder of the node, or a function, `data="my_module:load"`;
`name="..."` is what its scores are called."""

SHARED = """\
`partition-id` is the node's number, from 0 to {last}: each node has one of its own, which it keeps
for ever. The nodes share the clients of the experiment: node i of n, `num-partitions=n`, plays the
clients i, i + n, i + 2 n, ... . With another number of nodes, give all of them that number."""

ON_CPU = """

Nodes train on the processor: `engine.device = "cuda"` holds for simulations alone."""
_OWN = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")


def export(experiment: Experiment, out: Path) -> list[str]:
    """Write the app of an experiment.

    Args:
        experiment: what the federation runs.
        out: the folder, which must be empty or not exist.

    Returns:
        Modules of one's own that the app does not hold and that have to be installed everywhere.

    Raises:
        FedkeelError: there is no such method or model, or what is said of the data on the nodes
            does not fit together.
        RunError: the folder holds something, or cannot be written to; a module of one's own has the
            name of the app's package.
    """
    parse(experiment.method, weights=experiment.weights)
    builder(experiment.model.name)
    away(experiment)
    refuse_secure_aggregation(experiment)
    modules = own_modules(experiment)
    if PACKAGE in modules:
        raise RunError(
            f"The module {PACKAGE!r} has the name of the app's package, which would hide it.",
            do=f"call the file otherwise than {PACKAGE}.py",
        )
    try:
        if out.exists() and any(out.iterdir()):
            raise RunError(f"{out} is not empty.", do="choose another folder (--out)")
        package = out / PACKAGE
        package.mkdir(parents=True)
        text = '"""A federation of nodes."""\n'
        (package / "__init__.py").write_text(text, encoding="utf-8")
        (package / "experiment.toml").write_text(to_toml(experiment), encoding="utf-8")
        for name in ("server.py", "client.py"):
            (package / name).write_text(_template(name).template, encoding="utf-8")
        left = [module for module in modules if not _copied(module, out)]
        for name in ("pyproject.toml", "README.md"):
            filled = _template(name).substitute(_client_info(experiment, left))
            (out / name).write_text(filled, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{out} cannot be written to.", got=error) from None
    return left


def own_modules(experiment: Experiment) -> list[str]:
    """Return the modules that the experiment names by import path, and those they need.

    Those they need are what they import, and what that imports, of the working directory.
    """
    words = f"{experiment.method} {experiment.model.name}"
    found = sorted({one[1] for one in _OWN.finditer(words)})
    for module in found:  # which grows
        file = _file(module)
        names = imported(file) if file is not None else []
        needed = dict.fromkeys(name.partition(".")[0] for name in names)
        found += [name for name in needed if name not in found and _file(name) is not None]
    return found


def _file(module: str) -> Path | None:
    """Return the file of a module, or of its package, that lies in the working directory."""
    with working_directory_first():
        spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None or not spec.origin or not spec.has_location:  # built in, or no file at all
        return None
    file = Path(spec.origin).resolve()
    place = file.parent.parent if file.name == "__init__.py" else file.parent
    return file if place == Path.cwd() else None


def _copied(module: str, out: Path) -> bool:
    """Copy a module that is one file in the working directory into the app."""
    file = _file(module)
    if file is None or file.parent != Path.cwd() or "." in module:
        return False
    shutil.copyfile(file, out / file.name)
    return True


def _template(name: str) -> Template:
    folder = files("fedkeel.flower").joinpath("template")
    return Template(folder.joinpath(f"{name}.txt").read_text(encoding="utf-8"))


def _client_info(experiment: Experiment, left: list[str]) -> dict[str, str]:
    install = "".join(f"\nThe module `{m}` has to be installed there too.\n" for m in left)
    nodes = _nodes(experiment)
    return {
        "project": re.sub(r"[^a-z0-9-]+", "-", experiment.name.lower()).strip("-") or "federation",
        "publisher": "fedkeel",
        "method": experiment.method.replace('"', "'"),
        "rounds": str(experiment.rounds),
        "version": __version__,
        "flwr": ".".join(version("flwr").split(".")[:2]),
        "modules": install,
        "nodes": str(nodes),
        "register": _register(nodes),
        **_places(experiment, nodes),
        "device": ON_CPU if experiment.engine.device == "cuda" else "",
    }


def _nodes(experiment: Experiment) -> int:
    """Return for how many nodes the README is written: each client's, where it has its own data."""
    clients = experiment.partition.clients or NODES
    return clients if away(experiment) else min(clients, NODES)


def _register(nodes: int) -> str:
    """Return the commands that let nodes in, of many the first ones."""
    line = "    flwr supernode register keys/node-{}.pub federation\n"
    lines = [line.format(i) for i in range(nodes)]
    if nodes > LISTED:
        lines[LISTED:] = [f"\nand so on, up to `keys/node-{nodes - 1}.pub`.\n"]
    return "".join(lines)


def _places(experiment: Experiment, nodes: int) -> dict[str, str]:
    """Return a node's configuration, and what is said of its entries."""
    config = f'partition-id=0 num-partitions={nodes} state="~/.fedkeel/state"'
    if away(experiment):
        return {
            "config": f'{config} data="/path/to/file.csv"',
            "places": OWN.format(last=nodes - 1),
        }
    return {"config": config, "places": SHARED.format(last=nodes - 1)}
