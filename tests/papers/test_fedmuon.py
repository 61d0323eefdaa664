"""FedMuon, restated from Takezawa et al. 2025, Algorithm 1, and compared with a public code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.parts.fedmuon import polar
from fedkeel.task.network import Network
from harness import Federation, ToyMLP, distance, oracle, tensors, toy_network
from method.players import equal, federation, gap, play, skewed
from method.test_oracles import clients_of, hp, rounds_of
from papers.numpy_net import Told, TrainingSetup, Vector, agree, flat

LR = 0.05
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]


def orthogonal(setup: TrainingSetup, v: Vector, iterations: int) -> Vector:
    """U V' of each matrix by Muon's iteration, and each vector over its length."""
    out = []
    for part in setup.net.split(v).values():
        if part.ndim == 1:
            out.append(part / np.linalg.norm(part))
            continue
        x = part / (np.linalg.norm(part) + 1e-12)
        for _ in range(iterations):
            gram = x @ x.T
            x = 3.4445 * x - 4.775 * gram @ x + 2.0315 * gram @ gram @ x
        out.append(x.ravel())
    return np.concatenate(out)


def fedmuon(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    alpha: float,
    decay: float = 0.0,
    corrected: bool = True,
) -> Iterator[Told]:
    x, count = setup.start, len(setup.sizes)
    m = {k: np.zeros_like(x) for k in range(count)}
    c, own = np.zeros_like(x), {k: np.zeros_like(x) for k in range(count)}
    for t, clients in enumerate(cohorts):
        sent, before = {}, dict(own)
        for i in clients:
            y = x
            for batch in setup.examples(i, t):
                m[i] = (1 - alpha) * m[i] + alpha * setup.net.grad(y, *batch)
                along = m[i] - before[i] + c if corrected else m[i]
                y = y - LR * (orthogonal(setup, along, 5) + decay * y)
            own[i], sent[i] = m[i], y - x
        models = [x + sent[i] if i in sent else x for i in range(count)]
        x = np.mean(models, axis=0)
        c = np.mean(list(own.values()), axis=0)
        yield Told(x, sent, {"c": c, **{f"m{i}": m[i] for i in clients}})


def look(ours: Federation) -> Mapping[str, Vector]:
    states = ours.played.client_state.items()
    c = flat(ours.played.server.memory["fedmuon"]["c"])
    return {"c": c, **{f"m{i}": flat(state["fedmuon"]["m"]) for i, state in states}}


@pytest.mark.parametrize(
    ("alpha", "decay", "corrected"), [(0.1, 0.0, True), (0.9, 0.1, True), (0.5, 0.0, False)]
)
def test_fedmuon(alpha: float, decay: float, corrected: bool) -> None:
    setup = TrainingSetup()
    expression = f"fedmuon(alpha={alpha}, corrected={corrected})"
    ours = setup.ours(expression, LR, weight_decay=decay)
    story = fedmuon(setup, COHORTS, alpha, decay, corrected)
    assert agree(ours, story, COHORTS, look, tol=1e-10) == len(COHORTS)


@pytest.mark.parametrize("name", ["fedmuon_a", "fedmuon_a_ns", "localmuon_a"])
def test_it_follows_public_code(name: str) -> None:
    """Whole batches only, from the first one on in every round."""
    o = oracle(name)
    clients, size, steps = clients_of(o), int(hp(o, "batch_size")), int(hp(o, "local_steps"))
    iterations = max(0, int(hp(o, "newton_schulz_steps")))
    network = Network(ToyMLP(hidden=len(o["init.fc1.bias"])), head="fc2", dtype=torch.float64)
    network.params = tensors(o, "init.")

    def batches(k: int, _: int) -> list[np.ndarray]:
        whole = len(clients[k][1]) // size
        return [np.arange(size * b, size * (b + 1)) for b in (s % whole for s in range(steps))]

    options = f"alpha={hp(o, 'alpha')}, iterations={iterations}"
    corrected = bool(o["hp.bias_corrected"])
    local = Local(lr=hp(o, "eta"), steps=steps)
    expression = f"fedmuon({options}, corrected={corrected})"
    ours = Federation(expression, network, clients, local, batches)
    for t in range(1, rounds_of(o) + 1):
        played = ours.round()
        for k, update in played.deltas.items():
            assert distance(update, tensors(o, f"r{t}.client{k}.delta.")) < 1e-10
            m = tree.leaves(played.client_state[k]["fedmuon"], "m")
            assert distance(m, tensors(o, f"r{t}.client{k}.m.")) < 1e-10
        assert distance(ours.params, tensors(o, f"r{t}.")) < 1e-10
        if corrected:
            c = tree.leaves(played.server.memory["fedmuon"], "c")
            assert distance(c, tensors(o, f"r{t}.c.")) < 1e-10


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (4, 2, 3, 3), (5,), (1, 6)])
def test_the_polar_factor_goes_furthest_down_of_all_of_its_norm(shape: tuple[int, ...]) -> None:
    """Its product with the matrix is the sum of the singular values, and its own are all 1."""
    random = torch.Generator().manual_seed(0)
    G = torch.randn(shape, generator=random, dtype=torch.float64)
    flat_shape = (len(G), -1) if G.ndim > 1 else (1, -1)
    values = torch.linalg.svdvals(G.reshape(flat_shape))
    factor = polar(G, iterations=0)
    ones = torch.linalg.svdvals(factor.reshape(flat_shape))
    assert (ones - 1.0).abs().max() < 1e-12
    assert float((factor * G).sum()) == pytest.approx(float(values.sum()), rel=1e-12)
    near = torch.linalg.svdvals(polar(G, iterations=5).reshape(flat_shape))
    assert 0.6 < near.min() <= near.max() < 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("iterations", [0, 5])
def test_nothing_to_go_along_is_no_step(iterations: int, dtype: torch.dtype) -> None:
    """Nothing, or what rounding has left of two terms of opposite sign."""
    random = torch.Generator().manual_seed(0)
    for shape in ((3,), (3, 4), (4, 3), (2, 3, 2, 2), (1, 1)):
        assert polar(torch.zeros(shape, dtype=dtype), iterations).abs().max() == 0.0
        m = torch.randn(shape, generator=random, dtype=dtype)
        left = m * (1.0 + torch.finfo(dtype).eps) - m
        assert left.abs().max() > 0.0
        assert polar(left, iterations, torch.linalg.vector_norm(m)).abs().max() == 0.0
        tiny = polar(m * torch.finfo(dtype).tiny, iterations)
        assert torch.isfinite(tiny).all()
        assert tiny.abs().max() <= 1.0 + 1e-6


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float64, 1e-16), (torch.float32, 1e-7)])
@pytest.mark.parametrize("shape", [(3, 8), (8, 3)])
def test_the_exact_factor_of_a_matrix_without_full_rank(
    shape: tuple[int, int], dtype: torch.dtype, noise: float
) -> None:
    """By hand from its two orthogonal directions; noise as of rounding does not turn it.

    The gradient of a softmax's layer is such a matrix: its columns add up to 0.
    """
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.normal(size=(n, 2)))[0] for n in shape)
    expected = left @ right.T
    exact = torch.from_numpy(left @ np.diag([3.0, 0.02]) @ right.T).to(dtype)
    for scale in (1.0, 1e-12):
        noisy = exact + noise * torch.from_numpy(random.normal(size=shape)).to(dtype)
        factor = polar(scale * noisy, iterations=0)
        assert np.abs(factor.numpy() - expected).max() < 100 * noise / 0.02
        values = np.linalg.svd(factor.numpy(), compute_uv=False)
        assert np.allclose(values, [1.0, 1.0, 0.0], atol=1e-5)


@pytest.mark.parametrize("iterations", [0, 5])
def test_a_layer_without_a_gradient_stays(iterations: int) -> None:
    """Its units are dead, so it was turned by whatever an SVD of 0 gives."""
    network = toy_network()
    network.params["fc1.bias"] -= 100.0
    ours = federation(f"fedmuon(iterations={iterations})", network=network)
    start = ours.params
    for _ in range(2):
        ours.round()
    dead = {k: v for k, v in ours.params.items() if k != "fc2.bias"}
    assert equal(dead, {k: start[k] for k in dead})
    assert gap({"b": ours.params["fc2.bias"]}, {"b": start["fc2.bias"]}) > 1e-2


def test_the_first_round_is_local_muons_and_so_is_one_client_alone() -> None:
    plain = "fedmuon(corrected=False)"
    assert gap(play("fedmuon", rounds=1), play(plain, rounds=1)) < 1e-15
    assert gap(play("fedmuon", rounds=2), play(plain, rounds=2)) > 1e-3
    alone = skewed((12,))
    assert gap(play("fedmuon", alone, 3), play(plain, alone, 3)) < 1e-12


def test_absent_clients_count_with_an_update_of_nothing() -> None:
    ours = federation("fedmuon")
    start = ours.params
    played = ours.round([1, 3])
    mean = {k: sum(d[k] for d in played.deltas.values()) / 4 for k in start}
    assert gap(tree.sub(ours.params, start), mean) < 1e-14
