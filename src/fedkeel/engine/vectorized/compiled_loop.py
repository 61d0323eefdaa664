"""The local loop of several clients at once, compiled: the start, the steps and the end of a round.

n clients lie on a leading axis, the client axis. A single client has no such axis. Where rounds are
short and alike, a whole round is compiled as one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedkeel.base.values import Values
from fedkeel.config import Precision
from fedkeel.engine.compiler.cache import Arguments, Call, CompileCache, FlatState
from fedkeel.engine.compiler.dropout_masks import Generators, RandomDraws
from fedkeel.engine.compiler.errors import CannotCompile, tracing
from fedkeel.engine.compiler.low_rank_matrix import dense
from fedkeel.engine.vectorized.batching import ClientGroup
from fedkeel.engine.vectorized.run_inputs import RunInputs
from fedkeel.engine.vectorized.run_numbers import with_numbers
from fedkeel.engine.vectorized.transfers import copies, to_device
from fedkeel.method.context import ClientInfo, Ints, Message
from fedkeel.method.local_loop import (
    ClientRound,
    LocalState,
    client_finish,
    client_start,
    client_step,
)
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.round_values import Reply, reply_state
from fedkeel.task.batch import Batch
from fedkeel.tree import State, leaf, map_tensors, substate, substates, tensors


class NeedsAllExamples(CannotCompile):
    """A part asks for all examples of a client, which are not laid out on the client axis."""

    def __init__(self) -> None:
        super().__init__("a part asks for all examples of a client")


class HasModelOfItsOwn(CannotCompile):
    """A client receives another model than others, and steps are compiled for one."""

    def __init__(self) -> None:
        super().__init__("each client receives a model of its own")


class InnerProductsAsSums(TorchFunctionMode):
    """Takes inner products of vectors as sums of products.

    A processor's library adds up those of one client in another order than those of several, so the
    bits of a run would depend on who trains beside it.
    """

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function of torch."""
        if func in (torch.dot, Tensor.dot) and len(args) == 2:
            return (args[0] * args[1]).sum()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ReceivedInputs:
    """What the clients of a group have received from the servers of their runs.

    Args:
        state: what the servers sent, and numbers of the methods, as compiled functions take them:
            the same for all clients of a single run, and [n, ...], each client's own, where they
            may be of several runs.
        rate: [] learning rate, on the CPU, of the parameters' type: a wider type would widen
            what it is multiplied with. NaN where each client has its own, which comes with its
            batches and at its end.
        generators: what the clients' dropout masks are drawn from; None for a single client.
        by_client: whether the clients may be of several runs.
    """

    state: FlatState
    rate: Tensor
    generators: Generators
    by_client: bool

    @classmethod
    def of(
        cls, group: ClientGroup, generators: Generators, dtype: torch.dtype, by_client: bool
    ) -> ReceivedInputs:
        """Return them for a group; `dtype` is the parameters' type."""
        runs = group.distinct_runs
        if not by_client:
            (run,) = runs
            rate = torch.tensor(run.message.lr, dtype=dtype)
            return cls(_sent(run), rate, generators, by_client)
        states = [_sent(run).by_path for run in runs]
        if len({frozenset(state) for state in states}) > 1:
            raise CannotCompile("servers of the runs send messages of different form")
        index = torch.tensor([runs.index(run) for run in group.runs])
        together = {path: torch.stack([dense(s[path]) for s in states]) for path in states[0]}
        state = FlatState.of_values(
            {path: t.index_select(0, to_device(index, t.device)) for path, t in together.items()}
        )
        return cls(state, torch.tensor(math.nan, dtype=dtype), generators, by_client)

    def __getitem__(self, clients: slice) -> ReceivedInputs:
        """Return them for some of the clients, which draw their masks as before."""
        return replace(self, state=self.state.map(lambda t: t[clients])) if self.by_client else self

    @property
    def is_single(self) -> bool:
        """Whether there is a single client, without a client axis."""
        return self.generators is None

    def arguments(
        self, *states: FlatState, with_rate: bool = True, real_examples: Ints | None = None
    ) -> Arguments:
        """Return the arguments of a function of these and of states of the clients."""
        rate = self.rate if with_rate else None
        return Arguments((self.state, *states), self.generators, rate, real_examples)

    def batched(self, function: Callable[..., State], *axes: int | None) -> Callable[..., State]:
        """Return a function of one client as a function of all clients.

        Args:
            function: of what was received, of states of the client, and of the rate.
            axes: 0 for each state of the client, None for the rate.
        """
        if self.is_single:
            return function
        axes = (0 if self.by_client else None, *axes)
        of_all = torch.func.vmap(function, in_dims=axes, randomness="different")

        def side_by_side(*states: State) -> State:
            inner = InnerProductsAsSums() if self.by_client else nullcontext()
            # attention as products, which have a batch of clients; the fused ones do not
            with sdpa_kernel(SDPBackend.MATH), inner:
                result: State = of_all(*states)
            return result

        return side_by_side

    def name(self, function: str) -> str:
        """Return the name under which a function of these is compiled."""
        return f"{function}, several runs" if self.by_client else function


def _sent(run: RunInputs) -> FlatState:
    message = run.message
    return FlatState.of(
        {
            "start": dict(message.params),
            "received": dict(message.buffers),
            "broadcast": dict(message.broadcast),
            "numbers": dict(run.run.placed_numbers),
        }
    )


class CompiledLoop:
    """The compiled local loop.

    What belongs to the clients comes as two states: ``client data``, which stays the same in a
    round (client state, client info, prepared examples), and the ``local state``, which each step
    changes.

    Args:
        training: method, model and local training.
        precision: of the factors of matrix products.
        draws: what the network draws in training; None where it draws nothing.
    """

    def __init__(
        self,
        training: ClientTraining,
        precision: Precision = "float32",
        draws: RandomDraws | None = None,
    ) -> None:
        self._training = replace(training, autograd="functional")
        # the tape has faster kernels for one client, such as that of group normalisation
        self._training_single = replace(training, autograd="eager")
        self.compiled = CompileCache(precision, draws.orders if draws else ())

    def start(
        self, received: ReceivedInputs, client_data: FlatState, distinct: State
    ) -> tuple[FlatState, FlatState]:
        """Begin the round of each client.

        Args:
            received: from the servers.
            client_data: of the clients.
            distinct: the distinct examples of each client's round, empty where no part prepares.

        Returns:
            Client data, with what parts have prepared, and local state.
        """
        training = self._training_of(received)

        def start(sent: State, client_data: State, distinct: State) -> State:
            client, local = _started(training, sent, client_data, distinct)
            return {"local": _as_state(local), "prepared": dict(client.prepared)}

        call = Call(received.name("start"), received.batched(start, 0, 0), (2 if distinct else 1,))
        arguments = received.arguments(client_data, FlatState.of(distinct), with_rate=False)
        result = self.compiled.run(call, arguments).state
        if prepared := substate(result, "prepared"):
            client_data = FlatState.of({**client_data.state, "prepared": prepared})
        local = FlatState.of(substate(result, "local"))
        return client_data, local.with_tensors(copies(local.tensors))  # steps write over it

    def step(
        self,
        received: ReceivedInputs,
        client_data: FlatState,
        local: FlatState,
        batch: State,
        real_examples: Ints | None = None,
    ) -> FlatState:
        """Make one step of every client and return its local state; the given one is lost.

        Masks are drawn only for each client's `real_examples`; None draws them for all.
        """
        training = self._training_of(received)

        def step(sent: State, client_data: State, local: State, batch: State, lr: Tensor) -> State:
            client = _client(_with(training, sent), read_message(sent), client_data, no_examples)
            return _as_state(_stepped(client, _local_state(local), batch, lr))

        call = Call(received.name("step"), received.batched(step, 0, 0, 0, None), (3,), owned=2)
        states = client_data, local, FlatState.of(batch)
        return self.compiled.run(call, received.arguments(*states, real_examples=real_examples))

    def end(
        self,
        received: ReceivedInputs,
        client_data: FlatState,
        local: FlatState,
        end_info: State,
        is_compiled: bool,
    ) -> State:
        """End the round of every client and return what they send, keep and log.

        Args:
            received: from the servers.
            client_data: of the clients.
            local: what the last step left; it is lost.
            end_info: ``steps`` and ``path_length`` [n] as `client_finish` means them, and ``rate``
                [n] where each client has its own.
            is_compiled: whether the end is compiled, or done under vmap as it is.

        Raises:
            CannotCompile: the end cannot be compiled, or not be done for several clients at once.
        """
        training = self._training_of(received)

        def end(sent: State, data: State, local: State, info: State, lr: Tensor) -> State:
            client = _client(_with(training, sent), read_message(sent), data, no_examples)
            return _finished(client, _local_state(local), info, lr)

        batched = received.batched(end, 0, 0, 0, None)
        arguments = received.arguments(client_data, local, FlatState.of(end_info))
        if not is_compiled:
            with tracing():
                return batched(*(state.state for state in arguments.states), received.rate)
        call = Call(received.name("end"), batched, (3,), owned=2)
        result = self.compiled.run(call, arguments).state
        return map_tensors(lambda t: t[None], result) if received.is_single else result

    def end_plainly(
        self,
        run: RunInputs,
        client_data: State,
        local: State,
        client_info: ClientInfo,
        steps: int,
        all_examples: Callable[[], State],
    ) -> State:
        """End the round of one client after S steps, without compiling. See `end`."""
        # by the tape, as where a client trains by itself: so masks are filled in the same order
        training = replace(run.training, autograd="eager")  # whose parts have the run's own numbers
        client = _client(training, run.message, client_data, lambda: read_batch(all_examples()))
        client = replace(client, client_info=client_info)
        return _reply(client_finish(client, _local_state(local), steps))

    def whole_round(
        self,
        received: ReceivedInputs,
        client_data: FlatState,
        distinct: State,
        batches: State,
        end_info: State,
        weights: Tensor | None,
    ) -> FlatState:
        """Train every client for its whole round at once: start, all steps, end.

        Args:
            received: from the servers.
            client_data: of the clients.
            distinct: as in `start`.
            batches: of each step by its number, as many steps for each client.
            end_info: as in `end`.
            weights: [n] with which updates are added up; None where they are not.

        Returns:
            What clients send, keep and log. Where updates are added up, ``update`` and the messages
            that the server only adds up are [1, ...]. Matrices of client states may be low-rank.
        """
        training, plan = self._training_of(received), self._training.plan

        def train(
            sent: State, data: State, distinct: State, batches: State, info: State, lr: Tensor
        ) -> State:
            client, local = _started(training, sent, data, distinct)
            for number in range(len(batches)):
                local = _stepped(client, local, substate(batches, str(number)), lr)
            return _finished(client, local, info, lr)

        batched = received.batched(train, 0, 0, 0, 0, None)

        def train_group(*args: Any) -> State:  # noqa: ANN401
            *states, weight, lr = args
            result = batched(*states, lr)
            if received.is_single:
                result = map_tensors(lambda t: t[None], result)
            return _added_up(result, leaf(weight, "n"), plan.sum_only_uploads) if weight else result

        weight: State = {} if weights is None else {"n": weights}
        states = map(FlatState.of, (distinct, batches, end_info, weight))
        compact = () if received.by_client else plan.last_round_states
        low_rank = tuple(f"client_state/{part}/" for part in compact)
        name = received.name("round" if weights is None else "round, added up")
        start = tensors(substate(received.state.state, "start"))
        moved_from = {f"update/{k}": t for k, t in start.items()}
        call = Call(name, train_group, (2, 3), None, low_rank, moved_from, weights)
        return self.compiled.run(call, received.arguments(client_data, *states))

    def _training_of(self, received: ReceivedInputs) -> ClientTraining:
        return self._training_single if received.is_single else self._training


# ---- steps and values of the local loop, on states ----------------------------------------------


def _started(
    training: ClientTraining, sent: State, client_data: State, distinct: State
) -> tuple[ClientRound, LocalState]:
    message = read_message(sent)
    client, local = client_start(
        _with(training, sent),
        message,
        substates(substate(client_data, "client_state")),
        read_info(client_data),
        no_examples,
        (lambda: read_batch(distinct)) if distinct else None,
    )
    if client.start is not message.params:
        raise HasModelOfItsOwn
    return client, local


def _client(
    training: ClientTraining,
    message: Message,
    client_data: State,
    all_examples: Callable[[], Batch],
) -> ClientRound:
    return ClientRound(
        training=training,
        message=message,
        client_info=read_info(client_data),
        client_state=substates(substate(client_data, "client_state")),
        prepared=substates(substate(client_data, "prepared")),
        all_examples=all_examples,
    )


def _stepped(client: ClientRound, local: LocalState, batch: State, lr: Tensor) -> LocalState:
    fields = tensors(batch)
    return client_step(
        client,
        local,
        read_batch(batch),
        fields.get("rows"),
        fields.get("first"),
        fields.get("active"),
        tensors(substate(batch, "noise")) or None,
        fields.get("rate", lr),
        fields.get("phase"),
    )


def _finished(client: ClientRound, local: LocalState, end_info: State, lr: Tensor) -> State:
    info = tensors(end_info)
    rate = info.get("rate", lr)
    return _reply(client_finish(client, local, info["steps"], info["path_length"], rate))


def _reply(reply: Reply) -> State:
    return {**reply_state(reply), "loss": reply.loss, "finite": reply.finite}


def _added_up(result: State, weights: Tensor, sum_only: frozenset[str]) -> State:
    """Return what clients send with the sum of their updates, by weights [n].

    The messages of the parts `sum_only` are added up unweighted, of clients that have a weight.
    """

    def total(factors: Tensor, state: State) -> State:
        return map_tensors(
            lambda t: torch.mm(factors.to(t.dtype), t.reshape(len(t), -1)).view(1, *t.shape[1:]),
            state,
        )

    row = weights[None]
    counts = (row > 0.0).to(row.dtype)
    uploads = substates(substate(result, "uploads"))
    messages = {part: total(counts, uploads[part]) for part in sum_only & uploads.keys()}
    update = total(row, substate(result, "update"))
    return {**result, "update": update, "uploads": {**uploads, **messages}}


def _with(training: ClientTraining, sent: State) -> ClientTraining:
    return with_numbers(training, tensors(substate(sent, "numbers")))


def no_examples() -> Batch:
    """Refuse to give all examples of a client."""
    raise NeedsAllExamples


def read_message(sent: State) -> Message:
    """Return the message as a compiled function sees it, without its round and learning rate."""
    return Message(
        params=tensors(substate(sent, "start")),
        buffers=tensors(substate(sent, "received")),
        broadcast=substates(substate(sent, "broadcast")),
        round=0,
        lr=math.nan,
    )


def read_info(client_data: State) -> ClientInfo:
    """Return what a client knows about itself, of its data."""
    info = tensors(substate(client_data, "client_info"))
    return ClientInfo(info["client"], info["examples"], info.get("counts"))


def read_batch(state: State) -> Batch:
    """Return examples as a batch."""
    weight = leaf(state, "weight") if "weight" in state else None
    return Batch(_values(state["x"]), _values(state["y"]), weight)


def _values(value: Tensor | State) -> Values:
    return value if isinstance(value, Tensor) else tensors(value)


def _as_state(local: LocalState) -> State:
    return {k: v if isinstance(v, Tensor) else dict(v) for k, v in vars(local).items()}


def _local_state(state: State) -> LocalState:
    return LocalState(
        params=tensors(substate(state, "params")),
        personal=tensors(substate(state, "personal")),
        buffers=tensors(substate(state, "buffers")),
        optimiser=substate(state, "optimiser"),
        model=tensors(substate(state, "model")),
        model_optimiser=substate(state, "model_optimiser"),
        carry=substates(substate(state, "carry")),
        loss=leaf(state, "loss"),
    )
