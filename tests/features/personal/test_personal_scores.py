"""What a run is judged by where clients' own models are: their own examples, all together."""

from __future__ import annotations

import numpy as np
import pytest

import fedkeel as fk
from fedkeel.runner.start import start
from fedkeel.runner.warnings import find_warnings
from toys import plain, prepared

JUDGED = fk.Evaluation(model="personal", clients_every=1)


@pytest.mark.parametrize("method", ["fedavg", "local", "centralised", "fedper(keep='fc2')"])
def test_the_score_is_that_of_all_clients_examples_together(method: str) -> None:
    result = start(prepared(method, evaluation=JUDGED))
    row = result.rows[-1]
    columns = row.personal or row.per_client
    assert columns is not None
    assert row.test is not None
    sizes, values = np.array(columns["examples"]), np.array(columns["accuracy"], dtype=float)
    assert row.test.examples == sizes.sum()
    assert row.test["accuracy"] == pytest.approx((sizes * values).sum() / sizes.sum(), abs=1e-12)


def test_a_client_alone_is_judged_as_on_its_own_examples_elsewhere() -> None:
    judged = start(prepared("local", evaluation=JUDGED))
    elsewhere = start(prepared("local", evaluation=fk.Evaluation(clients_every=1)))
    columns = [row.per_client for row in judged.rows]
    assert columns == [row.per_client for row in elsewhere.rows]
    assert judged.rows[-1].test != elsewhere.rows[-1].test


@pytest.mark.parametrize("judge", ["global", "personal"])
def test_worker_processes_evaluate_a_model_with_personal_parameters(judge: str) -> None:
    evaluation = fk.Evaluation(model=judge, clients_every=1)
    results = [
        start(prepared("fedper(keep='fc2')", evaluation=evaluation, kind=kind, workers=2))
        for kind in ("sequential", "workers")
    ]
    assert plain(results[0]) == plain(results[1])


@pytest.mark.parametrize(("method", "warns"), [("fedper(keep='fc2')", True), ("fedavg", False)])
def test_scores_on_training_examples_are_warned_of(method: str, warns: bool) -> None:
    warnings = find_warnings(prepared(method))
    assert any("scored on the examples that they are trained on" in w for w in warnings) is warns
