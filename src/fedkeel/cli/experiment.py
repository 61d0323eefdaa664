"""Reading the experiment that a command was given, without torch: a mistake is told at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from fedkeel.base.feature import baselines
from fedkeel.cli.common import ExperimentSource
from fedkeel.config import ChosenWeights, Experiment, load
from fedkeel.config.code_names import IMPORT_PATH, names_to_trust
from fedkeel.errors import ConfigError, did_you_mean
from fedkeel.method.grammar import parse
from fedkeel.records.folder import RunFolder
from fedkeel.records.trust import check_trusted


def read_experiment(source: ExperimentSource, *more: str) -> Experiment:
    """Read the experiment that a command was given.

    Args:
        source: the experiment, and settings that are changed.
        more: more of these, as ``KEY=VALUE``.

    Raises:
        ConfigError: none was given, or two, or it cannot be read.
        RunError: it is a run folder that names code, was not made here, and is not trusted.
    """
    path, preset = source.path, source.preset
    if (path is None) == (preset is None):
        raise ConfigError(
            "Give an experiment file or a preset.",
            got="neither" if path is None else "both",
            expected="one of the two",
            do="fedkeel run EXPERIMENT.toml, or fedkeel run --preset digits",
        )
    if path is None:
        folder = files("fedkeel.config").joinpath("presets")
        names = [file.name for file in folder.iterdir() if file.name.endswith(".toml")]
        known = sorted(name.removesuffix(".toml") for name in names)
        if preset not in known:
            do = did_you_mean(str(preset), known)
            raise ConfigError(f"There is no preset {preset!r}.", do=do)
        path = Path(str(folder.joinpath(f"{preset}.toml")))
    if is_search(path):
        raise ConfigError(
            f"{path} holds a search, which has settings of its own for each method.",
            expected="an experiment file, or a run folder",
            do=f"give one of the files in {path / 'best'}; `fedkeel tune` ends with the commands "
            "that compare all of them",
        )
    changed = [*source.settings, *more]
    file = path / "config.toml" if os.path.isdir(path) else path
    experiment = load(file, changed)
    if os.path.isdir(path) or RunFolder(file.parent).holds(file):
        typed = {text.partition("=")[2].strip("'\" ") for text in changed}
        typed |= {name for text in changed for name in IMPORT_PATH.findall(text)}
        by_folder = {(key, name) for key, name in names_to_trust(experiment) if name not in typed}
        check_trusted(file.parent, by_folder, source.trust)
    return experiment


def is_search(folder: Path) -> bool:
    """Return whether a folder is one of `fedkeel tune`."""
    return os.path.isfile(folder / "tune.json")


def check_methods(expressions: Iterable[str], weights: ChosenWeights | None) -> None:
    """Refuse a method that cannot be composed, before data are read and torch is imported.

    Args:
        expressions: methods, or names of baselines.
        weights: the run's choice of client weights.

    Raises:
        CompositionError: an expression cannot be read, or its parts cannot be combined.
    """
    for expression in expressions:
        if expression not in baselines():
            parse(expression, weights=weights)
