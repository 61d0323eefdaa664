"""Federated learning on non-IID data: every drift and forgetting correction as a part.

A name is loaded when it is first used: torch takes seconds, and `fedkeel --help` does not need it.
"""

import os
import sys
from typing import TYPE_CHECKING

from fedkeel.base.lazy import loaded_when_used
from fedkeel.version import __version__ as __version__

# both are read once, with torch or its first tensor
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages: see engine/process/malloc.py
if "torch" not in sys.modules:  # otherwise see engine/process/idle_threads.py
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # threads sleep when idle for 0.3 ms, not 8

if TYPE_CHECKING:
    from fedkeel.config import Audit as Audit
    from fedkeel.config import Cohort as Cohort
    from fedkeel.config import Engine as Engine
    from fedkeel.config import Evaluation as Evaluation
    from fedkeel.config import Local as Local
    from fedkeel.config import Range as Range
    from fedkeel.config import Schedule as Schedule
    from fedkeel.config import Space as Space
    from fedkeel.data.dataset import Dataset as Dataset
    from fedkeel.data.federation import Federation as Federation
    from fedkeel.data.federation import federation as federation
    from fedkeel.data.partition.from_arrays import by_classes as by_classes
    from fedkeel.data.partition.from_arrays import by_client as by_client
    from fedkeel.data.partition.from_arrays import dirichlet as dirichlet
    from fedkeel.data.partition.from_arrays import from_clients as from_clients
    from fedkeel.data.partition.from_arrays import iid as iid
    from fedkeel.data.partition.from_hugging_face import from_hf as from_hf
    from fedkeel.data.read.user_data import dataset as dataset
    from fedkeel.errors import FedkeelError as FedkeelError
    from fedkeel.features.attackers.settings import Adversary as Adversary
    from fedkeel.features.budget.settings import Privacy as Privacy
    from fedkeel.features.diagnose.settings import Diagnose as Diagnose
    from fedkeel.features.own_training.training import LocalTraining as LocalTraining
    from fedkeel.features.root.settings import Root as Root
    from fedkeel.features.stop.settings import Stop as Stop
    from fedkeel.features.time.settings import System as System
    from fedkeel.features.track.settings import Track as Track
    from fedkeel.method.docs.cite import cite as cite
    from fedkeel.method.grammar import parse as parse
    from fedkeel.runner.callbacks import Callback as Callback
    from fedkeel.study.api import audit as audit
    from fedkeel.study.api import compare as compare
    from fedkeel.study.api import doctor as doctor
    from fedkeel.study.api import run as run
    from fedkeel.study.simulation import Simulation as Simulation
    from fedkeel.task.client_network import ClientNetwork as ClientNetwork
    from fedkeel.task.metrics.registry import metric as metric
    from fedkeel.task.models.norm import replace_batch_norm as replace_batch_norm
    from fedkeel.task.predict.trained_model import load as load
    from fedkeel.task.task import Task as Task

_HOMES = {
    "fedkeel.config": (
        "Audit",
        "Cohort",
        "Engine",
        "Evaluation",
        "Local",
        "Range",
        "Schedule",
        "Space",
    ),
    "fedkeel.data.dataset": ("Dataset",),
    "fedkeel.data.federation": ("Federation", "federation"),
    "fedkeel.data.partition.from_arrays": (
        "by_classes",
        "by_client",
        "dirichlet",
        "from_clients",
        "iid",
    ),
    "fedkeel.data.partition.from_hugging_face": ("from_hf",),
    "fedkeel.data.read.user_data": ("dataset",),
    "fedkeel.errors": ("FedkeelError",),
    "fedkeel.task.predict.trained_model": ("load",),
    "fedkeel.runner.callbacks": ("Callback",),
    "fedkeel.study.api": ("audit", "compare", "doctor", "run"),
    "fedkeel.study.simulation": ("Simulation",),
    "fedkeel.features.attackers.settings": ("Adversary",),
    "fedkeel.features.budget.settings": ("Privacy",),
    "fedkeel.features.diagnose.settings": ("Diagnose",),
    "fedkeel.features.own_training.training": ("LocalTraining",),
    "fedkeel.features.root.settings": ("Root",),
    "fedkeel.features.stop.settings": ("Stop",),
    "fedkeel.features.time.settings": ("System",),
    "fedkeel.features.track.settings": ("Track",),
    "fedkeel.method.docs.cite": ("cite",),
    "fedkeel.method.grammar": ("parse",),
    "fedkeel.task.metrics.registry": ("metric",),
    "fedkeel.task.models.norm": ("replace_batch_norm",),
    "fedkeel.task.client_network": ("ClientNetwork",),
    "fedkeel.task.task": ("Task",),
}
_PUBLIC = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*_PUBLIC, "__version__"]


if not TYPE_CHECKING:  # a checker is to know the names above, and no others
    __getattr__ = loaded_when_used(__name__, _PUBLIC)


def __dir__() -> list[str]:
    """Return the public names, and what every module has."""
    return sorted({*globals(), *_PUBLIC})
