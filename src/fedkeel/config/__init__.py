"""The settings of a run: frozen values, read from TOML and written back to it.

An unknown key, a wrong type or a value out of range is refused with the key's full name, what was
given and what is accepted. What a run used is written resolved into its folder, so that running
that file again repeats the run.
"""

from fedkeel.config.settings import (
    Buffers,
    Cohort,
    Compare,
    Data,
    Engine,
    Evaluation,
    Experiment,
    Flower,
    Local,
    Model,
    Partition,
    Run,
    Schedule,
    Settings,
    Weights,
)
from fedkeel.config.toml import build, load, override, to_toml

__all__ = [
    "Buffers",
    "Cohort",
    "Compare",
    "Data",
    "Engine",
    "Evaluation",
    "Experiment",
    "Flower",
    "Local",
    "Model",
    "Partition",
    "Run",
    "Schedule",
    "Settings",
    "Weights",
    "build",
    "load",
    "override",
    "to_toml",
]
