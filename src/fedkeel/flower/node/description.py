"""What a node says of itself: its clients, and the form and the sums of their data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedkeel.base.values import Values, only_tensor
from fedkeel.data.read.scaling import Moments
from fedkeel.engine.evaluation import split_examples
from fedkeel.engine.prepared import Prepared
from fedkeel.flower.protocol import (
    Agreement,
    ClientDescription,
    ColumnSums,
    Form,
    NodeDescription,
    NodeTraining,
)
from fedkeel.version import __version__


def describe(
    prepared: Prepared,
    clients: Iterable[int],
    name: str,
    agreement: Agreement,
    training: NodeTraining,
) -> NodeDescription:
    """Return the description of a node.

    Args:
        prepared: the run, as the node sees it.
        clients: the clients that it plays.
        name: the node's name, "" for none.
        agreement: what server and node have to agree on.
        training: how the node trains.
    """
    data, sizes = prepared.setup.federation.data, prepared.setup.federation.sizes
    test_sizes = split_examples(prepared.setup, "clients").sizes
    return NodeDescription(
        clients=tuple(
            ClientDescription(
                client=k, train_examples=int(sizes[k]), test_examples=int(test_sizes[k])
            )
            for k in sorted(clients)
        ),
        inputs=_forms(data.x),
        targets=_forms(data.y),
        classes=data.classes,
        labels=data.label_names,
        columns=data.columns,
        data_digest=data.fingerprint(),
        name=name,
        version=__version__,
        agreement=agreement,
        sums=_sums(prepared) if needs_scale(prepared) else None,
        training=training,
    )


def needs_scale(prepared: Prepared) -> bool:
    """Return whether the inputs are to be standardised by the examples of all nodes."""
    return prepared.setup.federation.how.get("normalize") == "standardize"


def _sums(prepared: Prepared) -> ColumnSums:
    """Return the sums of the training inputs, by which the server finds the scale of all nodes."""
    federation = prepared.setup.federation
    x = only_tensor(federation.data.x, "standardising")
    is_last = federation.how.get("channels") == "last"
    x = x[torch.from_numpy(federation.rows)]
    moments = Moments.of(x.movedim(-1, 1) if is_last else x)
    if federation.data.schema is not None:
        moments = moments.without(federation.data.schema.is_binary)
    return ColumnSums.of(moments)


def _forms(values: Values) -> dict[str, Form]:
    """Return the form of each tensor by its name, "" where there is one."""
    named = {"": values} if isinstance(values, Tensor) else values
    return {
        name: Form(shape=tuple(tensor.shape[1:]), whole=not tensor.is_floating_point())
        for name, tensor in named.items()
    }
