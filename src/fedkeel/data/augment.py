"""Random changes to examples while training: crops and mirrors of images, or a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.named_code import ImportTarget, import_object
from fedkeel.base.rng import generator, seed_torch, torch_seed
from fedkeel.base.user_code import one_line, where_raised
from fedkeel.base.values import Values, copy_of, tensors_of
from fedkeel.errors import DataError, FedkeelError

Transform = Callable[[Any, Any, np.random.Generator], tuple[Any, Any]]
"""(inputs [B, ...], targets [B, ...], stream of random numbers) -> both, of the same form."""

_TRANSFORM = ImportTarget(
    "data.augment",
    DataError,
    "my_transforms:flip",
    lambda value: False,
    "a function of (x, y, random) that returns x and y",
    "write a function there: def flip(x, y, random): ... return x, y",
    arguments=3,
)

_TRIALS = 4
"""How often a transform is tried twice, before a run, to see whether it repeats itself."""


def named_transform(name: str) -> bool | Transform:
    """Return what `fedkeel.config.Data` calls by a name: nothing, crops (True), or a function.

    Raises:
        DataError: there is no such function.
    """
    if ":" not in name:
        return name == "crop_flip"
    function: Any = import_object(name, _TRANSFORM)
    transform: Transform = function
    return transform


def transformed(
    function: Transform, x: Values, y: Values, seed: int, round: int, client: int, step: int
) -> tuple[Values, Values]:
    """Return a batch after a user's transform, the same one whenever it is made again.

    It draws from the stream (seed, "augment/STEP", round, client). While it runs, the generator of
    torch is seeded by the same name, so that transforms of torchvision repeat too.

    Args:
        function: the transform.
        x: [B, ...] inputs, which the function may change in place.
        y: [B, ...] targets, likewise.
        seed: seed of the run.
        round: round number, from 0.
        client: index of the client.
        step: number of the local step in the round, from 1.

    Raises:
        DataError: it raised an error, or returned a batch of another form.
    """
    name, forms = f"augment/{step}", (_form(x), _form(y))
    device = tensors_of(x)[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_torch(torch_seed(seed, name, round, client))
        try:
            result = function(x, y, generator(seed, name, round, client))
        except FedkeelError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise DataError(
                f"augment raised an error at client {client}, step {step}.",
                got=one_line(error),
                why=f"raised in {where_raised(error)}",
            ) from error
    if not isinstance(result, tuple) or tuple(map(_form, result)) != forms:
        raise DataError(
            "augment returned something else than a batch of the same form.",
            got=", ".join(map(_form, result)) if isinstance(result, tuple) else _form(result),
            expected=f"(x, y), here {' and '.join(forms)}",
            why="the model is evaluated on examples as they are",
        )
    return result


def check_transform(function: Transform, x: Values, y: Values, seed: int) -> None:
    """Refuse a transform that does not repeat itself.

    Args:
        function: the transform.
        x: [B, ...] a few inputs.
        y: [B, ...] their targets.
        seed: seed of the run.

    Raises:
        DataError: it does not, as where it draws from `random` or `numpy.random`.
    """
    for step in range(1, _TRIALS + 1):
        first, again = (
            transformed(function, copy_of(x), copy_of(y), seed, 0, 0, step) for _ in range(2)
        )
        tensors = [[*tensors_of(a), *tensors_of(b)] for a, b in (first, again)]
        if not all(map(torch.equal, *tensors)):
            raise DataError(
                "augment does not repeat itself: one batch became two different ones.",
                why="a run has to give the same bits again, in every engine and after a restart",
                do="draw from its third argument, a numpy.random.Generator, or from torch; not "
                "from random or numpy.random",
            )


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}".replace("torch.", "")
    if isinstance(value, dict):
        return ", ".join(f"{key} {_form(item)}" for key, item in value.items())
    return type(value).__name__


@dataclass(frozen=True)
class Crops:
    """Where images are cropped, and which are mirrored.

    Args:
        offsets: [2, B] first row and column of each crop, in the padded image, int64.
        mirrored: [B] whether each is mirrored.
        padding: zeros on each side, in pixels.
    """

    offsets: Tensor
    mirrored: Tensor
    padding: int = 4


def crops(generator: np.random.Generator, batch: int, padding: int = 4) -> Crops:
    """Draw the crops of B images: offsets uniform in 0..2 * padding, half of them mirrored.

    Args:
        generator: where they come from; the same stream gives the same crops.
        batch: B.
        padding: zeros on each side, in pixels, >= 0.
    """
    offsets = generator.integers(0, 2 * padding + 1, size=(2, batch))
    mirrored = generator.random(batch) < 0.5
    return Crops(torch.from_numpy(offsets), torch.from_numpy(mirrored), padding)


def crop_flip(x: Tensor, where: Crops) -> Tensor:
    """Pad images with zeros, crop each to its size, and mirror some.

    The border is zero in the numbers that come in. On normalised images that is the mean colour,
    where code that pads before it normalises has black.

    Args:
        x: [B, C, H, W] images, left unchanged.
        where: the crops of the B images, on the same device.

    Returns:
        [B, C, H, W], new memory, on the device of `x`.

    >>> crop_flip(torch.ones(1, 1, 2, 2), crops(np.random.default_rng(0), 1, padding=0)).sum()
    tensor(4.)
    """
    batch, channels, height, width = x.shape
    padding = where.padding
    ahead = torch.arange(width, device=x.device)
    turned = torch.where(where.mirrored[:, None], ahead.flip(0), ahead)
    columns = where.offsets[1][:, None] + turned  # [B, W]
    rows = where.offsets[0][:, None] + torch.arange(height, device=x.device)  # [B, H]
    pixels = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]  # [B, H, W]
    index = pixels.reshape(batch, 1, -1)
    padded = torch.nn.functional.pad(x, (padding, padding, padding, padding))
    picked = padded.flatten(2).gather(2, index.expand(-1, channels, -1))
    return picked.reshape(x.shape)
