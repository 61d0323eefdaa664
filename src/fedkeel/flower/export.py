"""Export of an experiment as a complete Flower app, which only calls the installed library."""

from __future__ import annotations

import re
import shutil
from fnmatch import fnmatch
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from fedkeel.base.fingerprint.source_digest import imported_modules
from fedkeel.base.named_code import VARIABLE, place_of
from fedkeel.base.named_files import writing
from fedkeel.config import Compare, Experiment, Space, to_toml
from fedkeel.config.code_names import HUBS, code_names
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.errors import RunError
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.flower.handout.places import Places
from fedkeel.method.grammar import parse
from fedkeel.runner.features import check_nodes
from fedkeel.task.models import builder
from fedkeel.version import __version__

PACKAGE = "federation"

DEFAULT_NODES = 3
"""Nodes that the README is written for where any number of nodes can share the clients."""

MAX_REGISTERED = 10
"""Nodes that the README registers one by one."""

LEFT_OUT = (
    *("test_*.py", "*_test.py"),
    *("build", "eggs", "lib", "lib64", "parts", "env", "venv", "ENV"),
)
"""Names of modules and packages that Flower leaves out of an app, whatever is in them."""

NOTE_OWN_DATA = """\
`partition-id` is the client's number, from 0 to {last}: each node has one of its own, which it
keeps for ever. `data` is a file or folder of the node, or a function, `data="my_module:load"`;
`name="..."` is what its scores are called."""

NOTE_SHARED_CLIENTS = """\
`partition-id` is the node's number, from 0 to {last}: each node has one of its own, which it keeps
for ever. The nodes share the clients of the experiment: node i of n, `num-partitions=n`, plays the
clients i, i + n, i + 2 n, ... . With another number of nodes, give all of them that number."""


def export(experiment: Experiment, out: Path, places: Places | None = None) -> list[str]:
    """Write the app of an experiment.

    Args:
        experiment: what the federation runs.
        out: the folder, which must be empty or not exist.
        places: addresses for the README, None for examples.

    Returns:
        The user's modules that the app does not hold and that have to be installed everywhere.

    Raises:
        FedkeelError: there is no such method or model, or the settings of data on the nodes do not
            fit together.
        RunError: the folder is not empty, or cannot be written to; or a module of the user has the
            name of the app's package.
    """
    parse(experiment.method, weights=experiment.weights)
    check_nodes(experiment)
    builder(experiment.model.name)
    is_on_nodes(experiment)
    modules = user_modules(experiment)
    if PACKAGE in modules:
        raise RunError(
            f"The module {PACKAGE!r} has the name of the app's package, which would hide it.",
            do=f"give the file another name than {PACKAGE}.py",
        )
    with writing(f"{out} cannot be written to."):
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
        for file in (file for files in modules.values() for file in files):
            copy = out / file.relative_to(Path.cwd())
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        not_copied = [module for module, files in modules.items() if not files]
        values = _template_values(experiment, not_copied, places or Places())
        for name in ("pyproject.toml", "README.md"):
            (out / name).write_text(_template(name).substitute(values), encoding="utf-8")
    return not_copied


def files_warning(experiment: Experiment) -> str | None:
    """Return a warning where every node would need the files of all clients, with what to change.

    None where the data stay on the nodes, or are no files of several clients.
    """
    data, partition = experiment.data, experiment.partition
    files = [name for name in data.sources if name not in SOURCES and not name.startswith(HUBS)]
    if is_on_nodes(experiment) or not files:
        return None
    if len(files) == 1 and partition.kind != "client":
        return None
    clients = partition.clients or (len(data.sources) if partition.kind == "source" else "N")
    changes = [
        'data.source = "nodes"',
        'partition.kind = "nodes"',
        f"partition.clients = {clients}",
    ]
    if data.target == "label" and not data.labels:
        changes.append('data.labels = ["no", "yes"], with your names of the labels')
    if unnamed := [name for name, known in data.categories_of.items() if not known]:
        changes.append(
            f'data.categories = {{{unnamed[0]} = ["a", "b"]}}, with your names, for each'
        )
    left_out = [f"data.{name}" for name in ("client", "test") if getattr(data, name) is not None]
    if partition.holdout:
        changes.append("data.test_fraction, the share that each node keeps aside for the test")
        left_out.append("partition.holdout")
    left_out += ["partition.stratify"] if partition.stratify else []
    if left_out:
        changes.append(f"and take out {', '.join(left_out)}")
    shown = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
    return (
        f"with this experiment, every node and the server need the files of all clients: {shown}. "
        "Where each node has only data of its own, change the experiment before the export: "
        f"{'; '.join(changes)}"
    )


def user_modules(experiment: Experiment) -> dict[str, list[Path]]:
    """Return the modules, or packages, that the experiment names, and those that they import.

    Returns:
        The files of each in the working directory; none of what lies elsewhere, or what Flower
        leaves out of an app: it has to be installed.
    """
    run = experiment.model_copy(update={"compare": Compare(), "tune": Space()})
    names = sorted({path.partition(".")[0].partition(":")[0] for _, path in code_names(run)})
    modules: dict[str, list[Path]] = {}
    for name in names:  # the list grows
        modules[name] = _files(name)
        imported = [module for file in modules[name] for module in imported_modules(file)]
        tops = dict.fromkeys(module.partition(".")[0] for module in imported)
        names += [top for top in tops if top not in names and _place(top) is not None]
    return modules


def _place(module: str) -> Path | None:
    """Return the file of a module, or the folder of a package, in the working directory."""
    file = Path(place_of(module).file)
    place = file.parent if file.name == "__init__.py" else file
    if place.parent != Path.cwd():
        return None
    holds_code = place.is_file() or any(place.rglob("*.py"))  # any folder can be a package
    return place if holds_code else None


def _files(module: str) -> list[Path]:
    """Return the files of a module, or of a package, that the app can hold."""
    place = _place(module)
    if place is None or any(fnmatch(place.name, pattern) for pattern in LEFT_OUT):
        return []
    if place.suffix == ".py":
        return [place]
    return sorted(file for file in place.rglob("*.py") if "__pycache__" not in file.parts)


def _template(name: str) -> Template:
    file = files("fedkeel.flower").joinpath("template", f"{name}.txt")
    return Template(file.read_text(encoding="utf-8"))


def node_count(experiment: Experiment) -> int:
    """Return the number of nodes of a federation, an example where any number can share clients."""
    clients = experiment.partition.clients or DEFAULT_NODES
    return clients if is_on_nodes(experiment) else min(clients, DEFAULT_NODES)


def _template_values(
    experiment: Experiment, not_copied: list[str], places: Places
) -> dict[str, str]:
    install = "".join(
        f"\nThe module `{m}` has to be installed there too. Where it is not in editable form, name "
        f"it there:\n\n    export {VARIABLE}={m}\n"
        for m in not_copied
    )
    has_own_data, nodes = is_on_nodes(experiment), node_count(experiment)
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
        "superlink": places.superlink,
        "host": places.host,
        "port": str(places.port),
        "loopback_port": str(places.loopback_port),
        "nodes": str(nodes),
        "register": _register_commands(nodes),
        "config": config,
        "partition_note": note.format(last=nodes - 1),
    }


def _register_commands(nodes: int) -> str:
    """Return the commands that register nodes; of many nodes, the first ones."""
    command = "    flwr supernode register keys/node-{}.pub federation\n"
    lines = [command.format(i) for i in range(min(nodes, MAX_REGISTERED))]
    if nodes > MAX_REGISTERED:
        lines.append(f"\nand so on, up to `keys/node-{nodes - 1}.pub`.\n")
    return "".join(lines)
