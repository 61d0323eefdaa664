"""``fedkeel check``: everything but the training."""

from __future__ import annotations

from pathlib import Path

from fedkeel.cli.common import EXPERIMENT, JSON, PRESET, SET, document, experiment
from fedkeel.errors import counted


def check(
    path: Path = EXPERIMENT,
    preset: str = PRESET,
    settings: list[str] = SET,
    as_json: bool = JSON,
) -> None:
    """Validate an experiment, and estimate its memory and traffic. Trains nothing."""
    from fedkeel.cost.autotune import choose_engine
    from fedkeel.cost.memory import check_disk, estimate_run, format_bytes
    from fedkeel.records.run_record import to_json
    from fedkeel.runner.manifest import describe_run
    from fedkeel.runner.prepare import gather, prepare

    chosen = experiment(path, preset, settings)
    prepared = prepare(chosen, gather(chosen))
    check_disk(prepared, Path("runs") / chosen.name)
    record = describe_run(prepared, choose_engine(prepared, measure=False))
    needs = estimate_run(prepared)
    rounds, per_round = chosen.rounds, prepared.population.per_round
    total = (sum(needs.down.values()) + sum(needs.up.values())) * rounds * per_round
    if as_json:
        document({**to_json(record), "status": "checked", "bytes_total": total})
        return
    model = record.model
    print(record.describe)
    print()
    data = record.data
    print(
        f"data         {' + '.join(data.sources)}: {data.train} training and "
        f"{counted(data.test, 'test example')}, {counted(data.classes, 'class')}"
    )
    print(f"partition    {record.partition.says or record.partition.kind}")
    print(
        f"model        {model.name}, {model.parameters:,} parameters, "
        f"{format_bytes(model.bytes)}, head {model.head or 'none'}"
    )
    print(f"local        {record.local}")
    print(f"cohort       {record.participation}")
    print(f"engine       {record.engine.kind}, {counted(record.engine.workers, 'process')}")
    print(f"down         {_parts(needs.down, model.bytes)}  for each client and round")
    print(f"up           {_parts(needs.up, model.bytes)}  for each client and round")
    print(f"traffic      {format_bytes(total)} in {counted(rounds, 'round')}")
    print(
        f"state        {format_bytes(needs.client_state)} x {needs.clients} clients "
        + (
            f"and {format_bytes(needs.table)} x {needs.clients} at the server "
            if needs.table
            else ""
        )
        + (f"on disk (at most {format_bytes(needs.disk)}), " if needs.disk else "in memory, ")
        + f"{format_bytes(needs.server_state)} at the server"
    )
    for told in record.warnings:
        print(f"warning      {told}")
    print("everything fits together; nothing was trained")


def _parts(sent: dict[str, int], model: int) -> str:
    from fedkeel.cost.memory import format_bytes

    words = [f"{name} {format_bytes(n)}" for name, n in sent.items()]
    return f"{sum(sent.values()) / model:.2f} x model ({', '.join(words)})"
