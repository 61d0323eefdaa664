"""The files of the clients' own models in a run folder, and the error where no model is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote

from fedkeel.errors import RunError, counted, did_you_mean
from fedkeel.records.baselines import LOCAL
from fedkeel.records.run_record import RunRecord

CLIENT_MODELS = "models"
"""Folder in a run folder with a file for each client that has a model of its own."""

_LONGEST = 100
"""Characters of a name that becomes the name of a file as it is."""

_DEVICES = {"con", "prn", "aux", "nul", *(f"{p}{i}" for p in ("com", "lpt") for i in range(10))}
"""Names that are not files on Windows."""


def client_names(record: RunRecord) -> list[str]:
    """Return the names of the clients [C]; their numbers where they have none."""
    partition = record.partition
    return list(partition.names) or [str(k) for k in range(partition.clients)]


def client_files(names: Sequence[str]) -> list[str]:
    """Return the file of each client's model in the run folder [C], all different on any system.

    A name with characters that not every system allows in one is written as in a URL. One that is
    too long, is a device of Windows, or differs from another one only by case becomes the client's
    number, with two underscores before it.

    >>> client_files(["north", "a/b", "..", "St. Anna", "NUL"])[:3]
    ['models/north.safetensors', 'models/a%2Fb.safetensors', 'models/%2E%2E.safetensors']
    """
    quoted = [quote(name, safe=" -_").replace(".", "%2E") for name in names]
    count = Counter(name.lower() for name in quoted)
    return [
        f"{CLIENT_MODELS}/{name if _is_safe(name, count) else f'__{k}'}.safetensors"
        for k, name in enumerate(quoted)
    ]


def _is_safe(name: str, count: Counter[str]) -> bool:
    """Return whether a quoted name can be that of a file beside the others."""
    is_plain = 0 < len(name) <= _LONGEST and name == name.strip(" ") and not name.startswith("__")
    return is_plain and count[name.lower()] == 1 and name.lower() not in _DEVICES


def client_file(record: RunRecord, client: str) -> str:
    """Return the file of a client's own model in the run folder.

    Args:
        record: what the run says of itself.
        client: name of the client, or its number where clients have no names.

    Raises:
        RunError: there is no such client, or the run has left no model of it.
    """
    names = client_names(record)
    if client not in names:
        raise RunError(
            f"The run has no client {client!r}.",
            do=did_you_mean(client, names) if len(names) <= 1000 else "name one of its clients",
        )
    file = client_files(names)[names.index(client)]
    if file in record.digests:
        return file
    if has_client_models(record):
        raise RunError(
            f"There is no model of client {client!r}.",
            why="it has not taken part in any round, so what it keeps is not trained",
            do="take another client, or train for more rounds",
        )
    raise RunError(
        f"The run has left no client's own model ({record.method}).",
        why=_why_none(record),
        do="take the model that all clients share, without naming a client; if each has its own, "
        'run with engine.client_models = "all"',
    )


def _why_none(record: RunRecord) -> str:
    if record.status != "finished":
        return "it is not finished"
    if record.engine.kind == "flower":
        return "a client's own model stays on its node"
    return (
        "all clients share one model, or their own were not kept: together they take more than "
        "256 MB, or each predicts with the client's examples beside the model (knnper)"
    )


def has_client_models(record: RunRecord) -> bool:
    """Return whether a run has left models of its clients."""
    return any(name.startswith(f"{CLIENT_MODELS}/") for name in record.digests)


def kept_clients(record: RunRecord) -> list[str]:
    """Return the names of the clients whose own models a run has left, in their order."""
    names = client_names(record)
    files = client_files(names)
    return [name for name, file in zip(names, files, strict=True) if file in record.digests]


def model_told(record: RunRecord, client: str | None) -> str:
    """Return in words which model of a run is taken, "" where there is only one."""
    if client is not None:
        return f"that of client {client!r}"
    if not (kept := kept_clients(record)):
        return ""
    have = "has a model of its own" if len(kept) == 1 else "have models of their own"
    count = counted(len(kept), "client")
    return f"the global one; {count} {have}: --client NAME, such as {kept[0]!r}"


def has_single_model(record: RunRecord) -> bool:
    """Return whether the server's model of a run has all that was trained."""
    if record.client_parameters is None:  # a run of an earlier version
        return record.method != LOCAL and record.judges != "personal"
    return record.method != LOCAL and not record.client_parameters


def no_single_model(record: RunRecord) -> RunError:
    """Return the error of one who asks for the single model of a run that has none."""
    if kept := kept_clients(record):
        do = (
            f"take a client's: result.client_model({kept[0]!r}), fedkeel.load(RUN, "
            f"client={kept[0]!r}), or --client {kept[0]!r} of fedkeel predict and fedkeel export"
        )
    else:
        do = 'run with engine.client_models = "all", which keeps each client\'s own model'
    parameters = record.client_parameters
    why = "each client has trained its own, or has parameters of its own"
    if record.method == LOCAL:
        why = "each client has trained its own"
    elif parameters:
        more = f" and {len(parameters) - 2} more" if len(parameters) > 2 else ""
        why = (
            f"each client has its own {', '.join(parameters[:2])}{more}, and the server has none "
            "that are trained for all clients"
        )
    return RunError(f"A run of {record.method!r} has no single model.", why=why, do=do)
