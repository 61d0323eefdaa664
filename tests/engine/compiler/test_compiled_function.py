"""Compiled functions: what they may save, and what they may not change."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from each import each
from fedkeel.engine.compiler.compiled_function import CompiledFunction
from fedkeel.engine.compiler.errors import CannotCompile

D = torch.float64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def dense(w: Tensor, b: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> list[Tensor]:
    """One step of gradient descent of a linear layer."""

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(F.linear(x, *pair), y)

    grads = torch.func.grad(loss)((w, b))
    return [w - lr * grads[0], b - lr * grads[1]]


def arguments() -> list[Tensor]:
    return [numbers(3, 5), numbers(3), numbers(4, 5), torch.tensor([0, 2, 1, 1]), torch.tensor(0.3)]


def test_a_step_writes_over_what_it_owns_and_makes_no_gradient_of_the_weights() -> None:
    given = arguments()
    expected = dense(*given)
    compiled = CompiledFunction(dense, given, rate=4, owned=frozenset({0, 1}))
    found = compiled(*given)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-15)
    assert found[0].data_ptr() == given[0].data_ptr()
    assert re.search(
        r"apply_update\(w, float_1, None, \(\(1.0, \(t_\d+, x\)\),\), True\)", compiled.code
    )


def test_what_a_part_writes_over_joins_the_step_as_well() -> None:
    """A correction, and a term of its own whose scale is written over it."""

    def step(w: Tensor, c: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> list[Tensor]:
        slope = torch.func.grad(lambda w: F.cross_entropy(F.linear(x, w), y))(w)
        return [w - lr * slope.add_(c).add_(torch.sub(c, 1.0).mul_(0.5))]

    given = [numbers(3, 5), numbers(3, 5, seed=1), *arguments()[2:]]
    expected = step(*given)
    compiled = CompiledFunction(step, given, rate=4, owned=frozenset({0}))
    terms = r"\(\(1.0, \(t_\d+, x\)\), \(1.0, \(c,\)\), \(0.5, \(sub,\)\)\)"
    assert re.search(rf"apply_update\(w, float_1, None, {terms}, True\)", compiled.code), (
        compiled.code
    )
    torch.testing.assert_close(compiled(*given)[0], expected[0], rtol=0, atol=1e-15)


def test_a_product_of_entries_is_added_in_the_pass_that_makes_it() -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        mean = a.mean()
        return [a * mean + b, b + a * c, b - c * mean, b * mean - a, a * 2.0 + b, a * b + 1.0]

    given = [numbers(3, 5, seed=seed) for seed in range(3)]
    compiled = CompiledFunction(step, given)
    assert compiled.code.count("aten.addcmul.default(") == 3
    for found, expected in zip(compiled(*given), step(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_but_not_where_a_factor_has_been_written_over_by_then() -> None:
    """The multiple is of a model as it was before its step, which is made in place."""

    def step(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> list[Tensor]:
        slope = torch.func.grad(lambda w: F.cross_entropy(F.linear(x, w), y))(w)
        before = w * slope.mean()
        after = w - lr * slope
        return [after, before + after.square()]

    given = [numbers(3, 5), *arguments()[2:]]
    expected = step(*given)
    compiled = CompiledFunction(step, given, rate=3, owned=frozenset({0}))
    assert "apply_update" in compiled.code
    for found, one in zip(compiled(*given), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=1e-15)


@pytest.mark.parametrize("clients", [1, 2])
def test_a_pull_is_one_pass_and_none_where_it_pulls_nowhere(clients: int) -> None:
    """FedProx's term, in a first step from where it pulls to, and in a second one."""

    def steps(start: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> list[Tensor]:
        w = start
        for _ in range(2):
            slope = torch.func.grad(lambda w: F.cross_entropy(F.linear(x, w), y))(w)
            w = w - lr * (slope + 0.25 * (w - start))
        return [w]

    given = [numbers(3, 5), *arguments()[2:]]
    if clients > 1:
        steps = torch.func.vmap(steps, (None, 0, 0, None))
        given[1:3] = torch.stack([given[1], -given[1]]), torch.stack([given[2]] * 2)
    expected = steps(*given)
    compiled = CompiledFunction(steps, given, rate=3)
    first, second = re.findall(r"apply_update\(\w+, float_1, (None|\(.*?\)), .*", compiled.code)
    assert (first, second) == ("None", "(0.25, start)")
    assert (clients > 1) == ("aten.sub" in compiled.code)  # the first step's, of all clients
    torch.testing.assert_close(compiled(*given)[0], expected[0], rtol=0, atol=1e-15)


def test_a_step_that_goes_nowhere_is_not_the_received_model_itself() -> None:
    """Or the second one would be written over it."""

    def steps(start: Tensor, lr: Tensor) -> list[Tensor]:
        first = start - lr * (0.25 * (start - start))
        return [first - lr * first.cos()]

    given = [numbers(3, 5), torch.tensor(0.3)]
    before, expected = given[0].clone(), steps(*given)
    found = CompiledFunction(steps, given, rate=1)(*given)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-15)
    assert torch.equal(given[0], before)


@pytest.mark.parametrize("clients", [1, 2])
def test_a_centralised_gradient_stays_a_product(clients: int) -> None:
    def step(w: Tensor, x: Tensor, y: Tensor, lr: Tensor) -> list[Tensor]:
        slope = torch.func.grad(lambda w: F.cross_entropy(F.linear(x, w), y))(w)
        return [w - lr * (slope - slope.mean(1, keepdim=True))]

    given = [numbers(3, 5), *arguments()[2:]]
    if clients > 1:
        step = torch.func.vmap(step, (0, 0, 0, None))
        given = [
            *(torch.stack([t, 2 * t]) for t in given[:2]),
            torch.stack([given[2]] * 2),
            given[3],
        ]
    expected = step(*given)
    compiled = CompiledFunction(step, given, rate=3, owned=frozenset({0}))
    assert re.search(
        r"apply_update\(w, float_1, None, \(\(1.0, \(\w+, \w+\)\),\), True\)", compiled.code
    )
    torch.testing.assert_close(compiled(*given)[0], expected[0], rtol=0, atol=1e-15)


def written_twice(w: Tensor, c: Tensor) -> list[Tensor]:
    """Views and copies of a tensor that is written over, before and after."""
    one = w + c
    row, double = one[0], one * 2
    one.mul_(3.0)
    half = torch.sub(one, c)
    before = half * 1
    half.add_(row)
    return [row, double, one, before, half]


def test_what_is_written_over_is_seen_as_torch_shows_it() -> None:
    given = [numbers(3, 5), numbers(3, 5, seed=1)]
    expected = written_twice(*given)
    for one, other in zip(expected, CompiledFunction(written_twice, given)(*given), strict=True):
        assert torch.equal(one, other)


def test_what_is_not_owned_stays() -> None:
    given = arguments()
    before = [t.clone() for t in given]
    compiled = CompiledFunction(dense, given, rate=4)
    expected = dense(*given)
    for one, other in zip(expected, compiled(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-15)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_the_rate_may_change_from_call_to_call() -> None:
    compiled = CompiledFunction(dense, arguments(), rate=4, owned=frozenset({0, 1}))
    for rate in (0.1, 0.7):
        given = [*arguments()[:4], torch.tensor(rate)]
        expected = dense(*given)
        for one, other in zip(expected, compiled(*given), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-15)


@each(
    "step",
    [
        lambda p, q, g, lr: [p - lr * g, p],  # the old value is wanted too
        lambda p, q, g, lr: [p - lr * q, q - lr * p],  # each needs the other's old value
        lambda p, q, g, lr: [p - lr * (g + 0.1 * p), q],  # weight decay
        lambda p, q, g, lr: [p - lr * (g @ q + 0.5 * (p - q)), q],  # a product and a penalty
        lambda p, q, g, lr: [p - lr * (g @ q - (g @ q).mean(1, keepdim=True)), q],  # centralised
        lambda p, q, g, lr: [p - lr * (g @ q - (g @ q).mean(0, keepdim=True)), q],  # of columns
        lambda p, q, g, lr: [
            p - lr * (g @ q - (g @ q).mean(1, keepdim=True)),
            g @ q,
        ],  # and as it is
        lambda p, q, g, lr: [p - lr * (g @ p), q - lr * (p.T @ q)],  # products of what is owned
        lambda p, q, g, lr: [p - lr * p, (p - lr * g).T @ q],  # one target twice
        lambda p, q, g, lr: [(p - lr * g.T) * 2.0, q - lr * (g - g.T - 3.0 * p)],
        lambda p, q, g, lr: [p - lr * torch.add(g, q, alpha=0.9), torch.add(g, q, alpha=0.9)],
        lambda p, q, g, lr: [p[:2] - lr * g[:2], q - lr * g.sum(0, keepdim=True)],  # broadcast
        lambda p, q, g, lr: [p.relu() + g.relu() * g.relu().tanh(), (g - 1.0).neg() * p + q],
    ],
)
def test_the_result_is_the_functions_own(step: object) -> None:
    """Whatever is fused or reused, for functions that would notice."""
    given = [numbers(3, 3, seed=1), numbers(3, 3, seed=2), numbers(3, 3, seed=3), torch.tensor(0.3)]
    expected = step(*given)
    compiled = CompiledFunction(step, given, rate=3, owned=frozenset({0, 1}))
    copies = [t.clone() for t in given]
    for one, other in zip(expected, compiled(*copies), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    assert torch.equal(copies[2], given[2])


@each(
    ("step", "placed"),
    [
        (lambda a, b: [torch.cat([(a @ b).view(-1), a.sum(0), (a - b).reshape(-1)])], 2),
        (lambda a, b: [torch.cat([(a @ b).view(-1), (a - b).view(-1)]).view(2, -1).mul_(2.0)], 2),
        (lambda a, b: [torch.cat([(a.float() - b).view(-1), b[0]])], 1),  # of another type
        (lambda a, b: [torch.cat([(a @ b).T.reshape(-1), (a + b).view(-1)])], 1),  # turned
        (lambda a, b: [torch.cat([c.view(-1), (c * b).view(-1)]) for c in [a @ b]], 1),  # needed
        (lambda a, b: [torch.cat([c, c]) for c in [(a @ b).view(-1)]], 0),  # twice
        (lambda a, b: [torch.cat([c, c[:3]]) for c in [(a @ b).view(-1)]], 0),
        (lambda a, b: [torch.cat([a @ b, a - b], dim=1)], 0),
        (lambda a, b: [torch.cat([(a[:9] @ b).view(-1), b[0]])], 0),  # small
    ],
)
def test_what_is_joined_is_made_in_its_place(step: object, placed: int) -> None:
    given = [numbers(260, 260, seed=1), numbers(260, 260, seed=2)]
    expected = step(*given)
    compiled = CompiledFunction(step, given)
    assert compiled.code.count(", out = ") == placed, compiled.code
    assert ("aten.cat" in compiled.code) == (placed == 0)
    for one, other in zip(expected, compiled(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_tensor_that_is_given_twice_stays_two_arguments() -> None:
    """As a client's last model is the received one when it takes part for the first time."""
    x = numbers(3)
    compiled = CompiledFunction(lambda a, b: [a - 2.0 * b], [x, x])
    assert torch.equal(compiled(x, 3.0 * x)[0], x - 6.0 * x)


def test_batch_normalisation_keeps_its_buffers() -> None:
    def step(x: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        mean, var = mean.clone(), var.clone()
        out = F.batch_norm(x.relu(), mean, var, training=True)
        return [out.tanh(), mean, var]

    given = [numbers(6, 4), torch.zeros(4, dtype=D), torch.ones(4, dtype=D)]
    expected = step(*given)
    for one, other in zip(expected, CompiledFunction(step, given)(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-15)
    assert torch.equal(given[1], torch.zeros(4, dtype=D))


def test_pooled_images_with_channels_last() -> None:
    def step(x: Tensor) -> list[Tensor]:
        return [torch.func.grad(lambda z: F.max_pool2d(z.tanh(), 2).flatten(1).pow(2).sum())(x)]

    x = numbers(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(CompiledFunction(step, [x])(x)[0], step(x)[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("stride", [2, 1], ids=["apart", "overlapping"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_maximum_is_taken_before_the_relu(stride: int, layout: torch.memory_format) -> None:
    def step(x: Tensor) -> list[Tensor]:
        def loss(z: Tensor) -> Tensor:
            return F.max_pool2d(z.relu(), 2, stride).flatten(1).pow(2).sum()

        return [torch.func.grad(loss)(x), F.max_pool2d(x.relu(), 2, stride)]

    x = numbers(2, 3, 6, 6).round().contiguous(memory_format=layout)  # many are alike
    compiled = CompiledFunction(step, [x])
    assert "max_pool2d_with_indices.default(x" in compiled.code
    for one, other in zip(compiled(x), step(x), strict=True):
        assert torch.equal(one, other)


def test_random_numbers_are_drawn_anew_and_known() -> None:
    def drop(x: Tensor) -> list[Tensor]:
        return [F.dropout(x, 0.5), torch.rand(3)]

    x = torch.ones(1000, dtype=D)
    compiled = CompiledFunction(drop, [x])
    torch.manual_seed(3)
    expected = [*drop(x), *drop(x)]
    torch.manual_seed(3)
    found = [*compiled(x), *compiled(x)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not torch.equal(found[0], found[2])


def test_a_function_that_branches_on_values_cannot_be_compiled() -> None:
    with pytest.raises(CannotCompile, match="numbers in a tensor"):
        CompiledFunction(lambda x: [x if x.sum() > 0 else -x], [numbers(3)])
