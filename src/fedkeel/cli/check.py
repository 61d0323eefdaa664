"""``fedkeel check``: everything but the training."""

from __future__ import annotations

from pathlib import Path

from fedkeel.cli.common import JSON, ExperimentSource, document, many_imports, takes_experiment
from fedkeel.errors import counted


@takes_experiment
def check(source: ExperimentSource, as_json: bool = JSON) -> None:
    """Validate an experiment, and estimate its memory and traffic. Trains nothing."""
    from fedkeel.cli.experiment import check_methods, read_experiment

    experiment = read_experiment(source)
    check_methods([experiment.method], experiment.weights)

    with many_imports():
        from fedkeel.base.memory import format_bytes
        from fedkeel.engine.choose.memory import check_disk
        from fedkeel.records.run_record import to_json
        from fedkeel.runner.ingredients import gather
        from fedkeel.runner.manifest import describe_run
        from fedkeel.runner.prepare import prepare

    prepared = prepare(experiment, gather(experiment))
    check_disk(prepared, Path("runs") / experiment.name)
    record = describe_run(prepared)
    model, data, needs = record.model, record.data, record.estimate
    of_client = sum(needs.down.values()) + sum(needs.up.values())
    total = of_client * experiment.rounds * prepared.population.per_round
    if as_json:
        document({**to_json(record), "status": "checked", "bytes_total": total})
        return
    print(record.describe)
    print()
    print(
        f"data         {' + '.join(data.sources)}: {data.train} training and "
        f"{counted(data.test, 'test example')}, {counted(data.classes, 'class')}"
    )
    if data.test_groups:
        values = f"{counted(data.test_groups, 'value')} of {data.grouped_by!r}"
        print(f"test set     all examples of {values}")
    print(f"partition    {record.partition.says or record.partition.kind}")
    print(
        f"model        {model.name}, {model.parameters:,} parameters, "
        f"{format_bytes(model.bytes)}, head {model.head or 'none'}"
    )
    print(f"local        {record.local}")
    print(f"cohort       {record.participation}")
    engine = record.engine
    where = f" on {', '.join(engine.devices)}" if engine.devices else ""
    print(f"engine       {engine.kind}, {counted(engine.workers, 'process')}{where}")
    for way, parts in (("down", needs.down), ("up", needs.up)):
        sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        models = f"{sum(parts.values()) / model.bytes:.2f} x model ({sizes})"
        print(f"{way:<12} {models}  for each client and round")
    print(f"traffic      {format_bytes(total)} in {counted(experiment.rounds, 'round')}")
    at_server = f"and {format_bytes(needs.table)} x {needs.clients} at the server "
    print(
        f"state        {format_bytes(needs.client_state)} x {needs.clients} clients "
        + (at_server if needs.table else "")
        + (f"on disk (at most {format_bytes(needs.disk)}), " if needs.disk else "in memory, ")
        + f"{format_bytes(needs.server_state)} at the server"
    )
    print(f"evaluation   {format_bytes(needs.evaluation)} for what the metrics keep")
    for message in record.warnings:
        print(f"warning      {message}")
    print("everything fits together; nothing was trained")
