"""Vectors from public code that is not ours (tests/oracles/README.md says from which)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.context import ClientInfo, Message, Population, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.method.local_loop import client_finish, client_start, client_step
from fedkeel.method.local_training import ClientTraining
from fedkeel.solve.projections import centralise
from fedkeel.solve.span import Span
from fedkeel.task.batch import Batch
from harness import Federation, consecutive, distance, oracle, tensors, toy_network


def clients_of(o: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    count = sum(key.endswith(".x") and key.startswith("client") for key in o)
    return [(o[f"client{k}.x"], o[f"client{k}.y"]) for k in range(count)]


def hp(o: dict[str, np.ndarray], name: str) -> float:
    return float(o[f"hp.{name}"])


def rounds_of(o: dict[str, np.ndarray]) -> int:
    return max(int(k[1 : k.index(".")]) for k in o if k[0] == "r" and k[1].isdigit())


def play(o: dict[str, np.ndarray], expression: str) -> Federation:
    """Run a GC-Fed repository experiment: uniform mean, consecutive batches."""
    clients = clients_of(o)
    size, epochs = int(hp(o, "batch_size")), int(hp(o, "epochs"))
    local = Local(
        lr=hp(o, "lr"),
        epochs=epochs,
        batch_size=size,
        momentum=hp(o, "momentum"),
        weight_decay=hp(o, "weight_decay"),
    )
    return Federation(
        expression,
        toy_network(tensors(o, "init.")),
        clients,
        local,
        lambda k, _: consecutive(len(clients[k][1]), size, epochs),
        weights="uniform",
    )


def follow(name: str, expression: str, check: object = None) -> None:
    o = oracle(name)
    federation = play(o, expression)
    for t in range(1, rounds_of(o) + 1):
        selected = o[f"r{t}.selected"].astype(int).tolist() if f"r{t}.selected" in o else None
        played = federation.round(selected)
        for k, update in played.deltas.items():
            assert distance(update, tensors(o, f"r{t}.client{k}.delta.")) < 1e-12
        assert distance(federation.params, tensors(o, f"r{t}.")) < 1e-12
        if callable(check):
            check(o, t, played)


@pytest.mark.parametrize("case", ["a", "b"])
def test_local_gc_follows_the_gcfed_repository(case: str) -> None:
    follow(f"gcfed_localgc_{case}", "localgc(vectors=True)")


def test_gcfed_by_lambda_follows_the_gcfed_repository() -> None:
    follow("gcfed_gcfed_a", "gcfed(lam=0.9, vectors=True)")


def test_gcfed_by_head_follows_the_gcfed_repository() -> None:
    follow("gcfed_gcfed_b", "gcfed(head='fc2', vectors=True)")


@pytest.mark.parametrize("case", ["a", "b"])
def test_fedprox_follows_the_gcfed_repository(case: str) -> None:
    o = oracle(f"gcfed_fedprox_{case}")
    follow(f"gcfed_fedprox_{case}", f"fedprox(mu={hp(o, 'fedprox_mu')!r})")


@pytest.mark.parametrize("case", ["a", "partial"])
def test_scaffold_follows_the_gcfed_repository(case: str) -> None:
    def check(o: dict[str, np.ndarray], t: int, played: object) -> None:
        server = tree.leaves(played.server.memory["scaffold"], "c")
        assert distance(server, tensors(o, f"r{t}.c.")) < 1e-12
        for k, client_state in played.client_state.items():
            if f"r{t}.client{k}.c.fc1.bias" in o:
                ours = tree.leaves(client_state["scaffold"], "c")
                assert distance(ours, tensors(o, f"r{t}.client{k}.c.")) < 1e-12

    follow(f"gcfed_scaffold_{case}", "scaffold", check)


def test_centralisation_is_that_of_the_gcfed_repository() -> None:
    o = oracle("gc_operator")
    cases = sorted({k.split(".")[0] for k in o if k.startswith("t") and k.endswith(".in")})
    assert len(cases) == 8
    for case in cases:
        ours = centralise(torch.from_numpy(o[f"{case}.in"]), vectors=True)
        for theirs in ("local", "globalgc", "gcfed"):
            assert np.abs(ours.numpy() - o[f"{case}.{theirs}"]).max() < 1e-15


@pytest.mark.parametrize("name", ["fednova_sgd", "fednova_momentum", "fednova_prox"])
def test_fednova_follows_its_authors(name: str) -> None:
    o = oracle(name)
    clients = clients_of(o)
    size = int(hp(o, "batch_size"))
    mu = hp(o, "mu") if "hp.mu" in o else 0.0
    done = dict.fromkeys(range(len(clients)), 0)

    def batches(k: int, t: int) -> list[np.ndarray]:
        every = consecutive(len(clients[k][1]), size)
        steps = int(o["taus"][t][k])
        found = [every[(done[k] + s) % len(every)] for s in range(steps)]
        done[k] += steps
        return found

    expression = f"fedprox(mu={mu!r})+fednova(effective='steps')" if mu else "fednova"
    federation = Federation(
        expression,
        toy_network(tensors(o, "init.")),
        clients,
        Local(
            lr=hp(o, "lr"), steps=1, momentum=hp(o, "momentum"), weight_decay=hp(o, "weight_decay")
        ),
        batches,
    )
    received = tensors(o, "init.")
    for t in range(1, rounds_of(o) + 1):
        taus = o["taus"][t - 1]
        played = federation.round()
        for k, update in played.deltas.items():
            length = o["a"][t - 1][k]
            ours = tree.scale(update, float(length))
            theirs = tree.sub(tensors(o, f"r{t}.client{k}."), received)
            assert distance(ours, theirs) < 1e-12
            if not mu:
                assert float(played.replies[k].uploads["fednova"]["tau"]) == pytest.approx(
                    float(length), abs=1e-12
                )
            else:
                assert float(played.replies[k].uploads["fednova"]["tau"]) == taus[k]
        received = tensors(o, f"r{t}.")
        assert distance(federation.params, received) < 1e-12


@pytest.mark.parametrize("name", ["fedreg_steps", "fedreg_steps_b"])
def test_fedreg_follows_its_authors(name: str) -> None:
    """Five calls of the public step function on one batch, with its own log(p + 1e-12)."""
    o = oracle(name)

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        soft = F.one_hot(y, logits.shape[1]).to(logits) if y.ndim == 1 else y
        return -(soft * torch.log(torch.softmax(logits, dim=1) + 1e-12)).sum(dim=1)

    start = tensors(o, "theta0.")
    x, y = torch.from_numpy(o["x"]), torch.from_numpy(o["y"].astype(np.int64))
    gamma, eta_s = hp(o, "gamma"), hp(o, "eta_s")
    plan = parse(f"fedreg(gamma={gamma!r}, eta_s={eta_s!r})")
    network = toy_network(start, loss=loss)
    network.scores_classes = True  # as a task finds out
    training = ClientTraining(plan, network, Local(lr=hp(o, "lr"), epochs=1))
    message = Message(start, {}, {}, 0, hp(o, "lr"))
    with torch.no_grad():
        client, progress = client_start(
            training, message, None, ClientInfo(0, len(y)), lambda: Batch(x, y)
        )
        made = client.prepared["fedreg"]
        assert np.abs(made["pseudo_x"].numpy() - o["batch0.pseudo_x"]).max() < 1e-12
        assert np.abs(made["pseudo_y"].numpy() - o["batch0.pseudo_y"]).max() < 1e-12
        assert np.abs(made["perturbed_x"].numpy() - o["batch0.perturbed_x"]).max() < 1e-12
        rows = torch.arange(len(y))
        for s in range(1, 6):
            progress = client_step(client, progress, Batch(x, y), rows, rows)
            assert distance(progress.params, tensors(o, f"step{s}.")) < 1e-12
        assert client_finish(client, progress, 5).finite


def test_server_momentum_is_flowers_fedavgm() -> None:
    o = oracle("flwr_fedavgm")
    names = ("w1", "b1", "w2", "s")
    eta = hp(o, "server_learning_rate")
    beta = hp(o, "server_momentum")
    plan = parse(f"momentum(beta={beta!r}, lr={eta!r})")
    params = {n: torch.from_numpy(o[f"init.{n}"]) for n in names}
    counts = o["num_examples"].astype(float)
    population = Population(len(counts), len(counts))
    state = plan.server_optimiser.init_optimiser(params, population)
    for t in range(1, 4):
        rows = {
            n: torch.stack(
                [torch.from_numpy(o[f"r{t}.client{k}.{n}"]) - params[n] for k in range(len(counts))]
            )
            for n in names
        }
        cohort = RoundCohort(
            np.arange(len(counts)),
            counts / counts.sum(),
            0.1,
            t - 1,
            population,
            names,
            0,
            state=state,
        )
        update = plan.reduction.reduce(Span(rows), cohort)
        params, state = plan.server_optimiser.apply(params, update, Span(rows), cohort)
        assert distance(params, {n: torch.from_numpy(o[f"r{t}.{n}"]) for n in names}) < 1e-12
