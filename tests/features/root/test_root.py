"""Examples at the server: who has them, that the server trains on them alike, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedkeel as fk
from each import each
from fedkeel.data.federation import Federation
from fedkeel.engine.base import ClientJob
from fedkeel.engine.local import train_client
from fedkeel.errors import CompositionError, ConfigError, DataError
from fedkeel.features.budget.report import PrivacyReport
from fedkeel.features.root.examples import drawn, read_file, without
from fedkeel.features.root.training import RootTraining
from fedkeel.method.server_round import server_message
from fedkeel.report.runs import load_runs
from fedkeel.runner.feature_hooks import Hooks
from fedkeel.runner.features import hooks_of
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import federation, held, prepared, same

ROOT = fk.Root(examples=9)


def ran(method: str = "fltrust", **options: Any) -> Result:
    return start(prepared(method, **{"root": ROOT, "dtype": "float64", **options}))


def training(hooks: list[Hooks]) -> RootTraining:
    return next(hook for hook in hooks if isinstance(hook, RootTraining))


def rows_of(clients: Federation) -> set[int]:
    return set(clients.rows.tolist())


def test_drawn_examples_are_at_the_server_and_nowhere_else() -> None:
    clients = federation()
    places = drawn(clients, 9, seed=3)
    left = without(clients, places)
    own = set(clients.rows[places].tolist())
    assert len(own) == 9
    assert not own & rows_of(left)
    assert own | rows_of(left) == rows_of(clients)
    for k in range(len(clients)):
        assert set(left.client(k).tolist()) == set(clients.client(k).tolist()) - own
    assert places.tolist() != drawn(clients, 9, seed=4).tolist()
    most = int((clients.sizes - 1).sum())
    assert without(clients, drawn(clients, most, seed=0)).sizes.tolist() == [1] * len(clients)
    with pytest.raises(DataError, match="too few examples"):
        drawn(clients, most + 1, seed=0)


def test_every_method_of_a_comparison_trains_without_them() -> None:
    plain, own = prepared("fedavg", root=ROOT), prepared("fltrust", root=ROOT)
    assert plain.clients.rows.tolist() == own.clients.rows.tolist()
    assert len(plain.clients.rows) == len(federation().rows) - 9
    assert not any(isinstance(hook, RootTraining) for hook in hooks_of(plain))
    assert plain.key != prepared("fedavg").key
    assert start(own).record.root.startswith("9 examples at the server, drawn")


def test_the_server_trains_as_a_client_with_these_examples_does() -> None:
    """The same update as that of a client more, in a federation that has it."""
    run = prepared("fltrust", root=ROOT, dtype="float64", clients=federation())
    given = run.ingredients.clients(0)
    places, setup = drawn(given, 9, 0), run.setup
    message = server_message(run.plan, run.server, 0.05)
    rows = np.concatenate([setup.federation.rows, given.rows[places]])
    offsets = np.append(setup.federation.offsets, len(rows))
    more = Federation(setup.federation.data, rows, offsets)
    job = ClientJob(0, len(given), 0)
    there = train_client(replace(setup, federation=more), message, job, None).reply.update
    here = training(hooks_of(run)).update(message)
    assert all(torch.equal(there[name], tensor) for name, tensor in here.items())
    assert any(bool(tensor.any()) for tensor in here.values())


@each("kind", ["workers", "vectorized"])
def test_engines_agree(kind: str) -> None:
    more = {"workers": 2} if kind == "workers" else {}
    one, other = ran(), ran(kind=kind, **more)
    for name, tensor in one.params.items():
        torch.testing.assert_close(tensor, other.params[name], rtol=0, atol=1e-10)
    assert [row.diagnostics["fltrust.score"] for row in one.rows[1:]] == pytest.approx(
        [row.diagnostics["fltrust.score"] for row in other.rows[1:]]
    )


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    class Killer(fk.Callback):
        def on_round_end(self, row: Any, model: Any) -> None:
            if row.round == 2:
                raise Stop

    run = prepared("fltrust", root=ROOT, dtype="float64", rounds=4)
    with pytest.raises(Stop):
        start(run, tmp_path / "run", callbacks=[Killer()])
    assert same(start(run, tmp_path / "run", resume=True), ran(rounds=4))


def test_nodes_leave_the_server_its_examples(tmp_path: Path) -> None:
    run = prepared("fltrust", root=ROOT, dtype="float64")
    remote, local = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path))), ran()
    for row in (*remote.rows, *local.rows):
        row.bytes_down.clear()
        row.bytes_up.pop("evaluation", None)
    assert same(remote, local)


def test_attackers_do_not_reach_the_server_s_examples() -> None:
    attack = fk.Adversary(kind="label_flip", share=0.9)
    clean, poisoned = (
        prepared("fltrust", root=ROOT),
        prepared("fltrust", root=ROOT, adversary=attack),
    )
    message = server_message(clean.plan, clean.server, 0.05)
    one, other = (training(hooks_of(run)).update(message) for run in (clean, poisoned))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_sign_flip_of_most_clients_is_withstood() -> None:
    attack = fk.Adversary(kind="sign_flip", share=0.6, factor=5.0)
    options = {
        "adversary": attack,
        "rounds": 8,
        "per_round": 6,
        "local": fk.Local(lr=0.1, epochs=2),
    }
    by_trust, by_mean = (ran(method, **options) for method in ("fltrust", "fedavg"))
    scores = [run.rows[-1].test.values["accuracy"] for run in (by_trust, by_mean)]
    assert scores[0] > scores[1] + 0.2


# --- a file --------------------------------------------------------------------------------------


def written(folder: Path, **arrays: Any) -> fk.Root:
    path = folder / "root.npz"
    np.savez(path, **arrays)
    return fk.Root(file=str(path))


def test_a_file_has_them_too(tmp_path: Path) -> None:
    own = held(12)
    root = written(tmp_path, x=own.x.numpy(), label=own.y.numpy())
    run = prepared("fltrust", root=root, dtype="float64")
    assert run.clients.rows.tolist() == federation().rows.tolist()
    result = start(run)
    assert result.record.root.startswith("12 examples at the server, read from")
    other = written(tmp_path, x=own.x.numpy(), label=2 - own.y.numpy())
    changed = prepared("fltrust", root=other, dtype="float64")
    assert changed.key != run.key
    assert not same(start(changed), result)


def test_a_privacy_budget_does_not_cover_them(tmp_path: Path) -> None:
    private = {"privacy": fk.Privacy(epsilon=4.0, delta=0.01, unit="example"), "rounds": 1}
    with pytest.raises(ConfigError, match="does not cover the server's examples") as refused:
        prepared("fltrust", root=ROOT, **private)
    assert "without noise" in str(refused.value)
    assert "root.file" in str(refused.value)
    own = held(12)
    root = written(tmp_path, x=own.x.numpy(), label=own.y.numpy())
    start(prepared("fltrust", root=root, **private), tmp_path / "run")
    (method,) = load_runs([tmp_path / "run"])
    (told,) = PrivacyReport.notes([method])
    assert "(example level); the server's own examples (root.file) are not protected." in told
    for unused in (ROOT, root):  # fedavg has no use for them
        says = start(prepared("fedavg", root=unused, **private)).record.privacy.says
        assert "not protected" not in says


def test_inputs_of_a_file_are_prepared_as_those_of_the_clients(tmp_path: Path) -> None:
    data = replace(federation().data, scale=((1.0,) * 5, (2.0, 2.0, 2.0, 2.0, 1e30)))
    own = np.arange(30.0).reshape(6, 5)
    root = written(tmp_path, x=own, label=np.array([0, 1, 2, 0, 1, 2]))
    read = read_file(root.file or "", data)
    expected = (own - 1.0) / 2.0
    expected[:, 4] = 0.0
    np.testing.assert_allclose(read.x.numpy(), expected)
    named = replace(data, label_names=("2", "0", "1"))
    assert read_file(root.file or "", named).y.tolist() == [1, 2, 0, 1, 2, 0]


# --- refusals ------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs examples at the server"):
        prepared("fltrust")
    for settings in ({}, {"examples": 3, "file": "a.npz"}):
        with pytest.raises(ConfigError, match="'examples' or 'file'"):
            fk.Root(**settings)
    for kept in ("scaffold", "fedper", "ditto"):
        with pytest.raises(CompositionError, match="a client that keeps nothing from round to"):
            prepared(f"fltrust+{kept}", root=ROOT)
    with pytest.raises(CompositionError, match="cannot train at the server"):
        prepared(
            "fltrust",
            root=ROOT,
            local=fk.Local(lr=0.1, steps=2, batch_size=4, momentum=0.9, keep_state=True),
        )
    absent = prepared("fltrust", root=fk.Root(file=str(tmp_path / "nowhere.npz")))
    with pytest.raises(DataError, match=r"nowhere\.npz"):
        start(absent)
    wide = written(tmp_path, x=np.zeros((4, 9)), label=np.zeros(4))
    with pytest.raises(DataError, match="another shape"):
        prepared("fltrust", root=wide)
    unknown = written(tmp_path, x=np.zeros((4, 5)), label=np.full(4, 7))
    with pytest.raises(DataError, match="label that is not known"):
        prepared("fltrust", root=unknown)
