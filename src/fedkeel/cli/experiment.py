"""Reading the experiment that a command was given."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from fedkeel.config import Experiment, load
from fedkeel.config.code_names import IMPORT_PATH, names_to_trust
from fedkeel.errors import ConfigError, did_you_mean
from fedkeel.records.folder import RunFolder
from fedkeel.trust import check_trusted


def read_experiment(
    path: Path | None,
    preset: str | None,
    overrides: list[str] | None,
    diagnose: str | None = None,
    trust: bool = False,
) -> Experiment:
    """Read the experiment that a command was given.

    Args:
        path: experiment file or run folder.
        preset: name of an experiment that comes with fedkeel, in place of a path.
        overrides: settings that are changed, as ``KEY=VALUE``.
        diagnose: kinds of diagnostics, in place of those in the file.
        trust: whether code may be imported that a run folder names which was not made here.

    Raises:
        ConfigError: none was given, or two, or it cannot be read.
        RunError: it is a run folder that names code, was not made here, and is not trusted.
    """
    if (path is None) == (preset is None):
        raise ConfigError(
            "Give an experiment file or a preset.",
            got="neither" if path is None else "both",
            expected="one of the two",
            do="fedkeel run EXPERIMENT.toml, or fedkeel run --preset digits",
        )
    if path is None:
        folder = files("fedkeel").joinpath("presets")
        names = [file.name for file in folder.iterdir() if file.name.endswith(".toml")]
        known = sorted(name.removesuffix(".toml") for name in names)
        if preset not in known:
            do = did_you_mean(str(preset), known)
            raise ConfigError(f"There is no preset {preset!r}.", do=do)
        path = Path(str(folder.joinpath(f"{preset}.toml")))
    changed = [*(overrides or ()), *([f"diagnose.kinds={diagnose}"] if diagnose else [])]
    file = path / "config.toml" if os.path.isdir(path) else path
    experiment = load(file, changed)
    if os.path.isdir(path) or RunFolder(file.parent).holds(file):
        typed = {text.partition("=")[2].strip("'\" ") for text in changed}
        typed |= {name for text in changed for name in IMPORT_PATH.findall(text)}
        by_folder = {(key, name) for key, name in names_to_trust(experiment) if name not in typed}
        check_trusted(file.parent, by_folder, trust)
    return experiment
