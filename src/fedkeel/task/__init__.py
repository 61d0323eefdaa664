"""Model, loss and metrics of what is learned."""

from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from fedkeel.task.task import Task

__all__ = ["Batch", "Network", "Task"]
