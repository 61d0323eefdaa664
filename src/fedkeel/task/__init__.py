"""Model, loss and metrics of what is learned."""

from typing import TYPE_CHECKING

from fedkeel.base.lazy import loaded_when_used

if TYPE_CHECKING:
    from fedkeel.task.batch import Batch as Batch
    from fedkeel.task.network import Network as Network
    from fedkeel.task.task import Task as Task

_HOMES = {
    "Batch": "fedkeel.task.batch",
    "Network": "fedkeel.task.network",
    "Task": "fedkeel.task.task",
}
__all__ = [*_HOMES]

if not TYPE_CHECKING:
    __getattr__ = loaded_when_used(__name__, _HOMES)
