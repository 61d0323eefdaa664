"""IFCA, restated from Ghosh et al. 2020, Algorithm 1, with model averaging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

import fedkeel as fk
from fedkeel.config import Local
from fedkeel.errors import CompositionError, ConfigError, RunError
from fedkeel.features.secure.legality import refuse_single_updates
from fedkeel.method.grammar import parse
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.study.conformance import check_method
from fedkeel.task.network import Network
from fedkeel.tree import Tree
from harness import Federation, toy_network
from method.players import equal, federation, gap, play
from method.test_theory import Line, squares
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat
from papers.personal import COHORTS
from toys import Net, prepared

LR = 0.2


def models_of(ours: Federation) -> list[Tree]:
    """All models of the server."""
    others = ours.played.server.memory["ifca"].get("models", {})
    count = len(next(iter(others.values()), ()))
    return [ours.params, *({k: t[j] for k, t in others.items()} for j in range(count))]


def chosen_by(ours: Federation) -> list[int]:
    """The model that each client of the last round has chosen."""
    replies = ours.played.replies.values()
    return [int(reply.uploads["ifca"]["chosen"].argmax()) for reply in replies]


def loss(setup: TrainingSetup, model: Vector, k: int) -> float:
    x, y = setup.data[k]
    return float(-np.log(setup.net.predict(model, x)[np.arange(len(y)), y]).mean())


def ifca(
    setup: TrainingSetup,
    models: list[Vector],
    chosen: list[dict[int, int]],
    mu: float = 0.0,
    **local: float,
) -> Iterator[Told]:
    """Lines 4 to 15; `chosen` is told which model each client has taken."""
    for t, clients in enumerate(COHORTS):
        sent: dict[int, Vector] = {}
        own: dict[int, int] = {}
        for i in clients:
            own[i] = int(np.argmin([loss(setup, model, i) for model in models]))
            begin = models[own[i]]

            def at(bx, by, begin=begin):
                return lambda w: setup.net.grad(w, bx, by) + mu * (w - begin)

            sent[i] = descend(begin, (at(*b) for b in setup.examples(i, t)), LR, **local) - begin
        for j, model in enumerate(models):
            group = [sent[i] for i in clients if own[i] == j]
            models[j] = model + sum(group) / len(group) if group else model
        chosen.append(own)
        yield Told(models[0], sent, {f"model{j}": m.copy() for j, m in enumerate(models)})


def look(ours: Federation) -> dict[str, Vector]:
    return {f"model{j}": flat(model) for j, model in enumerate(models_of(ours))}


@pytest.mark.parametrize("clusters", [2, 3])
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}])
def test_ifca(clusters: int, local: dict) -> None:
    setup = TrainingSetup(epochs=2, seed=1)
    ours = setup.ours(f"ifca(clusters={clusters})", LR, **local)
    chosen: list[dict[int, int]] = []
    begun = [flat(model) for model in models_of(ours)]
    agree(ours, ifca(setup, begun, chosen, **local), COHORTS, look)
    assert len({j for own in chosen for j in own.values()}) > 1


def test_a_proximal_term_pulls_to_the_model_that_was_chosen() -> None:
    setup = TrainingSetup(epochs=2, seed=1)
    ours = setup.ours("ifca+fedprox(mu=0.5)", LR)
    chosen: list[dict[int, int]] = []
    begun = [flat(model) for model in models_of(ours)]
    agree(ours, ifca(setup, begun, chosen, mu=0.5), COHORTS, look)
    assert len({j for own in chosen for j in own.values()}) > 1


# --- laws and reductions ---------------------------------------------------------------------


@pytest.mark.parametrize("beside", ["", "+fedprox(mu=0.5)", "+topk"])
def test_one_model_is_fedavg_and_so_are_equal_ones_at_first(beside: str) -> None:
    """Later, a client for which the model got worse may take one that nobody has trained."""
    alone = (beside or "+fedavg")[1:]
    plain = play(alone, rounds=3, weights="uniform")
    assert equal(play("ifca(clusters=1)" + beside, rounds=3), plain)
    first = play("ifca(clusters=3, spread=0.0)" + beside, rounds=1)
    assert equal(first, play(alone, rounds=1, weights="uniform"))


def test_the_models_begin_as_shuffles_of_the_global_one() -> None:
    one, two, three = models_of(federation("ifca(clusters=3)"))
    half = models_of(federation("ifca(clusters=3, spread=0.5)"))[1]
    for name, tensor in one.items():
        values = [m[name].reshape(-1).sort().values for m in (one, two, three)]
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-15)
        torch.testing.assert_close(values[0], values[2], rtol=0, atol=1e-15)
        torch.testing.assert_close(half[name], (tensor + two[name]) / 2, rtol=0, atol=1e-15)
    assert gap(two, one) > 0.1
    assert gap(three, two) > 0.1


def planted(sizes: Sequence[int] = (12, 9, 15, 12, 10, 14)) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients of the same inputs; those of odd number call each class by the name of the next."""
    rng = np.random.default_rng(3)
    centres, out = 2.0 * rng.normal(size=(3, 8)), []
    for k, n in enumerate(sizes):
        y = np.arange(n) % 3
        out.append((centres[y] + 0.3 * rng.normal(size=(n, 8)), (y + k % 2) % 3))
    return out


def test_planted_clusters_are_found_and_each_is_fedavg_of_its_own() -> None:
    """Once nobody changes, the clusters know nothing of each other."""
    played = federation("ifca", planted())
    first = models_of(played)
    for _ in range(6):
        played.round()
        chosen = chosen_by(played)
        assert chosen == [chosen[0], 1 - chosen[0]] * 3
        assert played.played.diagnostics["ifca.clients_0"] == 3
    for parity in (0, 1):
        network = toy_network(first[chosen[parity]])
        alone = federation("fedavg", planted(), network=network, weights="uniform")
        for _ in range(6):
            alone.round([parity, parity + 2, parity + 4])
        assert gap(alone.params, models_of(played)[chosen[parity]]) < 1e-12


def test_it_recovers_a_mixture_of_linear_models() -> None:
    """The paper's Section 6.1 in small: y = <x, theta_j> + noise, theta_j apart."""
    rng = np.random.default_rng(0)
    truth = np.array([[1.0, -1.0, 1.0], [-1.0, 1.0, 0.5]])
    data = []
    for k in range(8):
        x = rng.normal(size=(60, 3))
        data.append((x, x @ truth[k % 2] + 0.05 * rng.normal(size=60)))
    network = Network(Line(), loss=squares, dtype=torch.float64)
    network.params = {"w": torch.tensor([0.6, -0.2, 0.1], dtype=torch.float64)}
    one_step = Local(lr=0.3, steps=1, batch_size="all")
    played = Federation("ifca", network, data, one_step, lambda *_: [np.arange(60)] * 3)
    for _ in range(30):
        played.round()
    found = np.stack([model["w"].numpy() for model in models_of(played)])
    order = np.argsort(-found[:, 0])
    assert np.abs(found[order] - truth).max() < 0.03
    chosen = chosen_by(played)
    assert chosen == [chosen[0], 1 - chosen[0]] * 4
    one = Federation("fedavg", network, data, one_step, lambda *_: [np.arange(60)] * 3)
    for _ in range(30):
        one.round()
    assert np.abs(one.params["w"].numpy() - truth).max(axis=1).min() > 0.5


def test_a_model_that_nobody_has_chosen_stays() -> None:
    played = federation("ifca", planted())
    before = models_of(played)
    played.round([0, 2, 4])
    chosen = chosen_by(played)[0]
    assert equal(models_of(played)[1 - chosen], before[1 - chosen])
    assert gap(models_of(played)[chosen], before[chosen]) > 1e-3


# --- runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_each_client_is_scored_by_the_model_that_fits_it(kind: str) -> None:
    """Also one that has never taken part. No model is called the one of the run."""
    ready = prepared("ifca(clusters=3)", rounds=2, per_round=3, kind=kind)
    found = start(ready)
    clients, row = ready.setup.federation, found.rows[-1]
    models = [found.client_model(str(k)) for k in range(6)]
    assert row.per_client is None
    assert row.test.examples == len(clients.data)
    total = sum(row.personal["accuracy"][k] * n for k, n in enumerate(clients.sizes))
    assert row.test.values["accuracy"] == pytest.approx(total / sum(clients.sizes))
    for k in range(6):
        rows = torch.from_numpy(clients.client(k))
        x, y = clients.data.x[rows], clients.data.y[rows]
        losses = [float(functional.cross_entropy(functional_call(Net(), m, x), y)) for m in models]
        assert losses[k] == pytest.approx(min(losses), abs=1e-6)
        assert row.personal["loss"][k] == pytest.approx(losses[k], abs=1e-5)
    with pytest.raises(RunError, match="no single model"):
        found.state_dict()
    one = sum(t.numel() for t in ready.server.params.values()) * 4
    assert row.bytes_down == {"model": 3 * one, "ifca": 3 * 2 * one}
    assert row.bytes_up == {"model": 3 * one, "ifca": 3 * 3 * 4}


def test_statistics_of_batch_normalisation_stay_at_the_client() -> None:
    local = fk.Local(lr=0.05, epochs=1, batch_size=4, drop_last="single")
    found = start(prepared("ifca", lambda: Net(norm=True), rounds=2, per_round=6, local=local))
    means = [found.client_model(str(k))["norm.running_mean"] for k in range(6)]
    assert not any(torch.equal(means[0], other) for other in means[1:])


def test_it_passes_every_check() -> None:
    assert all(not check.failure for check in check_method("ifca(clusters=3)"))


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", ["momentum", "median", "fedbuff", "scaffold", "fedvarp", "mime", "fedgh", "fedcm"]
)
def test_what_acts_on_all_updates_together_is_refused(other: str) -> None:
    for expression in (f"ifca+{other}", f"{other}+ifca"):
        with pytest.raises(CompositionError) as caught:
            parse(expression)
        said = ("ONE_MODEL", "FRESH_UPDATES", "in the slot")
        assert any(text in caught.value.what for text in said)


@pytest.mark.parametrize(
    "other", ["ditto", "fedprox", "moon", "fedper", "topk", "finetune", "clip"]
)
def test_what_acts_at_a_client_goes_beside_it(other: str) -> None:
    played = federation(f"ifca+{other}", planted())
    before = models_of(played)
    played.round()
    assert any(gap(a, b) > 1e-4 for a, b in zip(models_of(played), before, strict=True))


def test_secure_sums_diagnostics_and_selection_by_losses_are_refused() -> None:
    """They take one model for that of all clients; `tests/study/audit` has the audit."""
    with pytest.raises(CompositionError, match="secure aggregation"):
        refuse_single_updates(parse("ifca"))
    ready = prepared("ifca")
    settings = ready.settings.model_copy(update={"diagnose": fk.Diagnose(kinds="drift")})
    with pytest.raises(ConfigError, match="do not go with ifca"):
        prepare(settings, ready.ingredients)
    by_losses = fk.Cohort(clients=2, sampling="power_of_choice", candidates=4)
    with pytest.raises(ConfigError, match="several models"):
        prepared("ifca", cohort=by_losses)


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_privacy_budget_is_refused(unit: str) -> None:
    """Which model a client chooses depends on its examples, and no noise covers that."""
    privacy = fk.Privacy(epsilon=5.0, delta=1e-3, unit=unit)
    with pytest.raises(CompositionError, match="ifca"):
        prepared("ifca", privacy=privacy, weights="uniform")
