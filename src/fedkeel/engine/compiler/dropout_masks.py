"""Draws dropout masks before the compiled steps that use them.

Each client has a generator of its own, seeded as when the client trains alone. So the masks depend
neither on the other clients nor on their number, and a compiled step, which gets the masks as
arguments, draws nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedkeel.base.dispatch import OperationMode
from fedkeel.base.values import joined
from fedkeel.engine.compiler.errors import CannotCompile
from fedkeel.engine.compiler.graph_nodes import draws_random_numbers
from fedkeel.errors import first_line
from fedkeel.method.context import Ints
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network

aten = torch.ops.aten

AxisOrder = tuple[int, ...]
"""A mask's axes, without the client axis, from the slowest to the fastest in memory."""

Generators = Sequence[torch.Generator] | None
"""One generator for each client on the client axis; none where no random numbers are expected. None
stands for a single client without a client axis, which draws from torch's default generator."""


@dataclass(frozen=True)
class MaskSpec:
    """The form of a dropout mask.

    Args:
        shape: of the mask, with the client axis where there is one.
        probability: of a one, in [0, 1].
        dtype: of its zeros and ones.
        device: where it lies.
        order: the order in which torch fills it; () for the axes' own order.
    """

    shape: tuple[int, ...]
    probability: float
    dtype: torch.dtype
    device: torch.device
    order: AxisOrder = ()

    def draw(self, generators: Generators, real_examples: Ints | None = None) -> Tensor:
        """Return a mask.

        Args:
            generators: what it is drawn from.
            real_examples: [n] each client's examples that are not padding; the mask is drawn
                only for these. None where all are real.

        Raises:
            CannotCompile: there is no generator for each client.
        """
        new = torch.empty if real_examples is None else torch.zeros
        out = new(self.shape, dtype=self.dtype, device=self.device)
        if generators is None:
            self._fill(out if real_examples is None else out[: real_examples[0]], None)
            return out
        if len(generators) < len(out):
            raise CannotCompile(DRAWS)
        for i, (mask, generator) in enumerate(zip(out, generators, strict=False)):
            self._fill(mask if real_examples is None else mask[: real_examples[i]], generator)
        return out

    def _fill(self, out: Tensor, generator: torch.Generator | None) -> None:
        order = self.order
        if order != tuple(sorted(order)):
            reordered = out.new_empty([out.shape[axis] for axis in order])
            as_filled = reordered.permute([order.index(axis) for axis in range(out.ndim)])
            out.copy_(as_filled.bernoulli_(self.probability, generator=generator))
        elif out.device.type == "cpu" and _draws_as_torch(
            tuple(out.shape), self.probability, out.dtype
        ):
            _fill_by_comparison(out, self.probability, generator)
        else:
            out.bernoulli_(self.probability, generator=generator)


DRAWS = "the model draws random numbers, or may (attention does where it drops out)"


def _fill_by_comparison(
    out: Tensor, probability: float, generator: torch.Generator | None
) -> Tensor:
    """Fill a mask by comparing uniform numbers: it takes two thirds of the time of `bernoulli_`."""
    uniform = torch.rand(out.shape, dtype=torch.float64, generator=generator)
    return torch.lt(uniform, probability, out=out)


@cache
def _draws_as_torch(shape: tuple[int, ...], probability: float, dtype: torch.dtype) -> bool:
    """Return whether `_fill_by_comparison` draws what torch draws: builds of torch differ."""
    first, second = (torch.Generator().manual_seed(1) for _ in range(2))
    expected = torch.empty(shape, dtype=dtype).bernoulli_(probability, generator=first)
    mask = _fill_by_comparison(torch.empty(shape, dtype=dtype), probability, second)
    return torch.equal(expected, mask) and torch.equal(first.get_state(), second.get_state())


class MaskMode(OperationMode):
    """Replaces the drawing of dropout masks.

    Args:
        mask_for: returns a mask that may be written over.
        on_other_draw: is called with any other random operation before it is done.
    """

    def __init__(
        self, mask_for: Callable[[MaskSpec], Tensor], on_other_draw: Callable[[], None]
    ) -> None:
        super().__init__()
        self._mask_for, self._on_other_draw = mask_for, on_other_draw

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do an operation, a random one with the mask that it is given."""
        kwargs = kwargs or {}
        if not draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        if func in (aten.bernoulli.p, aten.bernoulli_.float) and not kwargs:
            like, probability = (*args, 0.5)[:2]  # a probability of a half is not passed on
            mask = self._mask(like, probability, like.dtype)
            return mask if func is aten.bernoulli.p else like.copy_(mask)
        if func is aten.native_dropout.default and args[2]:  # on a GPU
            x, rate, _ = args
            mask = self._mask(x, 1.0 - rate, torch.bool)
            return x * mask * (1.0 / (1.0 - rate)), mask
        self._on_other_draw()
        return func(*args, **kwargs)

    def _mask(self, like: Tensor, probability: float, dtype: torch.dtype) -> Tensor:
        strides = like.stride()
        order = tuple(sorted(range(like.ndim), key=lambda axis: -strides[axis]))
        return self._mask_for(MaskSpec(tuple(like.shape), probability, dtype, like.device, order))


class DrawnMasks:
    """The masks that a function asks for, in order.

    Args:
        generators: what they are drawn from.
        real_examples: as in `MaskSpec.draw`.
        orders: axis orders of the masks of one forward pass; () keeps the order of each mask.
    """

    def __init__(
        self,
        generators: Generators,
        real_examples: Ints | None = None,
        orders: Sequence[AxisOrder] = (),
    ) -> None:
        self.specs: list[MaskSpec] = []
        self.masks: list[Tensor] = []
        self.other_draws = 0  # random operations that make no mask
        self.orders = orders
        self._generators, self._real_examples = generators, real_examples

    def drawing(self) -> MaskMode:
        """Return the mode that draws masks and keeps them."""

        def draw(spec: MaskSpec) -> Tensor:
            if self.orders:  # a compiled step may lay out in another way what it drops from
                spec = replace(spec, order=self.orders[len(self.specs) % len(self.orders)])
            self.specs.append(spec)
            self.masks.append(spec.draw(self._generators, self._real_examples))
            return self.masks[-1].clone()

        return MaskMode(draw, self._on_other_draw)

    def replaying(self, masks: Sequence[Tensor]) -> MaskMode:
        """Return the mode that gives these masks in the same order."""
        remaining: Iterator[Tensor] = iter(masks)
        return MaskMode(lambda _: next(remaining), self._on_other_draw)

    def _on_other_draw(self) -> None:
        if self._generators is not None:
            raise CannotCompile(DRAWS)
        self.other_draws += 1


@dataclass(frozen=True)
class RandomDraws:
    """What a network and its loss draw in training in one forward pass.

    Args:
        masks_by_example: whether they draw only masks, each with a row for every example.
        orders: axis orders of the masks.
        reason: why it is not known what they draw, "" where it is known.
    """

    masks_by_example: bool
    orders: tuple[AxisOrder, ...] = ()
    reason: str = ""


def random_draws(network: Network, batch: Batch) -> RandomDraws | None:
    """Return what a network draws in training, None where it draws nothing.

    Args:
        network: the model.
        batch: a few examples.
    """
    passes: list[DrawnMasks] = []
    doubled = Batch(joined([batch.x, batch.x]), joined([batch.y, batch.y]))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for examples in (batch, doubled):
            passes.append(DrawnMasks(None))
            try:
                with passes[-1].drawing():
                    network.loss(network.params, network.copy_buffers(network.buffers), examples)
            except Exception as error:  # a module may do without so few examples; not established
                return RandomDraws(False, reason=f"a few examples raise {first_line(error)}")
    once, twice = (drawn.specs for drawn in passes)
    orders = tuple(spec.order for spec in once)
    if passes[0].other_draws or len(once) != len(twice):
        return RandomDraws(False, orders)
    if not once:
        return None
    count = len(batch)
    by_example = all(
        spec.shape == (count, *spec.shape[1:]) and other.shape == (2 * count, *spec.shape[1:])
        for spec, other in zip(once, twice, strict=True)
    )
    return RandomDraws(by_example, orders)
