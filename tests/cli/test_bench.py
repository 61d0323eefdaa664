"""``fedkeel bench``: a table, or one JSON document."""

from __future__ import annotations

import json

from commands import call


def test_it_prints_a_table_of_80_columns() -> None:
    done = call("bench", "--only", "logistic", "--seconds", "0")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("machine"))
    assert any("billion multiply-adds/s" in line for line in lines)
    assert sum(line.startswith("* ") for line in lines) == 2  # auto's choice, and what * means
    assert any(line.strip().startswith("sequential ") for line in lines)


def test_it_prints_one_json_document() -> None:
    done = call("bench", "--only", "logistic", "--seconds", "0", "--json")
    found = json.loads(done.out)
    assert found["peaks"][0]["rate"] > 0
    engines = found["workloads"]["logistic"]["engines"]
    assert {"engine", "clients", "steps", "share", "auto"} <= set(engines[0])
    assert found["environment"]["cores"] >= 1


def test_an_unknown_workload_is_a_mistake() -> None:
    done = call("bench", "--only", "transformer")
    assert done.code == 2
    assert "no workload 'transformer'" in done.err
