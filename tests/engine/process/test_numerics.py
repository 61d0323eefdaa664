"""How exactly products are worked out: as asked, whatever was set before, and undone after it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import fedkeel as fk
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.errors import ConfigError
from toys import Net, federation, held


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = switches()
    yield
    assert switches() == before


def switches() -> list[str]:
    gpu, processor = torch.backends.cudnn, torch.backends.mkldnn
    owners = (torch.backends.cuda.matmul, gpu.conv, gpu.rnn, processor.matmul, processor.conv)
    return [owner.fp32_precision for owner in owners]


def test_a_gpu_rounds_no_factors_unless_it_is_asked_to() -> None:
    """Torch itself lets convolutions."""
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    with use_numerics("float32"):
        assert switches() == ["ieee"] * 5
        assert torch.get_num_threads() == 1
    with use_numerics("tf32"):
        assert switches() == ["tf32"] * 3 + ["ieee"] * 2
    with use_numerics("bf16"):
        assert switches() == ["tf32"] * 3 + ["bf16"] * 2


def test_they_are_put_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="oh"), use_numerics("bf16"):
        raise RuntimeError("oh")


class Watches(Net):
    """Says how exactly products are worked out whenever it is called."""

    seen: ClassVar[set[str]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(torch.backends.mkldnn.matmul.fp32_precision)
        return super().forward(x)


def play(kind: str, precision: str, **engine: object) -> fk.Result:
    Watches.seen.clear()
    return fk.run(
        "scaffold",
        task=fk.Task(partial(Watches, width=512)),
        clients=federation(),
        test=held(),
        rounds=3,
        local=fk.Local(lr=0.1, epochs=2, batch_size=16),
        engine=fk.Engine(kind=kind, precision=precision, **engine),
        progress=False,
    )


def test_every_engine_rounds_alike() -> None:
    """By how much, and whether at all, is the processor's own."""
    exact = play("sequential", "float32")
    assert "bf16" not in Watches.seen
    one = play("sequential", "bf16")
    assert "bf16" in Watches.seen
    beside = play("vectorized", "bf16", workers=1, parallel_clients=3)
    assert "bf16" in Watches.seen
    assert beside.record.engine.reasons == []
    both = play("workers", "bf16", workers=2)
    for name, theirs in one.params.items():
        assert torch.equal(theirs, both.params[name])
        for other in (exact, beside):
            apart = (theirs - other.params[name]).abs().max()
            assert apart < 0.02 * theirs.abs().max()


def test_float64_is_not_rounded() -> None:
    with pytest.raises(ConfigError, match="'bf16' is for dtype 'float32'"):
        fk.Engine(dtype="float64", precision="bf16")
