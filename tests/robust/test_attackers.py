"""Attackers in runs: who they are, that every engine has the same ones, and what they do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError
from fedkeel.robust.attackers import attackers
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from toys import prepared, same

TWO = (1, 4)


def ran(
    kind: str = "none", method: str = "fedavg", engine: str = "sequential", **options: object
) -> Result:
    """A run with two attackers among six clients, five of which take part in a round."""
    return start(under(kind, method, engine, **options))


def under(
    kind: str, method: str = "fedavg", engine: str = "sequential", **options: object
) -> Prepared:
    who = {} if kind == "none" else {"clients": TWO}
    fields = fk.Adversary.model_fields.keys() - {"kind", "clients"}
    given = {key: options.pop(key) for key in fields & options.keys()}
    adversary = fk.Adversary(kind=kind, **who, **given)
    workers = {"workers": 2} if engine == "workers" else {}
    return prepared(
        method,
        adversary=adversary,
        **{"per_round": 5, "rounds": 2, "dtype": "float64", "kind": engine, **workers, **options},
    )


def test_a_share_is_drawn_by_the_seed() -> None:
    half = fk.Adversary(kind="alie", share=0.5)
    first = attackers(half, 100, seed=0)
    assert len(set(first.tolist())) == 50
    np.testing.assert_array_equal(first, attackers(half, 100, seed=0))
    assert first.tolist() != attackers(half, 100, seed=1).tolist()
    assert attackers(fk.Adversary(kind="ipm", clients=(7, 2)), 8, seed=0).tolist() == [2, 7]


@pytest.mark.parametrize(("share", "who"), [(0.04, "nobody"), (0.96, "everybody")])
def test_a_share_that_is_nobody_or_everybody_is_refused(share: float, who: str) -> None:
    with pytest.raises(ConfigError, match=who):
        attackers(fk.Adversary(kind="mimic", share=share), 10, seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "ipm"}, "who the attackers are"),
        ({"kind": "ipm", "share": 0.1, "clients": (1,)}, "who the attackers are"),
        ({"share": 0.1}, "what the attackers do"),
        ({"kind": "ipm", "clients": (1, 1)}, "different numbers"),
        ({"kind": "ipm", "share": 1.0}, "less than 1"),
    ],
)
def test_settings_that_say_too_little_or_too_much(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fk.Adversary(**values)


def test_the_rows_name_the_attackers_of_the_cohort_and_the_key_knows_them() -> None:
    honest, lying = ran(), ran("sign_flip")
    assert [row.attackers for row in honest.rows] == [[]] * 3
    for row in lying.rows[1:]:
        assert row.attackers == sorted(set(row.clients) & set(TWO))
    assert any(row.attackers for row in lying.rows)
    keys = {r.record.key for r in (honest, lying, ran("sign_flip", factor=2.0))}
    assert len(keys) == 3
    assert lying.record.adversary == "sign flip, factor 1, by 2 clients: 1, 4"


@pytest.mark.parametrize("kind", ["gaussian", "min_max", "label_flip"])
def test_workers_have_the_bits_of_the_sequential_engine(kind: str) -> None:
    attacked = ran(kind, "multikrum(beta=0.4, keep=4)")
    assert same(attacked, ran(kind, "multikrum(beta=0.4, keep=4)", "workers"))


@pytest.mark.parametrize("kind", ["sign_flip", "alie", "label_flip"])
def test_the_vectorized_engine_keeps_single_updates_for_them(kind: str) -> None:
    """FedAvg needs their sum alone, which it would leave otherwise."""
    attacked, plain = ran(kind, engine="vectorized"), ran(engine="vectorized")
    reference = ran(kind)
    assert same_up_to_rounding(attacked, reference)
    assert not same_up_to_rounding(attacked, plain)


def same_up_to_rounding(a: Result, b: Result) -> bool:
    return all(torch.allclose(a.params[k], b.params[k], rtol=0.0, atol=1e-11) for k in a.params)
