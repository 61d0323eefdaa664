"""Top-k with memory and 8-bit quantisation, restated in NumPy from their papers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeel.method.grammar import parse
from fedkeel.method.parts.compress import Quantise, TopK
from fedkeel.tree import Tree
from harness import toy_network
from method.players import equal, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2, 0]]


def largest(v: Vector, k: int) -> Vector:
    """top_k, by sorting."""
    out, order = np.zeros_like(v), sorted(range(len(v)), key=lambda i: -abs(v[i]))
    for i in order[:k]:
        out[i] = v[i]
    return out


def sparsified(setup: TrainingSetup, fraction: float, feedback: bool) -> Iterator[Told]:
    """Stich et al., Algorithm 1, lines 4 to 6, for a client's update in place of a step."""
    x = setup.start
    e = [np.zeros_like(x) for _ in setup.sizes]
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            steps = (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t))
            v = e[i] + (descend(x, iter(steps), LR) - x)
            sent[i] = largest(v, int(fraction * len(x) + 0.5))
            e[i] = v - sent[i] if feedback else e[i]
        p = setup.shares("examples", clients)
        x = x + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(x, sent)


@pytest.mark.parametrize("fraction", [0.05, 0.3])
@pytest.mark.parametrize("feedback", [0, 1])
def test_topk(fraction: float, feedback: int) -> None:
    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"topk(fraction={fraction}, feedback={feedback})", LR)
    assert agree(ours, sparsified(setup, fraction, bool(feedback)), COHORTS) == 4


def quantised(setup: TrainingSetup) -> Iterator[Told]:
    x, names = setup.start, {k: v.shape for k, v in setup.network().params.items()}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            steps = (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t))
            delta, parts, start = descend(x, iter(steps), LR) - x, [], 0
            for shape in names.values():
                one = delta[start : start + int(np.prod(shape))]
                start += len(one)
                s = np.abs(one).max() / 127
                parts.append(s * np.rint(one / s))
            sent[i] = np.concatenate(parts)
        p = setup.shares("examples", clients)
        x = x + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(x, sent)


def test_quantise() -> None:
    setup = TrainingSetup(epochs=2)
    assert agree(setup.ours("quantise", LR), quantised(setup), COHORTS) == 4


# --- laws ------------------------------------------------------------------------------------


def update(seed: int = 0) -> Tree:
    random = np.random.default_rng(seed)
    params = toy_network().params
    return {k: torch.from_numpy(random.normal(size=v.shape)) for k, v in params.items()}


class Kept:
    """Stands for a round of which only what a codec looks at is there."""

    def __init__(self, delta: Tree, e: Tree) -> None:
        self.update, self.client_state = delta, {"e": e}


def flat(params: Tree) -> torch.Tensor:
    return torch.cat([v.reshape(-1) for v in params.values()])


def test_all_entries_are_fedavg() -> None:
    assert equal(play("topk(fraction=1.0)", rounds=3), play("fedavg", rounds=3))


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_what_is_sent_and_what_is_kept_add_up(fraction: float) -> None:
    part, delta, e = TopK(fraction=fraction), update(0), update(1)
    round = Kept(delta, e)
    sent = part.decode(part.encode(delta, round), delta)
    kept = part.next_client(round)["e"]
    whole = flat(delta) + flat(e)
    assert torch.equal(flat(sent) + flat(kept), whole)
    assert int((flat(sent) != 0).sum()) == max(1, round_(fraction * len(whole)))
    assert flat(kept).norm() <= (1 - fraction) ** 0.5 * whole.norm() * (1 + 1e-2)
    assert flat(sent).abs()[flat(sent) != 0].min() >= flat(kept).abs().max()


def round_(x: float) -> int:
    return int(x + 0.5)


@pytest.mark.slow
def test_with_memory_nothing_is_lost_for_ever() -> None:
    """Two of twenty entries shake and drown the others, whose small steps add up with memory."""
    goal, ends = torch.linspace(1, 2, 18, dtype=torch.float64), {}
    for feedback in (0, 1):
        part, e = TopK(fraction=0.1, feedback=feedback), {"w": torch.zeros(20).double()}
        x = torch.zeros(20).double()
        for t in range(4000):
            shake = torch.full((2,), 0.05 * (-1) ** t).double()
            delta = {"w": torch.cat([shake, 0.01 * (goal - x[2:])])}
            round = Kept(delta, e)
            sent = part.decode(part.encode(delta, round), delta)
            e = part.next_client(round)["e"]
            x = x + sent["w"]
        ends[feedback] = float((x[2:] - goal).abs().max())
    assert ends[0] == 2.0
    assert ends[1] < 0.2


def test_quantised_entries_are_off_by_half_a_step() -> None:
    part, delta = Quantise(), update()
    sent = part.encode(delta, Kept(delta, {}))
    assert {t.dtype for t in sent["q"].values()} == {torch.int8}
    for name, got in part.decode(sent, delta).items():
        step = delta[name].abs().max() / 127
        assert (got - delta[name]).abs().max() <= step / 2 * (1 + 1e-12)
    doubled = {k: 2.0 * v for k, v in delta.items()}
    twice = part.decode(part.encode(doubled, Kept(doubled, {})), delta)
    assert equal(twice, {k: 2.0 * v for k, v in part.decode(sent, delta).items()})


def test_whole_multiples_and_zeros_arrive_as_they_are() -> None:
    part = Quantise()
    delta = {"w": torch.tensor([127.0, -3.0, 0.0]) / 8, "b": torch.zeros(2)}
    assert equal(part.decode(part.encode(delta, Kept(delta, {})), delta), delta)


def test_what_is_not_finite_is_seen() -> None:
    delta = {"w": torch.tensor([1.0, float("nan")])}
    sent = Quantise().encode(delta, Kept(delta, {}))
    assert not torch.isfinite(sent["step"]["w"])


def test_bytes_are_those_of_what_is_sent() -> None:
    delta = update()
    entries = sum(v.numel() for v in delta.values())
    sent = TopK(fraction=0.1).encode(delta, Kept(delta, {k: 0 * v for k, v in delta.items()}))
    assert sum(t.numel() * t.element_size() for t in sent.values()) == round_(0.1 * entries) * 12


def test_one_codec_at_most() -> None:
    from fedkeel.errors import CompositionError

    with pytest.raises(CompositionError, match="encoding of the update"):
        parse("topk+quantise")
