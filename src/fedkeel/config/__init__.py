"""The settings of a run: frozen values, read from TOML and written back to it.

An unknown key, a wrong type or a value out of range is refused with the key's full name, what was
given and what is accepted. What a run used is written resolved into its folder, so that running
that file again repeats the run.
"""

from typing import TYPE_CHECKING

from fedkeel.base.error_messages import meant, paths
from fedkeel.base.feature import declared_tables
from fedkeel.base.settings import Settings
from fedkeel.config.audit import Audit
from fedkeel.config.data import Data, Partition, Text
from fedkeel.config.flower import Flower
from fedkeel.config.local import Local, Schedule
from fedkeel.config.search_space import Choices, Metric, Range, Space, Value
from fedkeel.config.settings import (
    Buffers,
    ChosenWeights,
    Cohort,
    Compare,
    Engine,
    Evaluation,
    Experiment,
    Lora,
    Model,
    OtherModel,
    Precision,
    Run,
    Weights,
)
from fedkeel.config.task import TaskSettings
from fedkeel.config.toml import UNSET, build, load, override, to_toml

__all__ = [
    "UNSET",
    "Audit",
    "Buffers",
    "Choices",
    "ChosenWeights",
    "Cohort",
    "Compare",
    "Data",
    "Engine",
    "Evaluation",
    "Experiment",
    "Flower",
    "Local",
    "Lora",
    "Metric",
    "Model",
    "OtherModel",
    "Partition",
    "Precision",
    "Range",
    "Run",
    "Schedule",
    "Settings",
    "Space",
    "TaskSettings",
    "Text",
    "Value",
    "Weights",
    "build",
    "load",
    "meant",
    "override",
    "paths",
    "to_toml",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return the settings of a feature by the name of their class, such as `Privacy`."""
        for kind in declared_tables().values():
            if kind.settings_class.__name__ == name:
                return kind.settings_class
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
