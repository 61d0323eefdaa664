"""The server's side of a run: the same rounds, records and checkpoints as in a simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flwr.serverapp import Grid
from rich.console import Console

from fedkeel.config import Experiment
from fedkeel.config.flower import smallest_count
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import FedkeelError
from fedkeel.features.progress.display import ProgressLines, run_name
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.flower.protocol import Agreement, NodeDescription
from fedkeel.flower.server.connection import NodeConnection
from fedkeel.flower.server.engine import NodeClients
from fedkeel.flower.server.kept_sums import KeptSums
from fedkeel.flower.server.membership import ClientData, Membership, unpack_descriptions
from fedkeel.flower.server.placeholder import placeholder
from fedkeel.method.grammar import parse
from fedkeel.records.files import write_text
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import EngineChoice
from fedkeel.runner.features import callbacks_of, check_nodes
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import check_settings, start
from fedkeel.task.models import builder

OUTCOME = "outcome.json"
"""File that tells the process that follows a run how it ended."""


@dataclass(frozen=True)
class RunOptions:
    """What is given when a run is submitted, beyond the experiment.

    Args:
        out: the run folder.
        resume: whether to go on with an unfinished run that is there.
    """

    out: Path
    resume: bool = False


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Args:
        status: "finished", "interrupted" or "failed".
        what: of a failed run, the error, as in `FedkeelError`.
        got: the same.
        do: the same.
    """

    status: str
    what: str = ""
    got: str | None = None
    do: str | None = None

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        write_text(folder / OUTCOME, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> RunEnd:
        """Read it from a folder."""
        return cls(**json.loads((folder / OUTCOME).read_text(encoding="utf-8")))


def serve_and_report(grid: Grid, experiment: Experiment, options: RunOptions) -> None:
    """Make a run, and write how it ended beside the logs of a local federation.

    Raises:
        FedkeelError: the run cannot start, or cannot go on; what was done is saved.
    """
    with reported(options.out) as ended:
        ended.append(serve(grid, experiment, options).record.status)


@contextmanager
def reported(out: Path) -> Iterator[list[str]]:
    """Write how what is done meanwhile ended, beside the logs of a local federation.

    Args:
        out: folder of the results.

    Yields:
        A list for the status with which it ended; without one it has failed.
    """
    statuses: list[str] = []
    outcome = RunEnd("failed", "The server's app ended.")
    try:
        yield statuses
        outcome = RunEnd(statuses[-1])
    except FedkeelError as error:
        got = None if error.got is None else str(error.got)
        outcome = RunEnd("failed", error.what, got, error.do)
        raise
    except Exception as error:
        outcome = RunEnd("failed", outcome.what, f"{type(error).__name__}: {error!s:.200}")
        raise
    finally:
        folder = out / "flower"
        if folder.is_dir():
            with suppress(OSError):  # a full disk, which the run's own error has said
                outcome.write(folder)


def serve(grid: Grid, experiment: Experiment, options: RunOptions) -> Result:
    """Make a run with the nodes of a federation.

    Args:
        grid: Flower's grid.
        experiment: what runs.
        options: the run folder, and whether to go on.

    Raises:
        FedkeelError: the run cannot start, or cannot go on; what was done is saved.
    """
    settings = experiment.flower
    parse(experiment.method, weights=experiment.weights)  # before it waits for nodes
    check_nodes(experiment)
    builder(experiment.model.name)
    check_settings(options.out, experiment)
    connection = NodeConnection(grid, settings)
    descriptions: Mapping[int, NodeDescription] | None = None
    if is_on_nodes(experiment):
        clients = experiment.partition.clients or 0
        membership = Membership(connection, settings, clients)
        descriptions = _saved_descriptions(options, clients)
        if not descriptions:
            needed = f"all {clients}, because only they have the data"
            membership.wait_for_clients(lambda count: count == clients, needed)
            descriptions = membership.descriptions()
        prepared = prepare(experiment, placeholder(experiment, descriptions))
        data = {
            client: ClientData(node.clients[0].train_examples, node.data_digest)
            for client, node in descriptions.items()
        }
    else:
        prepared = prepare(experiment, gather(experiment))
        membership = Membership(connection, settings, prepared.population.clients)
        federation = prepared.setup.federation
        digest = federation.data.fingerprint()
        data = {k: ClientData(int(size), digest) for k, size in enumerate(federation.sizes)}
    prepared = replace(prepared, on_nodes=True)
    membership.require(data, Agreement.of(prepared))
    quorum = smallest_count(settings.quorum, prepared.population.clients)
    membership.wait_for_clients(lambda count: count >= quorum, f"at least {quorum} clients")
    display = LinesWithFaults(Console())
    with display, interrupts(display.stopping):
        sums = KeptSums(options.out, options.resume)
        engine = NodeClients(prepared, connection, membership, descriptions, sums)
        for line in engine.warnings:
            print(line, flush=True)
        choice = EngineChoice(
            kind="flower",
            workers=len(set(membership.node_by_client().values())),
            devices=engine.devices.names,
            dtype=experiment.engine.dtype,
            asked="flower",
        )
        return start(
            prepared,
            options.out,
            options.resume,
            [*callbacks_of(experiment, options.out), display.follow(run_name(experiment))],
            engine,
            choice,
        )


class LinesWithFaults(ProgressLines):
    """Progress lines for the user who submitted the run, and one for each fault of a round."""

    def row(self, run: str, row: RoundRecord) -> None:
        """Show a line where it is time for one, and the faults in any case."""
        super().row(run, row)
        for reason, clients in row.faults.items():
            self._print(f"round {row.round}: {reason}: clients {clients}")


def _saved_descriptions(options: RunOptions, clients: int) -> Mapping[int, NodeDescription]:
    """Return what the nodes said when the run began that goes on, empty where none does."""
    checkpoint = RunFolder(options.out).load() if options.resume else None
    descriptions = {} if checkpoint is None else unpack_descriptions(checkpoint.arrays)
    return descriptions if set(descriptions) == set(range(clients)) else {}
