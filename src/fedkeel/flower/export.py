"""A complete Flower app for an experiment: thin, for all it does is in the installed library."""

from __future__ import annotations

import importlib.util
import re
import shutil
from importlib.resources import files
from pathlib import Path
from string import Template

from fedkeel.config import Experiment, to_toml
from fedkeel.errors import RunError
from fedkeel.flower.own_data import away
from fedkeel.flower.server import refuse_secure_aggregation
from fedkeel.method.grammar import parse
from fedkeel.own import working_directory_first
from fedkeel.task.models import builder
from fedkeel.version import __version__

PACKAGE = "federation"
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
        RunError: the folder holds something, or cannot be written to.
    """
    parse(experiment.method, weights=experiment.weights)
    builder(experiment.model.name)
    away(experiment)
    refuse_secure_aggregation(experiment)
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
        left = [module for module in own_modules(experiment) if not _copied(module, out)]
        for name in ("pyproject.toml", "README.md"):
            filled = _template(name).substitute(_facts(experiment, left))
            (out / name).write_text(filled, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{out} cannot be written to.", got=error) from None
    return left


def own_modules(experiment: Experiment) -> list[str]:
    """Return the modules that the experiment names by import path."""
    words = f"{experiment.method} {experiment.model.name}"
    return sorted({found[1] for found in _OWN.finditer(words)})


def _copied(module: str, out: Path) -> bool:
    """Copy a module that is one file in the working directory into the app."""
    with working_directory_first():
        spec = importlib.util.find_spec(module.partition(".")[0])
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    if origin is None or origin.parent.resolve() != Path.cwd() or "." in module:
        return False
    shutil.copyfile(origin, out / origin.name)
    return True


def _template(name: str) -> Template:
    folder = files("fedkeel.flower").joinpath("template")
    return Template(folder.joinpath(f"{name}.txt").read_text(encoding="utf-8"))


def _facts(experiment: Experiment, left: list[str]) -> dict[str, str]:
    install = "".join(f"\nThe module `{m}` has to be installed there too.\n" for m in left)
    return {
        "project": re.sub(r"[^a-z0-9-]+", "-", experiment.name.lower()).strip("-") or "federation",
        "publisher": "fedkeel",
        "method": experiment.method.replace('"', "'"),
        "rounds": str(experiment.rounds),
        "version": __version__,
        "modules": install,
    }
