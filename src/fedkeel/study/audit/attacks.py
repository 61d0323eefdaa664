"""The attacks on one message, each with what it assumes and what it came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedkeel.errors import enumeration
from fedkeel.records.audit import LABEL_GUESSES, RECOVERED, AttackResult
from fedkeel.study.audit import linear
from fedkeel.study.audit.case import Case
from fedkeel.study.audit.constrained import Unprojected, find_cgc, hidden_by_cgc, multipliers
from fedkeel.study.audit.inversion import (
    Descent,
    Guess,
    Progress,
    Reconstruction,
    dlg,
    match_images,
)
from fedkeel.study.audit.membership import loss_scores, matched, separation, update_scores
from fedkeel.study.audit.pictures import pictures_of
from fedkeel.study.audit.quality import NEARER, compare
from fedkeel.tree import tensors

AttackFunction = Callable[[Case, Progress], AttackResult]
"""Makes an attack, and tells of iterations."""

Number = float | None

OTHERS = 200
"""Most other examples that rows of a table are compared with."""

MODEL = "the model, the loss, the learning rate and the number of local steps"


def first_layer(case: Case, progress: Progress) -> AttackResult:
    """Read inputs off the gradients of a first linear layer."""
    seen = case.seen
    layer = linear.first_layer(seen.gradient, case.originals[0].numel())
    if layer is None:
        raise TypeError("no linear layer")
    low, high = case.limits
    inputs = linear.first_inputs(layer[0].double(), layer[1].double(), low, high)
    inputs = inputs[: case.settings.images].reshape(-1, *case.originals.shape[1:])
    return _reconstructed(
        case,
        "linear",
        "Inputs, divided out of a first linear layer",
        "no more than the update; the range of inputs",
        "no search",
        inputs,
        {},
    )


def labels(case: Case, progress: Progress) -> AttackResult:
    """Read labels, or how often each occurs, off the last linear layer."""
    layer = linear.last_layer(case.seen.gradient, case.classes)
    if layer is None:
        raise TypeError("no linear layer")
    truth = np.bincount(case.labels.numpy(), minlength=case.classes)
    count = case.count
    if count == 1:
        counts = np.zeros(case.classes, dtype=np.int64)
        counts[linear.single_label(*layer)] = 1
    elif layer[1] is None:
        raise TypeError("no bias")
    else:
        inputs = case.inputs_of(case.test, 200)
        counts = linear.label_counts(case.model, layer[1], count, inputs)
    right = int(np.minimum(counts, truth).sum())
    guesses = linear.guessed_shares(np.bincount(case.test.data.labels, minlength=case.classes))
    by_guess = {
        name: float(np.minimum(shares, truth / count).sum()) for name, shares in guesses.items()
    }
    numbers: dict[str, Number] = {
        "labels_right": right / count,
        **{f"labels_right_of_{name}": share for name, share in by_guess.items()},
        "total_variation": 1.0 - right / count,
        "total_variation_of_even": 1.0 - by_guess["even"],
        "examples": float(count),
    }
    beside = [f"{count * share:.0f} by {LABEL_GUESSES[name]}" for name, share in by_guess.items()]
    says = f"{right} of {count} labels right, where guessing has {enumeration(beside)}."
    return AttackResult(
        "labels",
        "Labels, and how often each occurs",
        f"{case.target}: {case.sent}",
        f"{MODEL}; how many examples there are"
        + ("" if count == 1 else "; 200 inputs like the clients'"),
        "no search",
        says,
        numbers,
    )


def invert_lbfgs(case: Case, progress: Progress) -> AttackResult:
    """Look for inputs and labels by L-BFGS."""
    how = case.settings
    hidden = _hidden(case)
    result = dlg(
        case.model,
        _guess(case, "dlg", None if case.count > 1 else _known_labels(case)),
        how.lbfgs,
        how.tries,
        () if hidden is None else hidden.directions,
        case.seen.rounding,
        progress,
    )
    budget = f"L-BFGS, {how.tries} starts of at most {how.lbfgs} iterations"
    return _searched(case, "dlg", "Inputs, by matching the gradient (DLG)", budget, result, hidden)


def invert_adam(case: Case, progress: Progress) -> AttackResult:
    """Look for inputs by Adam, with the total variation."""
    how, (low, high) = case.settings, case.limits
    descent = Descent(how.distance, how.iterations, how.lr, how.variation, True, low, high)
    hidden = _hidden(case)
    result = match_images(
        case.model,
        _guess(case, "cosine", _known_labels(case)),
        descent,
        () if hidden is None else hidden.directions,
        progress,
    )
    of = "" if how.iterations >= 32_000 else f" (FedReg's attack has {32_000:,})"
    budget = (
        f"Adam, {how.iterations:,} steps{of}, rate {how.lr:g}, {how.distance} distance, "
        f"total variation {how.variation:g}"
    )
    title = "Inputs, by the direction of the gradient"
    if how.distance == "l2":
        title = "Inputs, by the distance of the gradient (Adam)"
    return _searched(case, "cosine", title, budget, result, hidden)


def members_by_loss(case: Case, progress: Progress) -> AttackResult:
    """Tell trained-on examples by their loss under the model after the round."""
    overheard = case.overheard
    score = partial(loss_scores, case.seen.network, overheard.after, case.seen.buffers)
    return _membership(
        case, "loss", "Who was trained on, by the loss", "the model after the round", score
    )


def members_by_update(case: Case, progress: Progress) -> AttackResult:
    """Tell the examples behind an update by their gradients."""
    seen = case.seen
    gradient = {name: tensor.to(seen.network.dtype) for name, tensor in seen.gradient.items()}
    score = partial(update_scores, seen.network, seen.params, seen.buffers, gradient)
    return _membership(
        case, "updates", "Who was trained on, by the update", f"the update; {MODEL}", score
    )


def _membership(
    case: Case,
    attack: str,
    title: str,
    knows: str,
    score: Callable[[Tensor, Tensor], np.ndarray[tuple[int], np.dtype[np.float64]]],
) -> AttackResult:
    others = case.others
    ours, theirs = matched(*case.kinds, case.settings.examples, case.random(attack))
    split = separation(
        score(case.originals[torch.from_numpy(ours)], case.labels[torch.from_numpy(ours)]),
        score(others.inputs(theirs), torch.from_numpy(others.data.labels[others.rows[theirs]])),
    )
    return AttackResult(
        attack,
        title,
        f"{case.target}: {case.sent}",
        f"{knows}; the candidates with their labels",
        f"{split.members} examples of theirs and {split.others} {others.says}, "
        "with the same labels",
        split.sentence(),
        {**split.numbers(), "others_alike": float(others.alike)},
    )


def _guess(case: Case, purpose: str, known: Tensor | None) -> Guess:
    count = min(case.count, case.settings.images)
    shape = (count, *case.originals.shape[1:])
    return Guess(shape, case.torch_random(purpose), case.classes, known)


def _known_labels(case: Case) -> Tensor | None:
    """Return [m] labels as the attacker reads them off the last layer; None where it cannot."""
    if case.simulated is not None:  # its last layer is not that of a gradient
        return None
    layer = linear.last_layer(case.seen.gradient, case.classes) if case.classes else None
    if layer is None:
        return None
    count = min(case.count, case.settings.images)
    if case.count == 1:
        return torch.tensor([linear.single_label(*layer)])
    if layer[1] is None:
        return None
    counts = linear.label_counts(case.model, layer[1], count, case.inputs_of(case.test, 200))
    return torch.from_numpy(np.repeat(np.arange(case.classes), counts))


def _hidden(case: Case) -> Unprojected | None:
    """Return what FedGC's projection hides of a client's update, for an attacker who knows it."""
    part = find_cgc(case.overheard.prepared.plan)
    if part is None or not case.settings.adaptive or case.seen.view != "client":
        return None
    return hidden_by_cgc(part, case.seen)


def _searched(
    case: Case,
    attack: str,
    title: str,
    budget: str,
    result: Reconstruction,
    hidden: Unprojected | None,
) -> AttackResult:
    model = case.model
    size = float(sum((t * t).sum() for t in model.target.values()))
    numbers: dict[str, Number] = {"distance": result.distance, "gradient_norm": size**0.5}
    knows = f"{MODEL}; how many examples there are"
    if case.simulated is not None:
        knows += "; FedReg and its numbers, whose step it makes"
    if hidden is not None:
        gradient = tensors({k: g.detach() for k, g in model(result.x, result.y).items()})
        numbers["constrained_groups"] = float(len(hidden.directions))
        numbers["groups"] = float(hidden.groups)
        moved = multipliers(hidden, model.target, gradient)
        numbers["hidden_share"] = (sum(m * m for m in moved) / max(size, 1e-300)) ** 0.5
        knows += "; the direction that the server sent, and FedGC's projection"
    return _reconstructed(case, attack, title, knows, budget, result.x, numbers)


def _reconstructed(
    case: Case,
    attack: str,
    title: str,
    knows: str,
    budget: str,
    inputs: Tensor,
    numbers: Mapping[str, Number],
) -> AttackResult:
    count = max(len(inputs), 1)
    others = case.inputs_of(case.others, count + OTHERS)
    number = min(count, (len(others) + 1) // 2)
    guesses, others = others[:number], others[number:]
    is_picture = case.originals.ndim == 4  # pictures have a bound of their own
    if not is_picture and case.others is not case.test:
        more = case.inputs_of(case.test, OTHERS - len(others))
        known = (more[:, None] == guesses[None]).flatten(2).all(dim=2).any(dim=1)
        others = torch.cat([others, more[~known]])
    beside = None if is_picture else others
    compared = compare(inputs, case.originals, case.units, beside)
    guessed = compare(guesses, case.originals, case.units, beside)
    share = compared.recovered
    values: dict[str, Number] = {
        "psnr": compared.mean_psnr,
        "psnr_best": max(compared.psnr, default=None),
        "psnr_of_others": guessed.mean_psnr,
        "psnr_best_of_others": max(guessed.psnr, default=None),
        "ssim": compared.ssim,
        "recovered": share,
        "recovered_of_others": guessed.recovered,
        "examples": float(case.count),
        "images": float(len(inputs)),
        "others_alike": float(case.others.alike),
        **numbers,
    }
    if compared.mean_psnr is None or guessed.mean_psnr is None:
        says = "No input is given away."
    else:
        bound = f"{RECOVERED:g} dB or more"
        if beside is not None:
            bound += f", and {NEARER:g} dB more than each of {len(beside)} others"
        reached = (
            f"{100 * share:.0f} % of the examples recovered ({bound})"
            if share
            else f"none counts as recovered ({bound}); the best has {max(compared.psnr):.1f} dB"
        )
        says = (
            f"PSNR {compared.mean_psnr:.1f} dB, where {case.others.says} have "
            f"{guessed.mean_psnr:.1f}; {reached}."
        )
    pictures = pictures_of(inputs, case.originals, compared, case.units)
    return AttackResult(
        attack, title, f"{case.target}: {case.sent}", knows, budget, says, values, pictures
    )


ATTACKS: Mapping[str, AttackFunction] = {
    "linear": first_layer,
    "labels": labels,
    "dlg": invert_lbfgs,
    "cosine": invert_adam,
    "loss": members_by_loss,
    "updates": members_by_update,
}
