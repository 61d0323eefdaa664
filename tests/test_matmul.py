"""Products by oneDNN, against the same in float64; and when MKL's are taken in their place.

They are right on every processor that torch's oneDNN knows, and faster on some, which is pretended
here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedkeel as fk
from fedkeel.base import matmul
from fedkeel.engine.compiler.compiled_function import CompiledFunction
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.runner.start import start
from toys import of_sizes, prepared

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)

M, K, N = 64, 128, 200
assert M * K * N >= matmul.MIN_WORK


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the products that oneDNN makes, on a processor on which it is said to be faster."""
    made: list[tuple[int, ...]] = []
    product = matmul._onednn_product

    def watched(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        made.append((*a.shape, b.shape[1]))
        return product(a, b, bias)

    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(matmul, "_onednn_product", watched)
    return made


class Seconds(TorchDispatchMode):
    """Hears how the second factor lies which oneDNN is given."""

    def __init__(self) -> None:
        super().__init__()
        self.dense: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "linear_pointwise" in str(func):
            self.dense.append(args[1].is_contiguous() or args[1].t().is_contiguous())
        return func(*args, **(kwargs or {}))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-4)


LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": drawn,
    "columns": lambda m, n: drawn(n, m).t(),
    "part": lambda m, n: drawn(m, 2 * n)[:, 3 : n + 3],
    "every other": lambda m, n: drawn(2 * m, 2 * n)[::2, 1::2],
    "one row": lambda m, n: drawn(1, n).expand(m, n),
    "one column": lambda m, n: drawn(m, 1).expand(m, n),
    "not aligned": lambda m, n: drawn(m * n + 1)[1:].view(m, n),
}


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_products_however_the_factors_lie(
    first: str, second: str, calls: list[tuple[int, ...]]
) -> None:
    a, b = LAYOUTS[first](M, K), LAYOUTS[second](K, N)
    with Seconds() as seconds:  # of those with gaps it takes each entry by itself
        close(matmul.mm(a, b), a.double() @ b.double())
    assert seconds.dense == [True]
    out = torch.empty(M, N)
    assert matmul.mm(a, b, out=out) is out
    close(out, a.double() @ b.double())
    whole = drawn(M, N)
    expected = whole.double() - 0.5 * a.double() @ b.double()
    assert matmul.add_product(whole, a, b, -0.5) is whole
    close(whole, expected)
    assert calls == [(M, K, N)] * 3


@pytest.mark.parametrize(
    "bias", [drawn(N), drawn(N, 2)[:, 1], drawn(1).expand(N)], ids=["rows", "every other", "one"]
)
def test_biases_however_they_lie(bias: Tensor, calls: list[tuple[int, ...]]) -> None:
    """By itself oneDNN's call takes strides for granted, and reads what lies beside a bias."""
    a, b = drawn(M, K), drawn(K, N)
    close(matmul.addmm(bias, a, b), bias.double() + a.double() @ b.double())
    assert calls == [(M, K, N)]


def test_other_sums_are_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    a, b = drawn(M, K), drawn(K, N)
    for bias, scales in ((drawn(M, N), {}), (drawn(N), {"alpha": 0.5}), (drawn(1), {})):
        found = matmul.addmm(bias, a, b, **scales)
        assert torch.equal(found, torch.addmm(bias, a, b, **scales))
    assert not calls


def test_several_products(calls: list[tuple[int, ...]]) -> None:
    a, b, whole = drawn(3, M, 2 * K), drawn(3, 2 * K, N), drawn(3, M, N)
    close(matmul.bmm(a, b), a.double() @ b.double())
    expected = whole.double() + 2.0 * a.double() @ b.double()
    assert matmul.add_product(whole, a, b, 2.0) is whole
    close(whole, expected)
    assert calls == [(M, 2 * K, N)] * 6


def test_small_and_thin_products_are_torchs(calls: list[tuple[int, ...]]) -> None:
    a, b = drawn(8, K), drawn(K, 50)
    assert torch.equal(matmul.mm(a, b), a @ b)
    assert torch.equal(matmul.bmm(a[None], b[None]), torch.bmm(a[None], b[None]))
    assert matmul.bmm(a.new_empty(0, 8, K), b.new_empty(0, K, 50)).shape == (0, 8, 50)
    wide, thin = drawn(400, 8), drawn(8, 400)
    whole = drawn(400, 400)
    expected = whole.addmm(wide, thin, alpha=-0.1)
    assert torch.equal(matmul.add_product(whole, wide, thin, -0.1), expected)
    assert not calls


def test_other_types_and_rounded_factors_are_torchs(calls: list[tuple[int, ...]]) -> None:
    a, b = drawn(M, K), drawn(K, N)
    assert torch.equal(matmul.mm(a.double(), b.double()), a.double() @ b.double())
    with use_numerics("bf16"):
        assert torch.equal(matmul.mm(a, b), a @ b)
    assert not calls


def test_linear_layers_choose_where_there_is_no_gradient(calls: list[tuple[int, ...]]) -> None:
    layer, x = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 2, bias=False)), drawn(2, M, K)
    with matmul.linear_layers():
        assert torch.equal(layer(x), layer(x))
        assert not calls
        with torch.no_grad():
            found = layer(x)
    assert calls == [(2, M, K, N)]
    close(found, layer.double()(x.double()).detach())
    with torch.no_grad():
        layer.float()(x)
    assert len(calls) == 1


def test_a_compiled_step_is_the_step(calls: list[tuple[int, ...]]) -> None:
    def loss(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias).tanh().square().mean()

    def step(weight: Tensor, bias: Tensor, x: Tensor, rate: Tensor) -> list[Tensor]:
        grads = torch.func.grad(loss, argnums=(0, 1))(weight, bias, x)
        return [p - rate * g for p, g in zip((weight, bias), grads, strict=True)]

    given = [drawn(N, K), drawn(N), drawn(M, K), torch.tensor(0.5)]
    captured = CompiledFunction(step, given, rate=3, owned=frozenset([0, 1]))
    found = captured(*[t.clone() for t in given])
    assert calls == [(M, K, N), (N, M, K)]
    for one, expected in zip(found, step(*[t.double() for t in given]), strict=True):
        close(one, expected)


def test_runs_agree_with_one_by_one_and_repeat_bit_for_bit(calls: list[tuple[int, ...]]) -> None:
    model = nn.Sequential(nn.Linear(5, 500), nn.Tanh(), nn.Linear(500, 3))
    local = fk.Local(lr=0.05, batch_size=600, epochs=2)

    def play(kind: str) -> fk.Result:
        chunk = {"parallel_clients": 1, "workers": 1} if kind == "vectorized" else {}
        clients = of_sizes(700, 650)
        return start(
            prepared(model=model, clients=clients, per_round=2, local=local, kind=kind, **chunk)
        )

    side, again = play("vectorized"), play("vectorized")
    assert calls
    plain = play("sequential")
    for name, tensor in side.params.items():
        assert torch.equal(tensor, again.params[name])
        torch.testing.assert_close(tensor, plain.params[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "maker", "expected"),
    [
        ("AVX512", "AuthenticAMD", True),
        ("AVX512_VNNI", "AuthenticAMD", True),
        ("AVX512", "GenuineIntel", False),
        ("AVX2", "AuthenticAMD", False),
        ("DEFAULT", "", False),
    ],
)
def test_which_processors(
    capability: str,
    maker: str,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n")
    monkeypatch.setattr(matmul, "Path", lambda _: told)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    matmul.onednn_is_faster.cache_clear()
    try:
        assert matmul.onednn_is_faster() is expected
        told.unlink()
        monkeypatch.setattr(matmul.platform, "processor", lambda: f"Family 26, {maker}")
        matmul.onednn_is_faster.cache_clear()
        assert matmul.onednn_is_faster() is expected
    finally:
        matmul.onednn_is_faster.cache_clear()
