"""Where clients begin, of a method whose start takes steps: those of several clients side by side.

The starts of a group are made before its round is compiled, and come as what the clients keep. The
compiled start only takes them from there (`begun`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedkeel.engine.base import ServerModel, TrainingSetup
from fedkeel.engine.client_inputs import client_info
from fedkeel.engine.compiler.cache import Arguments, Call, CompileCache, FlatState
from fedkeel.engine.compiler.errors import CannotCompile, tracing
from fedkeel.engine.personal import ReadState
from fedkeel.engine.vectorized.batching import TrainingExamples
from fedkeel.engine.vectorized.begun import with_start
from fedkeel.engine.vectorized.compiled_loop import (
    no_examples,
    read_batch,
    read_info,
    read_message,
)
from fedkeel.engine.vectorized.transfers import to_device
from fedkeel.method.context import ByPart, Ints, Message, PartStates, part_state
from fedkeel.method.local_loop import ClientRound, make_step
from fedkeel.method.local_training import PERSONAL, ClientTraining, start_client_state
from fedkeel.method.roles import SteppedStart, start_batches
from fedkeel.tree import (
    State,
    Tree,
    leaf,
    map_tensors,
    stack,
    substate,
    substates,
    tensors,
    unwalk,
    where,
)


class Starts:
    """Takes the steps of the starts of several clients of a run side by side.

    Args:
        placed: method, model, data and seed of the run, on the device.
        part: the part whose start takes steps.
        examples: the training set.
        compiled: compiled functions, which are kept from round to round.
        width: examples that a mini-batch is padded to; 0 for one of a few sizes.
    """

    def __init__(
        self,
        placed: TrainingSetup,
        part: SteppedStart,
        examples: TrainingExamples,
        compiled: CompileCache,
        width: int = 0,
    ) -> None:
        self._setup, self._part, self._examples = placed, part, examples
        self._compiled, self._width = compiled, width
        training = replace(placed.training, network=placed.training.network.for_tracing())
        self._single = replace(training, autograd="eager")
        self._several = replace(training, autograd="functional")
        self._layout = training.network.layout
        self._device = next(iter(training.network.params.values())).device

    @torch.no_grad()
    def of(self, message: Message, clients: Sequence[int], kept: Sequence[ByPart]) -> list[State]:
        """Return where clients begin and what their parts have noted: ``start`` and ``noted``.

        Args:
            message: what the clients received.
            clients: their indices.
            kept: what each keeps.

        Raises:
            CannotCompile: the steps cannot be taken side by side.
        """
        local, sizes = self._setup.training.local, self._setup.federation.sizes
        counts = [start_batches(local, int(sizes[client])) for client in clients]
        own = [part_state(state, self._part.name) for state in kept]
        steps = [self._part.start_steps(s, c) for s, c in zip(own, counts, strict=True)]
        order = sorted(range(len(clients)), key=lambda i: -steps[i])  # stable
        passes = [
            [self._rows(clients[i])[first :: counts[i]] for first in range(counts[i])]
            for i in order
        ]
        with tracing(), self._attention(len(clients)):
            begun = self._of_ordered(
                message, [clients[i] for i in order], [kept[i] for i in order], passes, steps, order
            )
        return [begun[order.index(i)] for i in range(len(clients))]

    def _rows(self, client: int) -> Ints:
        return self._setup.federation.client(client)

    def _attention(self, n: int) -> AbstractContextManager[None]:
        """Return the context of attention as products, which have a batch of clients."""
        return nullcontext() if n == 1 else sdpa_kernel(SDPBackend.MATH)

    def _of_ordered(
        self,
        message: Message,
        clients: Sequence[int],
        kept: Sequence[ByPart],
        passes: Sequence[Sequence[Ints]],
        steps: Sequence[int],
        order: Sequence[int],
    ) -> list[State]:
        """Return where clients begin, those with the most steps first."""
        part, n = self._part, len(clients)
        counts = [steps[i] for i in order]
        own = _together([dict(state) for state in kept])
        infos = _together([self._info(client) for client in clients])

        def init(own: State) -> State:
            return part.init_start(message.params, substate(own, part.name), self._layout)

        def end(state: State, own: State) -> State:
            start, noted = part.end_start(state, message.params, substate(own, part.name))
            return {"start": dict(start), "noted": noted}

        if n == 1:
            state = init(own)
            for number in range(counts[0]):
                batch = self._batch([passes[0][number % len(passes[0])]], single=True)
                state = self._step(self._single, message, state, own, infos, batch)
            return [end(state, own)]
        state = torch.func.vmap(init)(own)
        if counts[0]:
            state = self._steps_side_by_side(message, state, own, infos, passes, counts)
        result = torch.func.vmap(end)(state, own)
        return [map_tensors(lambda t, i=i: t[i], result) for i in range(n)]  # type: ignore[misc]

    def _steps_side_by_side(
        self,
        message: Message,
        state: State,
        own: State,
        infos: State,
        passes: Sequence[Sequence[Ints]],
        counts: Sequence[int],
    ) -> State:
        """Return what the last step of each client has left.

        When half of the clients have ended, the others go on as half as many; in between, steps of
        those that have ended change nothing. So a few compiled functions serve all.
        """

        def step(sent: State, state: State, own: State, info: State, batch: State) -> State:
            after = self._step(self._several, read_message(sent), state, own, info, batch)
            return where(leaf(batch, "active"), after, state)

        side_by_side = torch.func.vmap(step, in_dims=(None, 0, 0, 0, 0))
        name = f"step of the start of {self._setup.training.plan.expression}"
        call, sent, n = (
            Call(name, side_by_side, (4,)),
            _sent(message),
            len(counts),
        )
        now, kept, info = (FlatState.of(each) for each in (state, own, infos))
        ended: list[Tree] = []
        for number in range(counts[0]):
            going = sum(count > number for count in counts)
            if going <= n // 2:
                while n // 2 >= going:
                    n //= 2
                ended.insert(0, now.map(lambda t, n=n: t[n:].clone()).dense)  # type: ignore[misc]
                now, kept, info = (s.map(lambda t, n=n: t[:n]) for s in (now, kept, info))  # type: ignore[misc]
            batch = self._batch([rows[number % len(rows)] for rows in passes[:n]], single=False)
            batch["active"] = self._examples.on_device(np.arange(n) < going)
            states = sent, now, kept, info, FlatState.of(batch)
            now = self._compiled.run(call, Arguments(states, []))
        every = [now.dense, *ended]
        return unwalk({path: torch.cat([one[path] for one in every]) for path in every[0]})

    def _step(
        self,
        training: ClientTraining,
        message: Message,
        state: State,
        own: State,
        info: State,
        batch: State,
    ) -> State:
        """Take a step of one client."""
        client_info = read_info(info)
        client_state, buffers = start_client_state(training, message, substates(own))
        client = ClientRound(training, message, client_info, client_state, {}, no_examples)
        personal = client.personal(tensors(part_state(client_state, PERSONAL)))
        seen = PartStates(message.broadcast, client_state)
        examples = read_batch(batch)
        step = make_step(training, message, client_info, examples, buffers, seen, personal=personal)
        return self._part.start_step(state, message.params, step.view(self._part.name))

    def _batch(self, rows: Sequence[Ints], single: bool) -> State:
        """Return a mini-batch of each client; a shorter one is padded with its first row."""
        sizes = np.array([len(one) for one in rows])
        width = self._width or self._padded_size(int(sizes.max()))
        table = np.stack([np.concatenate([r, np.repeat(r[:1], width - len(r))]) for r in rows])
        is_real = None
        if not single or (sizes < width).any():
            is_real = self._examples.on_device(np.arange(width) < sizes[:, None])
        return self._examples.take(self._examples.on_device(table), is_real, single)

    def _padded_size(self, largest: int) -> int:
        """Return the size of a padded mini-batch: one of a few."""
        width = self._setup.training.local.examples_per_step
        if width == "all":
            return largest
        while width // 2 >= largest:
            width //= 2
        return width

    def _info(self, client: int) -> State:
        info = client_info(self._setup, client)
        state: State = {"client": info.client, "examples": info.examples}
        if info.declared_class_counts is not None:
            state["counts"] = info.declared_class_counts
        there = map_tensors(lambda t: to_device(t, self._device), state)
        return {"client_info": there}

    def before_evaluation(self, server: ServerModel, read: ReadState, most: int) -> ReadState:
        """Return what reads what clients keep, with where their personal models begin.

        Clients that are asked for one after the other are begun side by side.

        Args:
            server: the global model.
            read: reads what a client keeps.
            most: clients that are begun side by side, at most.
        """
        message = Message(server.params, server.buffers, server.broadcast, server.round, 0.0)
        ready: dict[int, ByPart | None] = {}

        def read_begun(client: int) -> ByPart | None:
            if client not in ready:
                width = most if client == 0 or client - 1 in ready else 1
                last = min(client + width, len(self._setup.federation))
                ready.clear()
                ready.update({k: read(k) for k in range(client, last)})
                kept = {k: state for k, state in ready.items() if state}
                try:
                    begun = self.of(message, list(kept), list(kept.values())) if kept else []
                except CannotCompile:  # each is begun when its model is made
                    begun = []
                for (k, state), start in zip(kept.items(), begun, strict=False):
                    ready[k] = with_start(state, self._part.name, start)
            return ready[client]

        return read_begun


def _together(states: Sequence[State]) -> State:
    """Return states on a leading axis, which a single client does not have."""
    return states[0] if len(states) == 1 else stack(states)


def _sent(message: Message) -> FlatState:
    """Return a message as compiled functions take it."""
    return FlatState.of(
        {
            "start": dict(message.params),
            "received": dict(message.buffers),
            "broadcast": dict(message.broadcast),
        }
    )
