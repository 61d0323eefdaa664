"""Facts of theory: where methods end up, what projections promise, how long a path is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.context import ClientInfo, PartStates, Step
from fedkeel.method.grammar import parse
from fedkeel.method.local_loop import client_start
from fedkeel.method.local_optimiser import LocalSGD
from fedkeel.method.local_path import path_length
from fedkeel.method.parts.gradma import GradMAW
from fedkeel.method.server_round import server_message
from fedkeel.solve.projections import centralise
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from fedkeel.tree import Tree, group_names
from harness import Federation, toy_network
from method.players import LOCAL, contrary, federation, gap, skewed

# --- heterogeneous quadratics with unequal local work ----------------------------------------

D = 3
STEPS = (1, 3, 8)


class Line(nn.Module):
    """Scores that are linear in the parameters."""

    def __init__(self, size: int = D) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w)[:, None]


def squares(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.5 * (scores[:, 0] - y) ** 2


class Quadratics:
    """Client k's loss is half of (w - own_k)' H_k (w - own_k); each takes full-batch steps."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.data, self.own, self.H = [], [], []
        for _ in STEPS:
            q = np.linalg.qr(rng.normal(size=(8, D)))[0]
            x = q @ np.diag(np.sqrt(8 * rng.uniform(0.5, 1.5, size=D)))
            self.own.append(rng.normal(size=D))
            self.data.append((x, x @ self.own[-1]))
            self.H.append(x.T @ x / 8)

    @property
    def optimum(self) -> np.ndarray:
        """Where the mean of the losses is least."""
        pulls = sum(H @ w for H, w in zip(self.H, self.own, strict=True))
        return np.linalg.solve(sum(self.H), pulls)

    def left(self, k: int, lr: float, rho: float) -> np.ndarray:
        """[D, D] what client k's steps leave of its distance from its own optimum."""
        error, buffer = np.eye(D), np.zeros((D, D))
        for _ in range(STEPS[k]):
            buffer = rho * buffer + self.H[k] @ error
            error = error - lr * buffer
        return error

    def fixed_point(self, lr: float, rho: float, weights: np.ndarray) -> np.ndarray:
        """Where sum_k weights_k (end_k - start) = 0, and a server that adds it stays."""
        A = [w * (np.eye(D) - self.left(k, lr, rho)) for k, w in enumerate(weights)]
        return np.linalg.solve(sum(A), sum(a @ own for a, own in zip(A, self.own, strict=True)))

    def play(
        self,
        expression: str,
        lr: float,
        rho: float,
        rounds: int,
        selected: Callable[[int], list[int]] = lambda _: [0, 1, 2],
    ) -> np.ndarray:
        network = Network(Line(), loss=squares, dtype=torch.float64)
        played = Federation(
            expression,
            network,
            self.data,
            Local(lr=lr, steps=1, momentum=rho),
            lambda k, _: [np.arange(8)] * STEPS[k],
            weights="uniform",
        )
        for t in range(rounds):
            played.round(selected(t))
        return played.params["w"].numpy()


PACES = [(0.2, 0.0, 40), (0.08, 0.9, 40)]  # lr, momentum, rounds enough to stand still


@pytest.mark.parametrize(
    ("lr", "rho", "rounds"),
    [PACES[0], *(pytest.param(*p, marks=pytest.mark.slow) for p in PACES[1:])],
)
def test_fedavg_ends_off_the_optimum_fednova_less_and_scaffold_on_it(
    lr: float, rho: float, rounds: int
) -> None:
    quadratics = Quadratics()
    best = quadratics.optimum
    lengths = [path_length(LocalSGD(rho), s, lr, 0.0) for s in STEPS]
    drifted = quadratics.fixed_point(lr, rho, np.ones(3))
    normalised = quadratics.fixed_point(lr, rho, 1 / np.array(lengths))

    fedavg = quadratics.play("fedavg", lr, rho, rounds)
    fednova = quadratics.play("fednova", lr, rho, rounds)
    scaffold = quadratics.play("scaffold", lr, rho, rounds)
    np.testing.assert_allclose(fedavg, drifted, rtol=0, atol=1e-8)
    np.testing.assert_allclose(fednova, normalised, rtol=0, atol=1e-8)
    assert np.linalg.norm(scaffold - best) < 1e-8

    off, less = np.linalg.norm(fedavg - best), np.linalg.norm(fednova - best)
    assert off > 0.1
    assert less < 0.7 * off


def test_scaffold_ends_on_the_optimum_with_part_of_the_clients_too() -> None:
    """Two of three clients a round, in turn; what the third last said is still counted."""
    quadratics = Quadratics()
    ended = quadratics.play("scaffold", 0.2, 0.0, 60, lambda t: [t % 3, (t + 1) % 3])
    assert np.linalg.norm(ended - quadratics.optimum) < 1e-8


def test_fedprox_ends_nearer_than_fedavg_and_still_off() -> None:
    quadratics = Quadratics()
    best = quadratics.optimum
    fedavg = quadratics.fixed_point(0.2, 0.0, np.ones(3))
    fedprox = quadratics.play("fedprox(mu=2.0)", 0.2, 0.0, 40)
    assert 0.01 < np.linalg.norm(fedprox - best) < 0.7 * np.linalg.norm(fedavg - best)


def test_minibatch_sgd_ends_on_the_optimum() -> None:
    """All gradients are taken at the received model: there is no drift to correct."""
    quadratics = Quadratics()
    ended = quadratics.play("minibatch_sgd", 1.0, 0.0, 30)
    assert np.linalg.norm(ended - quadratics.optimum) < 1e-8


# --- the length of a path --------------------------------------------------------------------

LR = 0.1


def by_matrix(steps: int, rho: float, mu: float, nesterov: bool) -> float:
    """Displacement u and buffer m under a gradient of 1 - lr mu u: a linear recursion."""
    pull = LR * mu
    m = np.array([-pull, rho, 1.0])  # the buffer's row: rho m + (1 - lr mu u)
    u = np.array([1.0, 0.0, 0.0]) + (np.array([-pull, 0.0, 1.0]) + rho * m if nesterov else m)
    A = np.stack([u, m, [0.0, 0.0, 1.0]])
    return float((np.linalg.matrix_power(A, steps) @ [0.0, 0.0, 1.0])[0])


@each("steps", [1, 2, 5, 40])
@each("rho", [0.3, 0.9])
@each("mu", [0.05, 2.0])
def test_path_length_is_each_closed_form(steps: int, rho: float, mu: float) -> None:
    def ours(
        nesterov: bool = False, rho: float = 0.0, mu: float = 0.0, decay: float = 0.0
    ) -> float:
        return path_length(LocalSGD(rho, nesterov, decay), steps, LR, mu)

    def series(first: int) -> float:
        """Sum of (1 - rho^s) / (1 - rho), s from `first`: what each step's buffer has grown to."""
        missing = rho**first * (1 - rho**steps) / (1 - rho)
        return (steps - missing) / (1 - rho)

    assert ours() == steps
    assert ours(rho=rho) == pytest.approx(series(1), rel=1e-13)
    # Nesterov's step adds the gradient once more: it is as far along as the buffer's next
    assert ours(rho=rho, nesterov=True) == pytest.approx(series(2), rel=1e-13)
    assert ours(mu=mu) == pytest.approx((1 - (1 - LR * mu) ** steps) / (LR * mu), rel=1e-12)
    for nesterov in (False, True):
        found = ours(rho=rho, mu=mu, nesterov=nesterov)
        assert found == pytest.approx(by_matrix(steps, rho, mu, nesterov), rel=1e-12)
    assert ours(rho=rho, mu=mu, decay=0.1) == ours(rho=rho, mu=mu)


def test_path_length_of_gc_feds_and_fednovas_codes() -> None:
    """Counter c <- rho c + 1, a <- a + c; and with a proximal term a <- (1 - lr mu) a + 1."""
    c = a = proximal = 0.0
    for _ in range(7):
        c = 0.9 * c + 1.0
        a, proximal = a + c, (1.0 - LR * 0.5) * proximal + 1.0
    assert path_length(LocalSGD(0.9), 7, LR, 0.0) == pytest.approx(a, rel=1e-14)
    assert path_length(LocalSGD(), 7, LR, 0.5) == pytest.approx(proximal, rel=1e-14)


@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize(("rho", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_path_length_is_how_far_a_run_goes_on_a_linear_loss(
    mu: float, rho: float, nesterov: bool
) -> None:
    """The gradient is 1 in every entry; the upload of FedNova is what the run found."""
    network = Network(Line(), loss=lambda scores, y: scores[:, 0] + 0.0 * y, dtype=torch.float64)
    played = Federation(
        f"fedprox(mu={mu})+fednova",
        network,
        [(np.ones((2, D)), np.zeros(2))],
        Local(lr=LR, steps=1, momentum=rho, nesterov=nesterov),
        lambda k, _: [np.arange(2)] * 6,
    )
    played.round()
    length = path_length(LocalSGD(rho, nesterov), 6, LR, mu)
    assert float(played.played.replies[0].uploads["fednova"]["tau"]) == length
    np.testing.assert_allclose(played.params["w"].numpy(), -LR * length, rtol=1e-13)


def test_a_pull_is_not_in_the_path_of_gradients_that_do_not_follow_it() -> None:
    assert parse("fedprox(mu=0.5)+fednova").pull == 0.5
    assert parse("fedprox(mu=0.5)+gcfed").pull == 0.5
    for method in ("minibatch_sgd", "gradma.w", "fedreg"):
        assert parse(f"fedprox(mu=0.5)+{method}", weights="uniform").pull == 0.0
    data = skewed((8, 8))
    shaped = federation("fedprox(mu=0.5)+gradma.w+fednova", data, weights="uniform").round()
    assert {float(r.uploads["fednova"]["tau"]) for r in shaped.replies.values()} == {4.0}


# --- what projections promise, after real rounds ---------------------------------------------


def of(names: list[str], a: Tree, b: Tree) -> float:
    return float(tree.dot({k: a[k] for k in names}, {k: b[k] for k in names}))


@pytest.mark.parametrize("groups", ["tensor", "layer", "model"])
def test_fedgc_keeps_angles_acute(groups: str) -> None:
    """Clients against the server's last step, the server against every client, by the margin."""
    margin, lr = 1e-3, LOCAL.lr
    played = federation(f"fedgc(groups='{groups}', margin={margin})", contrary())
    last, mended, turned = None, 0, 0.0
    for _ in range(4):
        start = played.params
        done = played.round()
        moved = tree.scale(tree.sub(played.params, start), 1 / lr)
        clients = [tree.scale(update, 1 / lr) for update in done.deltas.values()]
        mean = {k: sum(client_state[k] for client_state in clients) / len(clients) for k in start}
        for names in group_names(list(start), groups):
            for client_state in clients if last is not None and of(names, last, last) > 0.0 else []:
                assert of(names, client_state, last) > margin - 1e-12
            if gap({k: moved[k] for k in names}, {k: mean[k] for k in names}) > 1e-12:
                mended += 1  # otherwise the mean itself: it meets the constraints, or nothing does
                least = min(of(names, moved, client_state) for client_state in clients)
                assert least == pytest.approx(margin, rel=1e-6)  # and no further than it has to
        turned += sum(
            float(reply.diagnostics["fedgc.cgc.active"]) for reply in done.replies.values()
        )
        last = moved
    assert mended > 0
    assert turned > 0.0


def test_fedgh_leaves_no_conflict_between_two() -> None:
    data = [contrary()[0], contrary()[-1]]
    plain = federation("fedavg", data, weights="uniform").round()
    a, b = plain.deltas.values()
    conflict = tree.dot(a, b)
    assert conflict < 0.0
    played = federation("fedgh", data)
    start = played.params
    done = played.round()
    assert done.diagnostics["fedgh.conflicts"] == 1.0
    calm = [tree.add(a, b, -conflict / tree.dot(b, b)), tree.add(b, a, -conflict / tree.dot(a, a))]
    assert abs(float(tree.dot(calm[0], b))) < 1e-15
    assert float(tree.dot(calm[0], calm[1])) > 0.0
    mean = tree.scale(tree.add(*calm), 0.5)
    assert gap(tree.sub(played.params, start), mean) < 1e-12


@pytest.mark.parametrize("groups", ["tensor", "model"])
def test_gradmas_server_steps_against_no_memory(groups: str) -> None:
    """Memories are restated by their recursion; clients come and go."""
    beta2 = 0.6
    played = federation(f"gradma.s(groups='{groups}', beta1=0.9, beta2={beta2})", contrary())
    memories: dict[int, Tree] = {}
    active = 0.0
    for selected in ([0, 1, 6], [6], [0, 2], [3, 4, 5, 6], [0, 1]):
        start = played.params
        done = played.round(selected)
        step = tree.sub(played.params, start)
        memories = {k: tree.scale(m, beta2) for k, m in memories.items()}
        for k in selected:
            old = memories.get(k, tree.zeros_like(start))
            memories[k] = tree.add(old, done.deltas[k])
        for names in group_names(list(start), groups):
            for memory in memories.values():
                size = (of(names, step, step) * of(names, memory, memory)) ** 0.5
                assert of(names, step, memory) > -1e-7 * size - 1e-16
        assert done.diagnostics["gradma.s.stored"] == len(memories)
        assert done.diagnostics["gradma.s.infeasible"] == 0.0
        active += done.diagnostics["gradma.s.active"]
    assert active > 0.0


@pytest.mark.parametrize("vectors", [False, True])
def test_gcfed_steps_within_its_subspace(vectors: bool) -> None:
    """Globally every tensor has rows of mean 0; locally all but the classifier's."""
    played = federation(f"gcfed(vectors={vectors})")
    start = played.params
    done = played.round()
    step = tree.sub(played.params, start)
    for name, moved in step.items():
        means = centralise(moved, vectors=True) - moved
        within = moved.ndim > 1 or vectors or name == "fc2.bias"  # softmax does it to this bias
        assert (float(means.abs().max()) < 1e-15) == within
    for update in done.deltas.values():
        assert float(update["fc1.weight"].mean(dim=1).abs().max()) < 1e-16
        assert float(update["fc2.weight"].mean(dim=1).abs().max()) > 1e-4


def test_gradmas_worker_turns_at_a_right_angle_after_a_full_batch_step() -> None:
    """The step back is forbidden, and so is a step on: the model nearly stays where it is."""
    x, y = skewed((12,))[0]

    def after(steps: int, method: str = "gradma.w") -> Tree:
        played = federation(method, [(x, y)], batches=lambda k, _: [np.arange(12)] * steps)
        return played.round().deltas[0]

    first, second = after(1), after(2)
    turned = tree.sub(second, first)
    size = float(tree.dot(first, first))
    assert abs(float(tree.dot(turned, first))) < 1e-12 * size
    assert float(tree.dot(turned, turned)) < 0.1 * size
    stalled, went = after(6), after(6, "fedavg")
    assert float(tree.dot(stalled, stalled)) < 1.5 * size < float(tree.dot(went, went)) / 4


def test_gradmas_worker_is_exact_where_its_directions_are_nearly_opposite() -> None:
    """In single precision too: the way that was gone is nearly a multiple of a gradient."""
    part = parse("gradma.w").parts[0]
    assert isinstance(part, GradMAW)
    for draw in range(20):
        random = torch.Generator().manual_seed(draw)
        before, now, noise, own = torch.randn(4, 2000, generator=random)
        way = -0.1 * (now + 3e-4 * noise)

        def turned(dtype: torch.dtype, rows: tuple[Tensor, ...]) -> Tensor:
            a, b, c, g = ({"w": row.to(dtype)} for row in rows)
            given = iter((a, b))
            step = SimpleNamespace(
                carry={"previous": a},
                start={"w": torch.zeros_like(g["w"])},
                grad=lambda _: next(given),
            )
            return part.transform_gradient(g, c, cast("Step", step))["w"]

        rows = (before, now, way, own)
        single, double = turned(torch.float32, rows), turned(torch.float64, rows)
        assert single.dtype == torch.float32
        assert float((single - double).norm()) < 1e-5 * float(own.norm())


@pytest.mark.parametrize("groups", ["tensor", "layer", "model"])
def test_gradmas_worker_keeps_its_three_angles_in_every_step(groups: str) -> None:
    """With mini-batches, and a model of its own from an earlier round."""
    played = federation(f"gradma.w(groups='{groups}')")
    played.round()
    start, network = played.params, played.network
    x, y = played.data[1]
    previous = tree.leaves(played.played.client_state[1]["gradma.w"], "last")

    def stop(steps: int) -> Tree:
        batches = played.batches
        played.batches = lambda k, t: list(batches(k, t))[:steps]
        try:
            return tree.add(start, played.reply(1)[0].update)
        finally:
            played.batches = batches

    turned = 0
    for s, rows in enumerate(played.batches(1, 1)):
        here, there = stop(s), stop(s + 1)
        batch = Batch(x[torch.as_tensor(rows)], y[torch.as_tensor(rows)])
        used = tree.scale(tree.sub(here, there), 1 / LOCAL.lr)

        def grad(at: Tree, batch: Batch = batch) -> Tree:
            return network.value_and_grad(at, {}, batch, "eager")[1]

        turned += gap(used, grad(here)) > 1e-6
        for row in (grad(previous), grad(start), tree.sub(here, start)):
            for names in group_names(list(start), groups):
                size = (of(names, used, used) * of(names, row, row)) ** 0.5
                assert of(names, used, row) > -1e-9 * size - 1e-16
        previous = here
    assert turned > 0


def test_fedregs_privacy_gradient_has_nothing_of_the_meaning() -> None:
    """With one step and gamma = 1, what is left is orthogonal to the gradient of uniform labels."""
    x, y = (torch.as_tensor(v) for v in skewed((6,))[0])
    batches = {"batches": lambda k, _: [np.arange(6)]}
    played = federation("fedreg(mg=True, eta_s=0.0)", [(x.numpy(), y.numpy())], **batches)
    start, network = played.params, played.network
    uniform = torch.full((6, 3), 1 / 3, dtype=torch.float64)
    meaning = network.value_and_grad(start, {}, Batch(x, uniform), "eager")[1]
    plain = network.value_and_grad(start, {}, Batch(x, y), "eager")[1]
    rule = played.plan.gradient_rule
    assert rule is not None
    message = server_message(played.plan, played.played.server, LOCAL.lr)
    client, _ = client_start(played.training, message, None, ClientInfo(0, 6), lambda: Batch(x, y))
    states = PartStates(message.broadcast, client.client_state, {}, client.prepared)
    view = Step(Batch(x, y), start, ClientInfo(0, 6), network, {}, states=states).view("fedreg")
    found = rule.gradient(start, view)
    size = float((tree.dot(plain, plain) * tree.dot(meaning, meaning)).sqrt())
    assert abs(float(tree.dot(found, meaning))) < 1e-12 * size
    assert abs(float(tree.dot(plain, meaning))) > 1e-3 * size


# --- gradients of nothing --------------------------------------------------------------------

NORMALISING = (
    *("fedmuon(iterations=0)", "fedmuon", "fedadamw", "fedlada", "fedsam", "fedlesam", "fedsol"),
    *(
        "fedspeed",
        "fedsmoo",
        "fedgamma",
        "mofedsam",
        "fedgc",
        "fedgh",
        "gradma",
        "fedreg",
        "fedawa",
    ),
    *("clip", "normbound", "cclip", "geomedian", "nnm", "fedexp", "fedams", "fedadam", "moon"),
    *("feddecorr", "feduv", "topk", "quantise"),
)
"""Methods that divide by a length, a deviation or a root, or take directions of a matrix."""


@pytest.mark.slow
def test_layers_without_a_gradient_stay_where_they_are() -> None:
    """Their units are dead; then, with a sure answer, the whole gradient is denormal."""
    for method in NORMALISING:
        for sure in (0.0, 710.0):
            network, data = toy_network(), skewed()[:3]
            network.params["fc1.bias"] -= 100.0
            network.params["fc2.bias"][0] += sure
            if sure:
                data = [(x, np.zeros_like(y)) for x, y in data]
            batches = [np.arange(4), np.arange(3, 6)]
            played = federation(method, data, network=network, batches=lambda k, _, b=batches: b)
            start = tree.clone(network.params)
            for _ in range(2):
                played.round()
            moved = {k: float((v - start[k]).abs().max()) for k, v in played.params.items()}
            least = 1e-6 if sure or method == "gradma" else moved.pop("fc2.bias")
            assert least >= 1e-6, method
            assert max(moved.values()) <= (1e-6 if sure else 0.0), (method, sure, moved)
