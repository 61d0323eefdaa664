"""Parameters that stay at the client: FedPer, FedRep, LG-FedAvg, FedBABU, FedSA-LoRA, FedBN.

One restatement serves for all: some entries of the vector belong to the client, each step moves
some entries, and the server averages the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from each import each
from fedkeel.config import Local
from fedkeel.task.batch import Batch
from harness import distance, oracle
from method.players import LOCAL, alike, equal, federation, gap, normed, play, skewed
from papers.numpy_net import Told, TrainingSetup, agree
from papers.personal import (
    BASE,
    COHORTS,
    HEAD,
    NAMES,
    collected,
    descend_some,
    follow,
    kept,
    mask,
    tensors,
)

LR = 0.2
BIASES = ("fc1.bias", "fc2.bias")


def personalised(
    setup: TrainingSetup,
    names: Sequence[str],
    moved: Callable[[int, int], Sequence[str]] = lambda s, steps: NAMES,
    **local: float,
) -> Iterator[Told]:
    """Keep parameters of these names; step s moves the parameters `moved(s, steps)`."""
    own, w, states = mask(setup.net, names), setup.start, {}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            begin = w.copy()
            begin[own] = states.get(i, setup.start[own])
            batches = list(setup.examples(i, t))
            steps = [
                (
                    lambda y, bx=bx, by=by: setup.net.grad(y, bx, by),
                    mask(setup.net, moved(s, len(batches))),
                )
                for s, (bx, by) in enumerate(batches)
            ]
            end = descend_some(begin, steps, LR, **local)
            states[i], sent[i] = end[own], (end - begin)[~own]
        p = setup.shares("examples", clients)
        w = w.copy()
        w[~own] += sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(w[~own], sent, {f"personal{i}": v for i, v in states.items()})


def first_head(share: float) -> Callable[[int, int], Sequence[str]]:
    return lambda s, steps: HEAD if s < int(share * steps + 0.5) else BASE


METHODS = {
    "fedper": (HEAD, None),
    "fedper(keep='*.bias')": (BIASES, None),
    "lgfedavg": (BASE, None),
    "fedsalora(keep='fc1.w')": (("fc1.weight",), None),
    "fedbabu": (HEAD, lambda s, steps: BASE),
    "fedrep": (HEAD, first_head(0.5)),
    "fedrep(first=0.8)": (HEAD, first_head(0.8)),
}


@each("method", METHODS)
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_personal_parameters(method: str, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    names, moved = METHODS[method]
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    more = {} if moved is None else {"moved": moved}
    story = personalised(setup, names, **more, **local)
    agree(setup.ours(method, LR, **ours), story, COHORTS, lambda f: kept(f, "personal"))


@pytest.mark.parametrize(
    ("name", "method", "epochs"),
    [
        ("pfllib_fedrep_a", "fedrep(first=0.5)", 4),
        ("flbench_fedrep_a", "fedrep(first=0.6666666666666666)", 3),
        ("pfllib_fedbabu_a", "fedbabu", 2),
        ("flbench_fedbabu_a", "fedbabu", 2),
    ],
)
def test_they_follow_both_collections(name: str, method: str, epochs: int) -> None:
    o = oracle(name)
    played = collected(o, method, epochs)

    def look(t: int, k: int) -> dict[str, float]:
        ours = played.played.client_state[k]["personal"]
        return {"head": distance(ours, tensors(o, f"r{t}.client{k}.", HEAD))}

    follow(o, played, look)


# --- laws and reductions ---------------------------------------------------------------------


def test_alone_a_client_trains_as_in_fedavg() -> None:
    alone = skewed((12,))
    for method in ("fedper", "lgfedavg", "fedsalora(keep='fc')"):
        played, plain = federation(method, alone), federation("fedavg", alone)
        for _ in range(3):
            played.round()
            plain.round()
        own = played.played.client_state[0]["personal"]
        whole = {k: {**played.params, **own}[k] for k in plain.params}
        assert gap(whole, plain.params) < 1e-14


@each("method", ["lgfedavg(share='*')", "fedsalora", "fedbn"])
@each("other", ["", "+scaffold", "+gcfed"])
def test_what_keeps_nothing_is_the_method_without_it(method: str, other: str) -> None:
    assert equal(play(method + other), play(other.lstrip("+") or "fedavg"))


def test_clients_of_the_same_examples_have_the_same_head() -> None:
    data = [alike()[0]] * 3
    played = federation("fedper", data)
    for _ in range(2):
        played.round()
    heads = [state["personal"] for state in played.played.client_state.values()]
    assert equal(heads[0], heads[1])
    other = federation("fedper")
    other.round()
    assert gap(*(other.played.client_state[k]["personal"] for k in (0, 1))) > 1e-2


@pytest.mark.parametrize("optimiser", [{"momentum": 0.9}, {"optimiser": "adamw", "lr": 0.01}])
def test_a_phase_of_all_steps_leaves_the_others_where_they_were(optimiser: dict) -> None:
    local = LOCAL.model_copy(update=optimiser)
    head, base = (federation(f"fedrep(first={f})", local=local) for f in (1.0, 0.0))
    initial = head.network.params
    for played in (head, base):
        for _ in range(2):
            played.round()
    assert equal(head.params, {k: initial[k] for k in BASE})
    for k in range(4):
        assert gap(head.played.client_state[k]["personal"], {n: initial[n] for n in HEAD}) > 1e-2
        assert equal(base.played.client_state[k]["personal"], {n: initial[n] for n in HEAD})
    assert gap(base.params, head.params) > 1e-2


def test_fedbabu_never_moves_the_head_and_sends_the_base_alone() -> None:
    played = federation("fedbabu")
    for _ in range(2):
        done = played.round()
    for k, delta in done.deltas.items():
        assert tuple(delta) == BASE
        own = done.client_state[k]["personal"]
        assert equal(own, {n: played.network.params[n] for n in HEAD})


def test_fedbn_keeps_scale_and_shift_and_the_running_statistics() -> None:
    played = federation("fedbn", network=normed(), buffers="local")
    statistics = federation("fedbn(parameters=False)", network=normed(), buffers="local")
    plain = federation("fedavg", network=normed(), buffers="local")
    for p in (played, statistics, plain):
        done = p.round()
        assert not done.replies[0].buffers
        assert int(done.client_state[0]["buffers"]["norm.num_batches_tracked"]) == 6
    assert equal(statistics.params, plain.params)
    assert tuple(played.params) == tuple(n for n in plain.params if "norm" not in n)
    first, second = (played.played.client_state[k]["personal"] for k in (0, 1))
    assert tuple(first) == ("norm.weight", "norm.bias")
    assert gap(first, second) > 1e-3


def test_the_gradient_of_the_others_is_taken_at_the_clients_own() -> None:
    """By automatic differentiation of the whole network, after the head has moved."""
    played = federation("fedper", local=Local(lr=0.1, epochs=1, batch_size="all"))
    played.batches = lambda k, _: [np.arange(7)]
    played.round([1])
    whole = {**played.params, **played.played.client_state[1]["personal"]}
    whole = {k: v.clone().requires_grad_() for k, v in whole.items()}
    with torch.enable_grad():
        x, y = played.data[1]
        played.network.loss(whole, {}, Batch(x, y)).backward()
    done = played.round([1])
    assert tuple(done.deltas[1]) == BASE
    for name, value in whole.items():
        own = done.client_state[1]["personal"]
        delta = own[name] - value if name in own else done.deltas[1][name]
        assert float((delta + 0.1 * value.grad).detach().abs().max()) < 1e-15, name
