"""Writing of what administrators get, beside the app of a federation."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import jinja2

from fedkeel.base.named_files import writing
from fedkeel.config import Experiment
from fedkeel.features.budget.feature import privacy_of
from fedkeel.flower.data_on_nodes import is_on_nodes
from fedkeel.flower.handout.messages import (
    AFTER_EACH_ROUND,
    EACH_CLIENT,
    EACH_ROUND,
    MODEL_WORDS,
    Sent,
    answers,
    requests,
)
from fedkeel.flower.handout.places import Places
from fedkeel.flower.node.node import Node
from fedkeel.report.html import render_page, write_page
from fedkeel.version import __version__

FOLDER = "for-it"
"""Folder of the app that holds what is written here. Flower sends none of it to nodes."""

USER, UID = "fedkeel", 1000
"""The user who runs the programs, and its number in a container."""

WITHOUT_SCORES = "each round without scores"

_HERE = Path(__file__).parent


def write_handout(
    experiment: Experiment,
    app: Path,
    places: Places,
    nodes: int,
    node: Node | None,
    why_unknown: str = "",
) -> list[Path]:
    """Write the pages, the units and the container file; return the pages.

    Args:
        experiment: what the federation runs.
        app: the folder of its app.
        places: addresses and folders.
        nodes: number of nodes.
        node: a node with data of the same form, by which bytes are counted; None where there is
            none at hand.
        why_unknown: why there is none.
    """
    has_own_data = is_on_nodes(experiment)
    values = {
        "name": experiment.name,
        "version": __version__,
        "flwr": ".".join(version("flwr").split(".")[:2]),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "nodes": nodes,
        "last": nodes - 1,
        "own_data": has_own_data,
        "user": USER,
        "uid": UID,
        "superlink": places.superlink,
        "host": places.host,
        "port": places.port,
        "loopback_port": places.loopback_port,
        "programs": places.programs,
        "prefix": places.programs.rpartition("/")[0],
        "settings": places.settings,
        "state": places.state,
        "contact": places.contact,
        "entry": _entry(places, nodes, has_own_data),
    }
    sent, received = answers(experiment, node, nodes), requests(experiment, node, nodes)
    kept = None if node is None else sum(spec.nbytes for spec in node.specs.client_state.values())
    page_values = {
        **values,
        "experiment": experiment,
        "privacy": privacy_of(experiment),
        "sent": sent,
        "received": received,
        "total": (_totals(sent, node), _totals(received, node)),
        "model_bytes": sum(item.size or 0 for item in received if item.what == MODEL_WORDS),
        "clients": 1 if node is None else len(node.clients),
        "state_bytes": kept,
        "why_unknown": why_unknown,
        "without_scores": WITHOUT_SCORES,
    }
    folder, pages = app / FOLDER, []
    with writing(f"{folder} cannot be written to."):
        folder.mkdir(parents=True)
        for name, template in (
            ("fedkeel-node.service", "node.service.j2"),
            ("fedkeel-superlink.service", "superlink.service.j2"),
            ("Dockerfile", "Dockerfile.j2"),
        ):
            (folder / name).write_text(_text(template, values), encoding="utf-8")
        for name in ("node", "server"):
            page = render_page(f"{name}.html.j2", folder=_HERE, **page_values)
            pages.append(write_page(page, folder / f"{name}.html"))
    return pages


def _totals(sent: list[Sent], node: Node | None) -> dict[str, int]:
    """Return the bytes of a round, of a node whose clients all take part, by when that is.

    Where not every round has scores, those with them and those without have sums of their own.
    """
    if node is None:
        return {}
    count = len(node.clients)
    sizes = {EACH_CLIENT: count}
    training = sum((i.size or 0) * sizes.get(i.when, 1) for i in sent if i.in_round)
    scores = sum(item.size or 0 for item in sent if item.with_scores)
    if not scores:
        return {EACH_ROUND: training}
    if any(item.when == AFTER_EACH_ROUND for item in sent if item.with_scores):
        return {EACH_ROUND: training + scores}
    return {WITHOUT_SCORES: training, "each round with scores": training + scores}


def _entry(places: Places, nodes: int, has_own_data: bool) -> str:
    """Return the shell's command in a container."""
    config = f'partition-id=$NUMBER num-partitions={nodes} state="{places.state}/state"'
    if has_own_data:
        config += ' data="$DATA"'
    words = [
        "exec fedkeel flower node",
        f"--superlink {places.superlink}",
        f"--root-certificates {places.settings}/ca.crt",
        f"--auth-supernode-private-key {places.settings}/node-$NUMBER",
        f"--node-config {json.dumps(config)}",
        "$OPTIONS",
    ]
    return " ".join(words)


def _text(template: str, values: dict[str, object]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=False,  # these are no pages
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
