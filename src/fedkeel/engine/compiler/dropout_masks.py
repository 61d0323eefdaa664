"""What modules draw in training, dropout's masks, apart from the steps that use them.

A lane has a generator of its own, seeded as its client's is when it trains alone. So the numbers
depend neither on the other lanes nor on their number; and a recorded step, which is given the
masks, draws nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedkeel.method.context import Ints
from fedkeel.task.network import Batch, Network

aten = torch.ops.aten

Sources = Sequence[torch.Generator] | None
"""Generators of lanes, on the leading axis; None for a lone lane without one, which draws from
torch's own; none at all where nothing is expected to be drawn."""


@dataclass(frozen=True)
class Draw:
    """The form of one mask.

    Args:
        shape: of the mask, with the axis of lanes where there are any.
        chance: of a one, in [0, 1].
        dtype: of its zeros and ones.
        device: where it lies.
        order: its axes, but that of lanes, from the slowest to the fastest in memory, which is how
            torch fills it; () in their own order.
    """

    shape: tuple[int, ...]
    chance: float
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...] = ()

    def make(self, sources: Sources, real: Ints | None = None) -> Tensor:
        """Return a mask.

        Args:
            sources: what it is drawn from.
            real: [n] examples of each lane that are no padding, for which alone it is drawn; None
                where all are real.

        Raises:
            RuntimeError: there is no generator for each lane.
        """
        new = torch.empty if real is None else torch.zeros
        out = new(self.shape, dtype=self.dtype, device=self.device)
        if sources is None:
            self._fill(out if real is None else out[: real[0]], None)
            return out
        if len(sources) < len(out):
            raise RuntimeError("unexpected random operation: a mask")
        for number, (lane, source) in enumerate(zip(out, sources, strict=False)):
            self._fill(lane if real is None else lane[: real[number]], source)
        return out

    def _fill(self, out: Tensor, source: torch.Generator | None) -> None:
        order = self.order
        if order == tuple(sorted(order)):
            _fill(out, self.chance, source)
            return
        turned = out.new_empty([out.shape[axis] for axis in order])
        lies = turned.permute([order.index(axis) for axis in range(out.ndim)])
        out.copy_(lies.bernoulli_(self.chance, generator=source))


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives modules their masks.

    Args:
        give: returns a mask that may be written over.
        other: is told of other random operations before they are done.
    """

    def __init__(self, give: Callable[[Draw], Tensor], other: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._give, self._other = give, other

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do an operation; of a random one, what follows of its mask."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        if func in (aten.bernoulli.p, aten.bernoulli_.float) and not kwargs:
            like, chance = (*args, 0.5)[:2]  # which is not handed on where it is a half
            mask = self._mask(like, chance, like.dtype)
            return mask if func is aten.bernoulli.p else like.copy_(mask)
        if func is aten.native_dropout.default and args[2]:  # on a GPU
            x, chance, _ = args
            mask = self._mask(x, 1.0 - chance, torch.bool)
            return x * mask * (1.0 / (1.0 - chance)), mask
        self._other(func)
        return func(*args, **kwargs)

    def _mask(self, like: Tensor, chance: float, dtype: torch.dtype) -> Tensor:
        strides = like.stride()
        order = tuple(sorted(range(like.ndim), key=lambda axis: -strides[axis]))
        return self._give(Draw(tuple(like.shape), chance, dtype, like.device, order))


class Drawn:
    """The masks that a function has asked for, in order.

    Args:
        sources: what they are drawn from.
        real: as `Draw.make` means it.
        orders: of the masks of one forward pass, as `Draw` has them; () as they come.
    """

    def __init__(
        self, sources: Sources, real: Ints | None = None, orders: Sequence[tuple[int, ...]] = ()
    ) -> None:
        self.draws: list[Draw] = []
        self.masks: list[Tensor] = []
        self.others = 0  # random operations that make no mask
        self._sources, self._real, self._orders = sources, real, orders

    @property
    def ordered(self) -> bool:
        """Whether it is known how masks lie in memory where a client trains alone."""
        return bool(self._orders)

    def fresh(self) -> Drawing:
        """Return what draws masks and notes them."""

        def give(draw: Draw) -> Tensor:
            if self._orders:  # recorded steps may lay out what they drop from in another way
                draw = replace(draw, order=self._orders[len(self.draws) % len(self._orders)])
            self.draws.append(draw)
            self.masks.append(draw.make(self._sources, self._real))
            return self.masks[-1].clone()

        return Drawing(give, self._another)

    def again(self, masks: Sequence[Tensor]) -> Drawing:
        """Return what gives these masks in the same order."""
        left: Iterator[Tensor] = iter(masks)
        return Drawing(lambda _: next(left), self._another)

    def _another(self, func: Any) -> None:  # noqa: ANN401
        if self._sources is not None:
            raise RuntimeError(f"unexpected random operation: {func}")
        self.others += 1


@dataclass(frozen=True)
class Masks:
    """What a network and its loss draw in training, in one forward pass.

    Args:
        by_example: whether all of it is masks, each example's for itself.
        orders: of each mask, as `Draw` has them.
    """

    by_example: bool
    orders: tuple[tuple[int, ...], ...] = ()


def masks(network: Network, batch: Batch) -> Masks | None:
    """Return what a network draws in training; None where that is nothing.

    Args:
        network: the model.
        batch: a few examples.
    """
    found: list[Drawn] = []
    twice = Batch(torch.cat([batch.x, batch.x]), torch.cat([batch.y, batch.y]))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for one in (batch, twice):
            found.append(Drawn(None))
            try:
                with found[-1].fresh():
                    network.loss(network.params, network.copy_buffers(network.buffers), one)
            except Exception:  # whatever a module does with so few examples
                return Masks(False)
    few, more = (each.draws for each in found)
    orders = tuple(draw.order for draw in few)
    if found[0].others or len(few) != len(more):
        return Masks(False, orders)
    if not few:
        return None
    b = len(batch.x)
    each = all(m.shape == (b, *m.shape[1:]) for m in few) and all(
        n.shape == (2 * b, *m.shape[1:]) for m, n in zip(few, more, strict=True)
    )
    return Masks(each, orders)


def _fill(out: Tensor, chance: float, source: torch.Generator | None) -> Tensor:
    """Write ones with a chance, else zeros: what torch draws there, generator and all."""
    shape = tuple(out.shape)
    if out.device.type == "cpu" and _draws_alike(shape, chance, out.dtype):
        return _compared(out, chance, source)
    return out.bernoulli_(chance, generator=source)


def _compared(out: Tensor, chance: float, source: torch.Generator | None) -> Tensor:
    """Draw numbers and compare them: two thirds of the time that `bernoulli_` takes."""
    return torch.lt(torch.rand(out.shape, dtype=torch.float64, generator=source), chance, out=out)


@cache
def _draws_alike(shape: tuple[int, ...], chance: float, dtype: torch.dtype) -> bool:
    """Return whether `_compared` draws what torch draws: builds of torch differ."""
    one, other = (torch.Generator().manual_seed(1) for _ in range(2))
    usual = torch.empty(shape, dtype=dtype).bernoulli_(chance, generator=one)
    own = _compared(torch.empty(shape, dtype=dtype), chance, other)
    return torch.equal(usual, own) and torch.equal(one.get_state(), other.get_state())
