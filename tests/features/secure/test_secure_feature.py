"""Secure sums as a feature: which runs are refused, what their key and their record have."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedkeel.config import Flower
from fedkeel.errors import CompositionError, ConfigError
from fedkeel.features.secure.feature import SecureAggregation
from fedkeel.records.run_record import RunRecord, to_json
from fedkeel.report.runs import main_settings
from fedkeel.runner.features import check_nodes
from fedkeel.runner.manifest import describe_run
from toys import prepared

SUMS = Flower(secure_aggregation=True)


@pytest.mark.parametrize("method", ["median", "fedbuff(buffer=2)", "topk"])
def test_a_method_that_needs_single_updates_is_refused(method: str) -> None:
    prepared(method)
    with pytest.raises(CompositionError, match="cannot be run with secure aggregation"):
        prepared(method, flower=SUMS)


def test_a_server_refuses_it_before_it_waits_for_nodes() -> None:
    check_nodes(prepared("median").settings)
    with pytest.raises(CompositionError, match="cannot be run with secure aggregation"):
        check_nodes(prepared("median").settings.model_copy(update={"flower": SUMS}))


def test_a_sum_of_more_nodes_than_clients_is_refused() -> None:
    many = Flower(secure_aggregation=True, secure_minimum=7)
    with pytest.raises(ConfigError, match="more nodes than there are clients"):
        prepared(flower=many)
    prepared(flower=many.model_copy(update={"secure_minimum": 6}))


def test_a_baseline_sums_nothing_and_is_not_refused() -> None:
    run = prepared("local", flower=Flower(secure_aggregation=True, secure_minimum=7))
    assert not [text for text in describe_run(run).warnings if "secure" in text]


def test_the_key_knows_sums_and_none_of_their_settings() -> None:
    keys = [prepared(flower=flower).key for flower in (Flower(), SUMS, Flower(quorum=0.7))]
    assert keys[0] == keys[2] != keys[1]
    assert prepared(flower=SUMS.model_copy(update={"secure_norm": 2.0})).key == keys[1]
    assert prepared().feature(SecureAggregation) is None


def test_what_a_record_says_is_read_and_shown() -> None:
    run = replace(prepared(flower=SUMS), on_nodes=True)
    record = describe_run(run)
    text = "the server saw only sums of updates, each of over half of the nodes"
    assert record.secure_sums == text
    values = json.loads(json.dumps(to_json(record)))
    assert values["secure_sums"] == text
    read = RunRecord.from_json(values)
    assert main_settings(read)["secure sums"] == text
    assert read.likeness() != RunRecord.from_json({**values, "secure_sums": ""}).likeness()
