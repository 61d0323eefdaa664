"""Clients with different networks: which client has which, and what each of them keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.method.context import Ints, Message
from fedkeel.method.local_training import ClientTraining, start_client_state


@dataclass(frozen=True)
class OtherNetworks:
    """The networks of clients that have another one than the task's own.

    Args:
        names: what each is called.
        trainings: local training of each; all parameters are personal.
        of_client: [C] which client has which: 0 is the task's own, i the i-th of these.
    """

    names: tuple[str, ...]
    trainings: tuple[ClientTraining, ...]
    of_client: Ints

    def training_of(self, client: int) -> ClientTraining | None:
        """Return local training of a client; None for the task's own network."""
        number = int(self.of_client[client])
        return self.trainings[number - 1] if number else None

    @cached_property
    def kept(self) -> tuple[dict[str, TensorSpec], ...]:
        """Shape and type of each tensor that clients of each network keep, by path."""
        message = Message({}, {}, {}, 0, 0.0)  # nothing that is kept is made of what is sent
        states = (start_client_state(one, message, None)[0] for one in self.trainings)
        return tuple(specs_of(dict(state)) for state in states)

    def kept_by(self, client: int) -> dict[str, TensorSpec] | None:
        """Return what a client keeps; None for the task's own network."""
        number = int(self.of_client[client])
        return self.kept[number - 1] if number else None
