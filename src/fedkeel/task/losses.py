"""The losses that have a name, and the user's own.

A loss is a function of a module's output and the target: of each example, [B], or one number for
the batch, []. Named losses look at `scores_of` the output.
"""

from __future__ import annotations

from collections.abc import Callable

from fedkeel.base.lazy import F, Tensor, torch
from fedkeel.base.named_code import ImportTarget, import_object
from fedkeel.base.values import Values, count_of, rows_of
from fedkeel.errors import ModelError, did_you_mean
from fedkeel.task.outputs import Outputs, Target, map_output, scores_of

Loss = Callable[[Outputs, Target], Tensor]
"""(output, target) -> losses [B], or one number for the batch, []. The target is a tensor, or a
mapping of tensors where that is what the examples have."""

IGNORED = -100
"""Target of a token, a pixel or one of several labels that counts neither in a loss nor in a
metric, as in torch."""


def cross_entropy(output: Outputs, y: Tensor) -> Tensor:
    """Return the cross-entropy of each example, [B].

    Args:
        output: scores [B, Y], or [B, Y, ...] for masks, whose mean over the places counts.
        y: labels [B] or [B, ...], or class probabilities of the scores' shape. Places with the
            label -100 do not count.
    """
    scores = scores_of(output)
    losses = F.cross_entropy(scores, y, reduction="none")
    if losses.ndim <= 1:
        return losses
    return _mean_over_places(losses, y)


def token_cross_entropy(output: Outputs, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens of each example, [B].

    Args:
        output: scores [B, T, V] of the next token at each place.
        y: the next tokens [B, T]; those of -100 do not count.
    """
    return _mean_over_places(token_losses(scores_of(output), y), y)


def token_losses(scores: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each token, [B, T], 0 where it does not count.

    The targets may be probabilities [B, T, V], too.
    """
    if y.is_floating_point():
        return F.cross_entropy(scores.movedim(-1, 1), y.movedim(-1, 1), reduction="none")
    return F.cross_entropy(scores.movedim(-1, 1), y, reduction="none", ignore_index=IGNORED)


def _mean_over_places(losses: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return losses.flatten(1).mean(dim=1)
    count = (y != IGNORED).flatten(1).sum(dim=1).clamp(min=1)
    return losses.flatten(1).sum(dim=1) / count


def mse(output: Outputs, y: Tensor) -> Tensor:
    """Return the mean squared error of each example, [B], over its quantities.

    Args:
        output: [B], [B, 1] or the shape of the target.
        y: quantities [B] or [B, D]. Those of [B, D] that are NaN are not known and do not count; an
            example without any that is known has a loss of 0.
    """
    known = are_known(y)
    return _over_quantities((predicted(output, y) - _known(y, known, output)) ** 2, known)


def l1(output: Outputs, y: Tensor) -> Tensor:
    """Return the mean absolute error of each example, [B]; arguments as in `mse`."""
    known = are_known(y)
    return _over_quantities((predicted(output, y) - _known(y, known, output)).abs(), known)


def huber(output: Outputs, y: Tensor) -> Tensor:
    """Return the Huber loss (delta 1) of each example, [B]; arguments as in `mse`."""
    known = are_known(y)
    target = _known(y, known, output)
    return _over_quantities(F.huber_loss(predicted(output, y), target, reduction="none"), known)


def poisson(output: Outputs, y: Tensor) -> Tensor:
    """Return exp(output) - y * output of each example, [B]; arguments as in `mse`.

    The output is the logarithm of the rate, y is a count.
    """
    known = are_known(y)
    target = _known(y, known, output)
    losses = F.poisson_nll_loss(predicted(output, y), target, reduction="none")
    return _over_quantities(losses, known)


def bce(output: Outputs, y: Tensor) -> Tensor:
    """Return the binary cross-entropy of each example, [B], over its labels or places.

    Args:
        output: [B], [B, 1] or the shape of the target: scores before the sigmoid.
        y: 0 or 1, or probabilities: [B] one label, [B, Y] several, [B, H, W] a mask. Of whole
            numbers with several to an example, those of -100 do not count.
    """
    scores, target = predicted(output, y), _as(y, output)
    if y.ndim == 1 or y.is_floating_point():
        losses = F.binary_cross_entropy_with_logits(scores, target, reduction="none")
        return _over_quantities(losses, None)
    counts = y != IGNORED
    target = torch.where(counts, target, 0.0)
    losses = F.binary_cross_entropy_with_logits(scores, target, reduction="none")
    return _mean_over_places(torch.where(counts, losses, 0.0), y)


def dice(output: Outputs, y: Tensor) -> Tensor:
    """Return 1 - the soft Dice coefficient of each example, [B].

    Args:
        output: scores of a mask before the sigmoid, [B, H, W] or [B, 1, H, W]; or [B, Y, H, W]
            before the softmax, whose classes from 1 on are averaged.
        y: masks [B, H, W], of 0 and 1 or of classes; of whole numbers, those of -100 do not count.
    """
    scores = scores_of(output)
    if scores.ndim == y.ndim + 1 and scores.shape[1] > 1:
        shares = scores.softmax(dim=1)[:, 1:]
        classes = torch.arange(1, scores.shape[1], device=y.device).view(-1, *[1] * (y.ndim - 1))
        truth = (y[:, None] == classes).to(scores.dtype)
    else:
        shares = predicted(output, y).sigmoid()[:, None]
        truth = _as(y, output).view_as(shares[:, 0])[:, None]
    if not y.is_floating_point():
        counts = (y != IGNORED)[:, None]
        shares, truth = torch.where(counts, shares, 0.0), torch.where(counts, truth, 0.0)
    shares, truth = shares.flatten(2), truth.flatten(2)
    both = (shares * truth).sum(dim=2)
    return (1 - (2 * both + 1) / (shares.sum(dim=2) + truth.sum(dim=2) + 1)).mean(dim=1)


def cox(output: Outputs, y: Tensor) -> Tensor:
    """Return the negative partial log-likelihood of Cox's model for each event of a batch, [].

    Equal times are treated as Breslow does. Those at risk are looked for in the batch, so that
    larger batches come closer to the likelihood of all. A batch without an event has a loss of 0.

    Args:
        output: logarithm of the relative risk, [B] or [B, 1].
        y: [B, 2] time, and 1 for an event or 0 for the end of observation.
    """
    risk, time, event = scores_of(output).flatten(), y[:, 0], y[:, 1].to(scores_of(output).dtype)
    at_risk = time[None] >= time[:, None]  # [i, j]: whether j is at risk when i has its event
    rates = torch.where(at_risk, risk[None], -torch.inf).logsumexp(dim=1)
    return ((rates - risk) * event).sum() / event.sum().clamp(min=1)


def predicted(output: Outputs, y: Tensor) -> Tensor:
    """Return what is predicted in the shape of the target: an axis of length 1 may be missing.

    Raises:
        ValueError: the shapes differ otherwise.
    """
    scores = scores_of(output)
    if scores.shape == y.shape:
        return scores
    if scores.numel() == y.numel() and [n for n in scores.shape[1:] if n != 1] == [
        n for n in y.shape[1:] if n != 1
    ]:
        return scores.reshape(y.shape)
    raise ValueError(
        f"the output has the shape {list(scores.shape)}, and the target {list(y.shape)}"
    )


def _as(y: Tensor, output: Outputs) -> Tensor:
    return y.to(scores_of(output).dtype)


def are_known(y: Tensor) -> Tensor | None:
    """Return which of several quantities [B, D] of an example are known; None of one or labels."""
    return ~y.isnan() if y.ndim > 1 and y.is_floating_point() else None


def _known(y: Tensor, known: Tensor | None, output: Outputs) -> Tensor:
    """Return targets with 0 for those that are not known: NaN would spoil the gradient."""
    target = _as(y, output)
    return target if known is None else torch.where(known, target, 0.0)


def _over_quantities(losses: Tensor, known: Tensor | None) -> Tensor:
    """Return the mean over the quantities of an example that are known."""
    if losses.ndim == 1 or known is None:
        return losses if losses.ndim == 1 else losses.flatten(1).mean(dim=1)
    count = known.flatten(1).sum(dim=1).clamp(min=1)
    return torch.where(known, losses, 0.0).flatten(1).sum(dim=1) / count


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        cross_entropy,
        token_cross_entropy,
        mse,
        l1,
        huber,
        poisson,
        bce,
        dice,
        cox,
    )
}
"""The losses by name."""

_IMPORTED = ImportTarget(
    noun="loss",
    error=ModelError,
    example="for the function my_loss in my_losses.py write 'my_losses:my_loss'",
    is_kind=lambda value: isinstance(value, torch.nn.Module),
    kind="a function of (output, target), or a torch.nn.Module that was made",
    write="write a function of (output, target) there",
    arguments=2,
    function_libraries=("torch.nn.functional", "fedkeel.task.losses"),
)


def make_loss(given: str | Loss) -> Loss:
    """Return the loss of a name, an import path, or a function.

    Raises:
        ModelError: there is no such loss, it is not a function, or it has parameters to train.
    """
    if isinstance(given, str):
        if ":" in given:
            return make_loss(import_object(given, _IMPORTED))  # type: ignore[arg-type]
        if given not in LOSSES:
            raise ModelError(
                f"There is no loss {given!r}.",
                do=did_you_mean(given, LOSSES) + ", or give a function of (output, target)",
            )
        return LOSSES[given]
    if not callable(given) or isinstance(given, type):
        raise ModelError(
            "The loss is not a function.",
            got=repr(given),
            expected="a name, or (output, target) -> losses [B]",
            do="e.g. 'mse', or torch.nn.CrossEntropyLoss(reduction='none')",
        )
    learns = isinstance(given, torch.nn.Module) and [
        name for name, p in given.named_parameters() if p.requires_grad
    ]
    if learns:
        raise ModelError(
            "The loss has parameters of its own, which are not trained.",
            got=learns[0],
            expected="a loss only of scores and labels",
            do="make them part of the model, or set requires_grad_(False) where they stay",
        )
    return given


OF_QUANTITIES: frozenset[Loss] = frozenset({mse, l1, huber, poisson, cox})
"""Losses whose target is not a label, even where it is a whole number."""


WITH_UNKNOWN: frozenset[Loss] = frozenset({mse, l1, huber, poisson})
"""Losses that leave out quantities that are not known, NaN."""

IGNORING: frozenset[Loss] = frozenset({cross_entropy, token_cross_entropy, bce, dice})
"""Losses that leave out targets of -100."""


def picked_cross_entropy(output: Outputs, y: Tensor) -> Tensor:
    """Return what `cross_entropy` does, in half the operations where each is made by itself.

    Those of torch's own also look for labels of -100, which are left out, and no labels of whole
    examples have.
    """
    scores = scores_of(output)
    if scores.ndim != 2 or y.ndim != 1 or y.is_floating_point():
        return cross_entropy(output, y)
    return -F.log_softmax(scores, dim=1).gather(1, y[:, None]).squeeze(1)


SOFT_TARGETS: dict[Loss, Callable[[Tensor], Tensor]] = {
    cross_entropy: lambda scores: scores.softmax(dim=1),
    token_cross_entropy: lambda scores: scores.softmax(dim=-1),
    mse: lambda scores: scores,
    l1: lambda scores: scores,
    huber: lambda scores: scores,
    bce: lambda scores: scores.sigmoid(),
    poisson: lambda scores: scores.exp(),
}
"""What makes of scores a target of the same loss: probabilities, or quantities."""


def losses_of_each(loss: Loss, output: Outputs, y: Values) -> Tensor:
    """Return the loss of each example by itself, [B], also where that of a batch is one number."""
    losses = loss(output, y)
    if losses.ndim:
        return losses

    def loss_of_example(row: int) -> Tensor:
        one = slice(row, row + 1)
        return loss(map_output(lambda tensor: tensor[one], output), rows_of(y, one))

    return torch.stack([loss_of_example(row) for row in range(count_of(y))])


def named_like(loss: Loss) -> Loss:
    """Return the named loss whose scores mean the same as those of a loss of torch; else the loss.

    So metrics and predictions read the scores of `torch.nn.PoissonNLLLoss` as logarithms, too.
    """
    if isinstance(loss, torch.nn.CrossEntropyLoss):
        return cross_entropy
    if isinstance(loss, torch.nn.BCEWithLogitsLoss):
        return bce
    if isinstance(loss, torch.nn.PoissonNLLLoss) and loss.log_input:
        return poisson
    return loss


def is_plain_cross_entropy(loss: Loss) -> bool:
    """Return whether a loss is the cross-entropy without weights, smoothing or labels left out."""
    if isinstance(loss, torch.nn.CrossEntropyLoss):
        return loss.weight is None and not loss.label_smoothing and loss.ignore_index == IGNORED
    return loss in (cross_entropy, F.cross_entropy)


def quantity_of(loss: Loss) -> Callable[[Tensor], Tensor]:
    """Return what makes of scores the quantities, or of one score the probability, that they mean.

    Metrics of quantities, pictures and predictions all take this.
    """
    known = named_like(loss)
    if known in (bce, dice):
        return torch.sigmoid
    return SOFT_TARGETS[known] if known in OF_QUANTITIES - {cox} else _same


def _same(scores: Tensor) -> Tensor:
    return scores


def loss_name(loss: Loss) -> str:
    """Return the name of a loss for records."""
    return getattr(loss, "__qualname__", type(loss).__name__)
