"""Examples at the server as a feature of a run: the server trains on them as a client does."""

from __future__ import annotations

import hashlib
from typing import Any, Self

from fedkeel import config
from fedkeel.base.named_files import TABLE_BYTES, expanded, read_regular
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.engine.prepared import Draft, Prepared
from fedkeel.engine.rehearsal import CLIENT_STATE_PREFIX
from fedkeel.errors import CompositionError, ConfigError
from fedkeel.features.root.examples import drawn, in_words, read_file, without
from fedkeel.features.root.settings import Root
from fedkeel.features.root.training import RootTraining
from fedkeel.method.grammar import parse
from fedkeel.method.part import Capability
from fedkeel.runner.feature import Feature


class RootExamples(Feature):
    """The server's own examples, None where the settings ask for none."""

    settings: Root | None
    on_processor = True

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self:
        """Return the feature: whether the method needs it is not known before it is composed."""
        return cls(getattr(settings, table))

    def divided(self, clients: Federation, seed: int) -> Federation:
        """Return the clients without the examples that the server draws from theirs."""
        if self.settings is None or self.settings.examples is None:
            return clients
        if clients.how["kind"] == "nodes":
            raise ConfigError(
                "The server's examples can be drawn only where the experiment divides the data.",
                got=f"root.examples = {self.settings.examples}, partition.kind = 'nodes'",
                why="the server has none of the examples on nodes",
                do="collect some at the server, and name their file: root.file = 'root.npz'",
            )
        return without(clients, drawn(clients, self.settings.examples, seed))

    def wrap(self, draft: Draft) -> Draft:
        """Return the run with its examples at the server, or refuse a method that has none."""
        plan = draft.training.plan
        if self.settings is not None:
            return draft.with_feature(self)
        for part in plan.parts:
            if Capability.ROOT_EXAMPLES in part.needs and not draft.is_baseline:
                raise ConfigError(
                    f"{part.name} needs examples at the server.",
                    expected="the table [root], in Python root=fk.Root(...)",
                    why="the server trains on them in each round, and trusts nobody else",
                    do="set root.examples = 100, drawn from those of all clients; or root.file, "
                    "the path of an .npz file at the server",
                )
        return draft

    def check(self, prepared: Prepared) -> None:
        """Refuse a method with which the server cannot train as a client does."""
        if not _is_used(prepared):
            return
        kept = [path for path in prepared.spec if path.startswith(CLIENT_STATE_PREFIX)]
        if kept:
            raise CompositionError(
                f"'{prepared.plan.expression}' cannot train at the server.",
                got=f"clients keep {kept[0].removeprefix(CLIENT_STATE_PREFIX)} from round to round",
                why="the server trains as a client that keeps nothing",
                do="leave out the part or the setting by which clients keep it",
            )
        file = None if self.settings is None else self.settings.file
        if file is None or expanded(file).is_file():  # on a node of a federation it is not there
            self._examples(prepared)

    def identity(self, values: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the settings with the digest of the file, where it is here, in its place."""
        file = None if self.settings is None else self.settings.file
        if values is None or file is None:
            return values
        return {**values, "file": _digest_of(file)}

    def record(self, prepared: Prepared) -> str:
        """Return where the examples come from."""
        if self.settings is None:
            return ""
        if self.settings.examples is not None:
            return in_words(self.settings.examples, None)
        return in_words(len(self._examples(prepared)), self.settings.file)

    def hooks(self, prepared: Prepared) -> RootTraining | None:
        """Return what trains at the server in each round; None where no part uses it."""
        return RootTraining(prepared, self._examples(prepared)) if _is_used(prepared) else None

    def _examples(self, prepared: Prepared) -> Dataset:
        """Return the server's examples, as they were before attackers changed any."""
        data = prepared.setup.federation.data
        if self.settings is None:
            raise ValueError("no examples at the server were asked for")
        if self.settings.file is not None:
            return read_file(self.settings.file, data)
        given = prepared.ingredients.clients(prepared.settings.seed)
        places = drawn(given, self.settings.examples or 0, prepared.settings.seed)
        return given.data.take(given.rows[places]).to(prepared.setup.training.network.dtype)


def _is_used(prepared: Prepared) -> bool:
    """Return whether the method trains at the server."""
    return not prepared.is_baseline and Capability.ROOT_EXAMPLES in prepared.plan.needs


def _digest_of(file: str) -> str:
    """Return a digest of a file, "" where it is not here: on a node of a federation."""
    path = expanded(file)
    if not path.is_file():
        return ""
    try:
        return hashlib.blake2b(read_regular(path, TABLE_BYTES), digest_size=8).hexdigest()
    except OSError as error:
        raise ConfigError(
            "The file of the server's examples cannot be read.",
            got=f"root.file = {file!r}: {error.strerror}",
        ) from None


def root_for(expression: str, examples: int) -> Root | None:
    """Return settings with so many examples at the server, None for a method without a use."""
    needs = (part.needs for part in parse(expression, weights="uniform").parts)
    return Root(examples=examples) if any(Capability.ROOT_EXAMPLES in n for n in needs) else None
