"""The server's side of a run: the same rounds, records and checkpoints as everywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp import Grid
from rich.console import Console

from fedkeel.config import Experiment
from fedkeel.errors import FedkeelError, RunError
from fedkeel.flower.node.local_data import away, stand_in
from fedkeel.flower.node.node import terms
from fedkeel.flower.server.engine import Nodes
from fedkeel.flower.server.exchange import Exchange
from fedkeel.flower.server.membership import Presence, Roster, remembered
from fedkeel.method.grammar import parse
from fedkeel.method.roles import Capability
from fedkeel.records.folder import RunFolder, write_text
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import EngineChoice
from fedkeel.runner.early_stopping import least
from fedkeel.runner.loop import Result
from fedkeel.runner.prepare import gather, prepare
from fedkeel.runner.progress import Lines
from fedkeel.runner.start import check_settings, start
from fedkeel.task.models import builder

OUTCOME = "outcome.json"
"""File that says how a run ended, for whoever follows it."""


@dataclass(frozen=True)
class Options:
    """What is said when a run is submitted, beyond the experiment.

    Args:
        out: the run folder.
        resume: whether to go on with an unfinished run that is there.
    """

    out: Path
    resume: bool = False


def told(grid: Grid, experiment: Experiment, options: Options) -> None:
    """Make a run, and leave word of how it ended beside the logs of a local federation.

    Raises:
        FedkeelError: the run cannot start, or cannot go on; what was done is saved.
    """
    word = {"status": "failed", "what": "The server's app ended.", "got": None, "do": None}
    try:
        word["status"] = serve(grid, experiment, options).record.status
    except FedkeelError as error:
        word.update(what=error.what, got=_text(error.got), do=error.do)
        raise
    except Exception as error:
        word.update(got=f"{type(error).__name__}: {error!s:.200}")
        raise
    finally:
        place = options.out / "flower"
        if place.is_dir():
            with suppress(OSError, RunError):  # a full disk, which the run has said
                write_text(place / OUTCOME, json.dumps(word))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def serve(grid: Grid, experiment: Experiment, options: Options) -> Result:
    """Make a run with the nodes of a federation.

    Args:
        grid: Flower's grid.
        experiment: what runs.
        options: where to, and whether to go on.

    Raises:
        FedkeelError: the run cannot start, or cannot go on; what was done is saved.
    """
    refuse_secure_aggregation(experiment)
    settings = experiment.flower
    parse(experiment.method, weights=experiment.weights)  # before anybody is waited for
    builder(experiment.model.name)
    check_settings(options.out, experiment)
    exchange = Exchange(grid, settings)
    said: Mapping[int, Presence] | None
    if away(experiment):
        count = experiment.partition.clients or 0
        roster, said = Roster(exchange, settings, count), _before(options, count)
        if not said:
            every = f"all {count}, whose data nobody else knows"
            roster.gather(lambda found: found == count, every)
            said = roster.said()
        prepared = prepare(experiment, stand_in(experiment, said))
        data = {k: (one.examples[0], one.digest) for k, one in said.items()}
    else:
        said = None
        prepared = prepare(experiment, gather(experiment))
        roster = Roster(exchange, settings, prepared.population.clients)
        federation = prepared.setup.federation
        digest = federation.data.fingerprint()
        data = {k: (int(n), digest) for k, n in enumerate(federation.sizes)}
    roster.pin(data, terms(prepared))
    needed = least(settings.quorum, prepared.population.clients)
    roster.gather(lambda found: found >= needed, f"at least {needed} clients")
    choice = EngineChoice(
        kind="flower",
        workers=len(set(roster.where().values())),
        dtype=experiment.engine.dtype,
        asked="flower",
    )
    return start(
        prepared,
        options.out,
        options.resume,
        watcher=Faults(Console()),
        engine=Nodes(prepared, exchange, roster, said),
        choice=choice,
    )


class Faults(Lines):
    """Lines for whoever submitted the run, and one for each reason why clients were left out."""

    def row(self, run: str, row: RoundRecord) -> None:
        """Show a line where it is time for one, and what went wrong in any case."""
        super().row(run, row)
        for words, clients in row.faults.items():
            self._print(f"round {row.round}: {words}: clients {clients}")


def refuse_secure_aggregation(experiment: Experiment) -> None:
    """Refuse what cannot be had, and say what stands in the way.

    Raises:
        RunError: secure aggregation was asked for.
    """
    if not experiment.flower.secure_aggregation:
        return
    plan = parse(experiment.method, weights=experiment.weights)
    single = [part.name for part in plan.parts if Capability.PER_CLIENT_UPDATES in part.needs]
    uploads = [part.name for part in plan.uploads]
    words = "this method needs no more than sums"
    if single:
        words = f"{', '.join(single)} needs single clients' updates, which it takes away"
    elif uploads or not plan.sums:
        words = f"the messages of {', '.join(uploads) or 'this method'} would have to be summed too"
    raise RunError(
        "Secure aggregation cannot be had.",
        why="Flower has SecAgg+ for its older interface only, and we make no cryptography of our "
        f"own; {words}",
        do="set flower.secure_aggregation = false; DP-SGD at the clients ('dpsgd') hides examples",
    )


def _before(options: Options, count: int) -> Mapping[int, Presence]:
    """Return what the nodes said when the run began that goes on, empty where none does."""
    saved = RunFolder(options.out).load() if options.resume else None
    said = {} if saved is None else remembered(saved.arrays)
    return said if set(said) == set(range(count)) else {}
