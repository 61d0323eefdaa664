"""How exactly products are worked out: as asked, whatever was set before, and undone after it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from pydantic import ValidationError

import fedkeel as fk
from fedkeel.engine.arithmetic import arithmetic
from toys import Net, federation, held

bf16 = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor has no instructions for it",
)


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
    with arithmetic("float32"):
        assert switches() == ["ieee"] * 5
        assert torch.get_num_threads() == 1
    with arithmetic("tf32"):
        assert switches() == ["tf32"] * 3 + ["ieee"] * 2
    with arithmetic("bf16"):
        assert switches() == ["tf32"] * 3 + ["bf16"] * 2


def test_they_are_put_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="oh"), arithmetic("bf16"):
        raise RuntimeError("oh")


def play(kind: str, precision: str, **engine: object) -> fk.Result:
    return fk.run(
        "scaffold",
        task=fk.Task(partial(Net, width=512)),
        clients=federation(),
        test=held(),
        rounds=3,
        local=fk.Local(lr=0.1, epochs=2, batch_size=16),
        engine=fk.Engine(kind=kind, precision=precision, **engine),
        progress=False,
    )


@bf16
def test_every_engine_rounds_alike() -> None:
    exact, one = play("sequential", "float32"), play("sequential", "bf16")
    both = play("workers", "bf16", workers=2)
    beside = play("vectorised", "bf16", workers=2, chunk=3)
    assert beside.record.engine.get("reasons", []) == []
    for name, theirs in one.params.items():
        assert torch.equal(theirs, both.params[name])
        apart = (theirs - exact.params[name]).abs().max()
        assert 0 < apart < 0.02 * theirs.abs().max()
        assert (theirs - beside.params[name]).abs().max() < 0.02 * theirs.abs().max()


def test_float64_is_not_rounded() -> None:
    with pytest.raises(ValidationError, match="'bf16' is for dtype 'float32'"):
        fk.Engine(dtype="float64", precision="bf16")
