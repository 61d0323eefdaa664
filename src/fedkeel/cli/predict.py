"""``fedkeel predict`` and ``fedkeel export``: using the trained model of a run."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import typer

from fedkeel.base.named_files import writing
from fedkeel.cli.common import JSON, TRUST, document, say, stderr
from fedkeel.errors import ConfigError

RUN = typer.Argument(..., metavar="RUN", help="Run folder of a finished run.")
WHICH = typer.Option(
    "last", "--model", metavar="last|best", help="The model after the last round, or the best one."
)

ANOTHER = "see that its folder is there, or name another file"


def predict(
    run: Path = RUN,
    data: Path = typer.Argument(
        ..., metavar="DATA", help="A table, .npz file, image or folder; hf:NAME for text."
    ),
    which: str = WHICH,
    client: str = typer.Option(
        None,
        "--client",
        help="Whose rows these are, and whose model is taken, where each client has its own.",
    ),
    out: Path = typer.Option(None, "--out", help="CSV file that is written; standard output else."),
    as_json: bool = JSON,
    trust: bool = TRUST,
) -> None:
    """Apply a trained model to new data, made ready as in training.

    The data need no labels. A table keeps its columns that are not inputs, such as an identifier;
    behind them come the prediction and the probability of each class. Of text the tokenizer of the
    training makes tokens; the column of text is kept too.
    """
    from fedkeel.records.client_models import model_told
    from fedkeel.records.files import write_text
    from fedkeel.task.predict.trained_model import load

    if out is not None and out.exists() and Path(data).exists() and out.samefile(data):
        raise ConfigError(
            "--out is the file of the rows.",
            got=str(out),
            why="the predictions would take the place of the data",
            do="name another file",
        )
    whose = None if _is_for_scale(run, client) else client
    model = load(run, which=which, client=whose, trust=trust)
    predictions = model.predict(data, client=client)
    table = predictions.table()
    if told := model_told(model.record, whose):
        say(stderr(), f"model   {told}")
    for warning in predictions.warnings:
        say(stderr(), f"warning: {warning}")
    if as_json:
        rows = zip(*table.values(), strict=True)
        document([dict(zip(table, row, strict=True)) for row in rows])
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    if out is None:
        print(text.getvalue(), end="")
        return
    with writing(f"{out} cannot be written.", ANOTHER):
        write_text(out, text.getvalue())
    say(stderr(), f"wrote {len(predictions):,} predictions to {out}")


def _is_for_scale(run: Path, client: str | None) -> bool:
    """Return whether a client only says by whose scale the inputs are standardised."""
    from fedkeel.records.client_models import has_client_models
    from fedkeel.records.folder import RunFolder

    if client is None:
        return True
    record = RunFolder(run).read_run()
    return bool(record.data.client_scales) and not has_client_models(record)


def export(
    run: Path = RUN,
    file: Path = typer.Argument(..., metavar="FILE", help="MODEL.onnx or MODEL.pt2"),
    which: str = WHICH,
    client: str = typer.Option(
        None, "--client", help="Whose own model, where each client has one."
    ),
    trust: bool = TRUST,
) -> None:
    """Write a trained model for programs without fedkeel, as ONNX or for torch.export.load.

    It standardises its inputs itself; the names of columns and labels stand in the file.
    """
    from fedkeel.records.client_models import model_told
    from fedkeel.task.predict.trained_model import load

    model = load(run, which=which, client=client, trust=trust)
    with writing(f"{file} cannot be written.", ANOTHER):
        model.export(file)
    if told := model_told(model.record, client):
        say(stderr(), f"model   {told}")
    say(stderr(), f"wrote {file}")
    if (schema := model.preparation.schema) is not None:
        say(stderr(), f"needs {schema.width_told}, in the order of its 'schema'")
