"""A node with data of the form that the sites have: it knows shapes and bytes of all messages."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from fedkeel.base.named_files import expanded
from fedkeel.config import Experiment
from fedkeel.errors import ConfigError, FedkeelError
from fedkeel.flower.data_on_nodes import how_to_move, is_on_nodes
from fedkeel.flower.node.configuration import make_node
from fedkeel.flower.node.node import Node

NO_DATA = (
    "only the sites have data. Give a file of the same form, such as one with a few made-up rows: "
    "fedkeel flower export --data FILE. Nothing of its content is written."
)


def example_node(experiment: Experiment, data: str | None, nodes: int) -> tuple[Node | None, str]:
    """Return a node that makes the messages of a federation, or None and why there is none.

    Args:
        experiment: what the federation runs.
        data: where the data stay on the nodes: a path of data of the same form, or an import path
            of a function, None where there are none at hand.
        nodes: number of nodes.

    Raises:
        FedkeelError: these data cannot be used, or are not asked for.
    """
    has_own_data = is_on_nodes(experiment)
    if data is not None and not has_own_data:
        raise ConfigError(
            "--data goes with data.source = 'nodes'.",
            got=f"data.source = {experiment.data.source!r}",
            do=how_to_move(experiment, nodes),
        )
    if has_own_data and data is None:
        return None, NO_DATA
    with TemporaryDirectory() as folder:
        config: dict[str, object] = {
            "partition-id": 0,
            "num-partitions": nodes,
            "state": str(Path(folder)),
        }
        if data is not None:
            config["data"] = data if ":" in data else str(expanded(data).absolute())
        try:
            return make_node(experiment, config), ""
        except FedkeelError as error:
            if data is not None:
                raise
            return None, f"the data of the experiment cannot be read here ({error.what})"
