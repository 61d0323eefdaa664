"""Model, loss and metrics of what is learned."""

from fedkeel.task.network import Batch, Network
from fedkeel.task.task import Task

__all__ = ["Batch", "Network", "Task"]
