"""Callbacks: what a run tells those who follow it, round by round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedkeel.errors import RunError
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord
from fedkeel.runner.result import Result
from fedkeel.task.network import Network
from fedkeel.tree import Tree


@dataclass(frozen=True)
class RunInfo:
    """A run that begins.

    Args:
        record: what runs.
        rounds_done: rounds that were made before, 0 for a new run.
        is_finished: whether the run was finished before; then it is read and not made again.
    """

    record: RunRecord
    rounds_done: int = 0
    is_finished: bool = False


class GlobalModel:
    """The global model after a round. It is for reading only.

    Nothing is copied before somebody asks.

    Args:
        network: the module as a function.
        params: the trained parameters by name, wherever the server has them.
        buffers: the buffers by name, where clients' buffers are averaged.
    """

    def __init__(self, network: Network, params: Tree, buffers: Tree) -> None:
        self._network, self._params, self.buffers = network, params, buffers

    @cached_property
    def params(self) -> Tree:
        """The trained parameters by name, on the processor."""
        return {name: tensor.cpu() for name, tensor in self._params.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model for ``module.load_state_dict(...)``; a copy.

        Raises:
            RunError: each client keeps parameters of its own, so that the model is not whole.
        """
        if missing := [name for name in self._network.names if name not in self._params]:
            raise RunError(
                "There is no single model.",
                got=f"the server has no {', '.join(missing[:3])}",
                why="each client keeps its own",
                do="take what is shared: model.params",
            )
        return {name: tensor.clone() for name, tensor in self._state_dict.items()}

    @cached_property
    def _state_dict(self) -> Tree:
        return self._network.state_dict(self.params, self.buffers)


class Callback:
    """Follows a run. Every method does nothing until a subclass overrides it.

    A new run calls `on_run_begin`, then `on_evaluation` with the initial model as round 0. Each
    round calls `on_evaluation`, where the model was scored, and `on_round_end`. At last comes
    `on_run_end`. A round is recorded before its callbacks are called. A run that goes on after an
    interrupt continues with the next round. A run that was finished before calls only
    `on_run_begin` and `on_run_end`.

    An exception in a callback ends the run: the rounds so far are saved, the run record says
    ``failed`` with the message, and the exception reaches the caller. The same call goes on from
    there. An exception in `on_run_end` leaves the run as it has ended.

    Example:
        >>> class Print(Callback):
        ...     def on_evaluation(self, row, model):
        ...         print(row.round, row.test["accuracy"])
    """

    def on_run_begin(self, run: RunInfo) -> None:
        """Hear that a run begins, or goes on."""

    def on_clients_trained(self, trained: int, count: int) -> None:
        """Hear how many of the round's `count` clients have been trained so far."""

    def stop_reason(self, row: RoundRecord) -> str:
        """Return why the run should end with this round, "" where it should go on.

        It is called for every row, once the model has been scored on the test set and before the
        row is recorded. When a run is continued, it is called again for the rows so far, so that a
        decision that depends only on the rows is the same as without the interrupt.
        """
        return ""

    def on_evaluation(self, row: RoundRecord, model: GlobalModel) -> None:
        """Hear the scores of a model, in `row.test` or `row.per_client`."""

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        """Hear what a round came to."""

    def on_run_end(self, result: Result) -> None:
        """Hear how the run ended: `result.record.status` and `result.record.message` say it."""


class CallbackList(Callback):
    """Several callbacks as one; each is called in turn.

    Args:
        callbacks: the callbacks.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_run_begin(self, run: RunInfo) -> None:
        """Call each callback."""
        for callback in self._callbacks:
            callback.on_run_begin(run)

    def on_clients_trained(self, trained: int, count: int) -> None:
        """Call each callback."""
        for callback in self._callbacks:
            callback.on_clients_trained(trained, count)

    def stop_reason(self, row: RoundRecord) -> str:
        """Call each callback, and return the first reason."""
        reasons = [callback.stop_reason(row) for callback in self._callbacks]
        return next(filter(None, reasons), "")

    def on_evaluation(self, row: RoundRecord, model: GlobalModel) -> None:
        """Call each callback."""
        for callback in self._callbacks:
            callback.on_evaluation(row, model)

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        """Call each callback."""
        for callback in self._callbacks:
            callback.on_round_end(row, model)

    def on_run_end(self, result: Result) -> None:
        """Call each callback."""
        for callback in self._callbacks:
            callback.on_run_end(result)
