"""Export of an experiment as a complete Flower app, which only calls the installed library."""

from __future__ import annotations

import importlib.util
import re
import shutil
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from fedkeel.config import Compare, Experiment, Space, to_toml
from fedkeel.config.code_names import code_names
from fedkeel.errors import RunError
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.method.grammar import parse
from fedkeel.named_code import VARIABLE
from fedkeel.secure.legality import refuse_single_updates
from fedkeel.source_digest import imported_modules
from fedkeel.system import legality
from fedkeel.task.models import builder
from fedkeel.user_code import working_directory_first
from fedkeel.version import __version__

PACKAGE = "federation"

DEFAULT_NODES = 3
"""Nodes that the README is written for where any number of nodes can share the clients."""

MAX_REGISTERED = 10
"""Nodes that the README registers one by one."""

NOTE_OWN_DATA = """\
`partition-id` is the client's number, from 0 to {last}: each node has one of its own, which it
keeps for ever. `data` is a file or folder of the node, or a function, `data="my_module:load"`;
`name="..."` is what its scores are called."""

NOTE_SHARED_CLIENTS = """\
`partition-id` is the node's number, from 0 to {last}: each node has one of its own, which it keeps
for ever. The nodes share the clients of the experiment: node i of n, `num-partitions=n`, plays the
clients i, i + n, i + 2 n, ... . With another number of nodes, give all of them that number."""

NOTE_DEVICE = """

Nodes train on the processor: `engine.device = "cuda"` holds for simulations alone."""


def export(experiment: Experiment, out: Path) -> list[str]:
    """Write the app of an experiment.

    Args:
        experiment: what the federation runs.
        out: the folder, which must be empty or not exist.

    Returns:
        The user's modules that the app does not hold and that have to be installed everywhere.

    Raises:
        FedkeelError: there is no such method or model, or the settings of data on the nodes do not
            fit together.
        RunError: the folder is not empty, or cannot be written to; or a module of the user has the
            name of the app's package.
    """
    plan = parse(experiment.method, weights=experiment.weights)
    legality.refuse_on_nodes(experiment)
    if experiment.flower.secure_aggregation:
        refuse_single_updates(plan)
    builder(experiment.model.name)
    is_on_nodes(experiment)
    modules = user_modules(experiment)
    if PACKAGE in modules:
        raise RunError(
            f"The module {PACKAGE!r} has the name of the app's package, which would hide it.",
            do=f"give the file another name than {PACKAGE}.py",
        )
    try:
        if out.exists() and any(out.iterdir()):
            raise RunError(f"{out} is not empty.", do="choose another folder (--out)")
        package = out / PACKAGE
        package.mkdir(parents=True)
        texts = {
            "__init__.py": '"""A federation of nodes."""\n',
            "experiment.toml": to_toml(experiment),
            "server.py": _template("server.py").template,
            "client.py": _template("client.py").template,
        }
        for name, text in texts.items():
            (package / name).write_text(text, encoding="utf-8")
        not_copied = [module for module in modules if not _copy(module, out)]
        values = _template_values(experiment, not_copied)
        for name in ("pyproject.toml", "README.md"):
            (out / name).write_text(_template(name).substitute(values), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{out} cannot be written to.", got=error) from None
    return not_copied


def user_modules(experiment: Experiment) -> list[str]:
    """Return the modules that the experiment names by import path, and those that they need.

    A module needs what it imports from the working directory, and what that imports.
    """
    run = experiment.model_copy(update={"compare": Compare(), "tune": Space()})
    modules = sorted({path.partition(":")[0] for _, path in code_names(run)})
    for module in modules:  # the list grows
        file = _file(module)
        names = imported_modules(file) if file is not None else []
        packages = dict.fromkeys(name.partition(".")[0] for name in names)
        modules += [p for p in packages if p not in modules and _file(p) is not None]
    return modules


def _file(module: str) -> Path | None:
    """Return the file of a module, or of its package, in the working directory."""
    with working_directory_first():
        spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None or not spec.origin or not spec.has_location:  # built in, or without a file
        return None
    file = Path(spec.origin).resolve()
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    return file if folder == Path.cwd() else None


def _copy(module: str, out: Path) -> bool:
    """Copy a module into the app, and return whether it could be: it has to be a single file."""
    file = _file(module)
    if file is None or file.parent != Path.cwd() or "." in module:
        return False
    shutil.copyfile(file, out / file.name)
    return True


def _template(name: str) -> Template:
    file = files("fedkeel.flower").joinpath("template", f"{name}.txt")
    return Template(file.read_text(encoding="utf-8"))


def _template_values(experiment: Experiment, not_copied: list[str]) -> dict[str, str]:
    install = "".join(
        f"\nThe module `{m}` has to be installed there too. Where it is not in editable form, name "
        f"it there:\n\n    export {VARIABLE}={m.partition('.')[0]}\n"
        for m in not_copied
    )
    has_own_data = is_on_nodes(experiment)
    clients = experiment.partition.clients or DEFAULT_NODES
    nodes = clients if has_own_data else min(clients, DEFAULT_NODES)
    config = f'partition-id=0 num-partitions={nodes} state="~/.fedkeel/state"'
    note = NOTE_SHARED_CLIENTS
    if has_own_data:
        config += ' data="/path/to/file.csv"'
        note = NOTE_OWN_DATA
    return {
        "project": re.sub(r"[^a-z0-9-]+", "-", experiment.name.lower()).strip("-") or "federation",
        "publisher": "fedkeel",
        "method": experiment.method.replace('"', "'"),
        "rounds": str(experiment.rounds),
        "version": __version__,
        "flwr": ".".join(version("flwr").split(".")[:2]),
        "modules": install,
        "nodes": str(nodes),
        "register": _register_commands(nodes),
        "config": config,
        "partition_note": note.format(last=nodes - 1),
        "device": NOTE_DEVICE if experiment.engine.device == "cuda" else "",
    }


def _register_commands(nodes: int) -> str:
    """Return the commands that register nodes; of many nodes, the first ones."""
    command = "    flwr supernode register keys/node-{}.pub federation\n"
    lines = [command.format(i) for i in range(min(nodes, MAX_REGISTERED))]
    if nodes > MAX_REGISTERED:
        lines.append(f"\nand so on, up to `keys/node-{nodes - 1}.pub`.\n")
    return "".join(lines)
