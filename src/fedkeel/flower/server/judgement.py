"""Which replies of clients that have trained are outliers."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedkeel.data import batches
from fedkeel.engine.base import TrainedCohort, TrainingSetup
from fedkeel.engine.local import LocalResult
from fedkeel.flower.server.outliers import (
    Outliers,
    message_sizes,
    norms,
    number_sizes,
    without,
)
from fedkeel.method.round_values import Replies
from fedkeel.tree import Tree, map_tensors, substates, tensors


def outlying_rows(
    outliers: Outliers, setup: TrainingSetup, trained: TrainedCohort, lr: float, params: Tree
) -> dict[int, str]:
    """Return the rows of replies that are outliers, each with the reason.

    The numbers that a client says of its training are judged as its messages are. The norm of an
    update is divided by the learning rate and by the root of the number of steps that the client
    was asked for. A first update, with which none can be compared, is compared with the model.

    Args:
        outliers: judges them.
        setup: tells how many steps clients were asked for.
        trained: the replies; those that are not finite are not judged.
        lr: local learning rate of the round.
        params: the model that clients were sent.
    """
    replies = trained.replies
    numbers = {"a training loss": trained.loss}
    numbers |= {f"the diagnostic {name}": values for name, values in trained.diagnostics.items()}
    sizes = setup.federation.sizes[replies.clients]
    steps = [batches.count_steps(setup.training.local, int(size)) for size in sizes]
    scale = np.sqrt(np.maximum(np.array(steps), 1.0)) * (lr if lr > 0.0 else 1.0)
    messages = message_sizes(replies.update, replies.buffers, replies.uploads, scale)
    model = norms([tensor[None] for tensor in params.values()]) if params else np.zeros(1)
    judged = without({**number_sizes(numbers), **messages}, ~replies.finite)
    return outliers.judge(replies.clients, judged, first=model / scale)


def outlying_reply(
    outliers: Outliers,
    setup: TrainingSetup,
    client: int,
    result: LocalResult,
    lr: float,
    params: Tree,
) -> str | None:
    """Return why a reply is an outlier that has come by itself, None where it is not an outlier.

    Args:
        outliers: judges it.
        setup: as in `outlying_rows`.
        client: whose it is.
        result: the reply.
        lr: local learning rate of the model that the client was sent.
        params: a model that clients are sent.
    """

    def row(tensor: Tensor) -> Tensor:
        return tensor[None]

    reply, one = result.reply, np.array([result.examples])
    replies = Replies(
        clients=np.array([client]),
        examples=setup.federation.sizes[[client]],
        processed=one,
        finite=np.array([bool(reply.finite)]),
        update=tensors(map_tensors(row, dict(reply.update))),
        buffers=tensors(map_tensors(row, dict(reply.buffers))),
        uploads=substates(map_tensors(row, dict(reply.uploads))),
    )
    trained = TrainedCohort(
        replies=replies,
        loss=np.array([float(reply.loss)]),
        steps=np.array([result.steps]),
        diagnostics={name: np.array([float(t)]) for name, t in reply.diagnostics.items()},
    )
    return outlying_rows(outliers, setup, trained, lr, params).get(0)
