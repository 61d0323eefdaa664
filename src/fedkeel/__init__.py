"""Federated learning on non-IID data: every drift and forgetting correction as a part."""

from fedkeel.config import Cohort as Cohort
from fedkeel.config import Engine as Engine
from fedkeel.config import Evaluation as Evaluation
from fedkeel.config import Local as Local
from fedkeel.config import Schedule as Schedule
from fedkeel.config import Stop as Stop
from fedkeel.data.dataset import Dataset as Dataset
from fedkeel.data.dataset import Federation as Federation
from fedkeel.data.dataset import dataset as dataset
from fedkeel.data.dataset import federation as federation
from fedkeel.data.divide.arrays import by_classes as by_classes
from fedkeel.data.divide.arrays import by_client as by_client
from fedkeel.data.divide.arrays import dirichlet as dirichlet
from fedkeel.data.divide.arrays import iid as iid
from fedkeel.errors import FedkeelError as FedkeelError
from fedkeel.experiment.api import compare as compare
from fedkeel.experiment.api import run as run
from fedkeel.method.cite import cite as cite
from fedkeel.method.grammar import parse as parse
from fedkeel.task.models.norm import replace_batch_norm as replace_batch_norm
from fedkeel.task.task import Task as Task
from fedkeel.version import __version__ as __version__
