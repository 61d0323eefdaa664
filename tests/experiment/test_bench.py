"""What `fedkeel bench` measures, on workloads that take no time."""

from __future__ import annotations

import pytest

from fedkeel.errors import ConfigError
from fedkeel.experiment import bench
from fedkeel.experiment.footprint import multiply_adds

TINY = bench.Workload("tiny", "logistic", {}, (4,), clients=3, examples=8, batch=4)


def test_multiply_adds_are_those_of_forward_and_backward_passes() -> None:
    """Scores of a linear model, and the gradient of its weights; its inputs need none."""
    assert multiply_adds(bench._prepared(TINY)) == 2 * 4 * 10


def test_every_engine_is_measured_and_one_of_them_is_autos() -> None:
    found = list(bench.speeds(TINY, rate=1e6, seconds=0.0))
    names = [speed.engine for speed in found]
    assert names[0] == "sequential"
    assert any(name.startswith("workers") for name in names)
    assert any(name.startswith("vectorised, chunk 1") for name in names)
    assert len(set(names)) == len(names)
    assert sum(speed.auto for speed in found) == 1
    for speed in found:
        assert speed.clients == pytest.approx(3 / speed.seconds)
        assert speed.steps == pytest.approx(6 / speed.seconds)
        assert speed.share == pytest.approx(24 * 80 / 1e6 / speed.seconds)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_peak_is_that_of_all_processes(processes: int) -> None:
    found = bench.peak(processes, seconds=0.0)
    assert (found.device, found.processes) == ("cpu", processes)
    assert 1e7 < found.rate < 1e14


def test_workloads_are_known_by_name() -> None:
    assert [work.name for work in bench.workloads()] == ["2NN", "CNN", "logistic"]
    assert [work.name for work in bench.workloads("cnn")] == ["CNN"]
    with pytest.raises(ConfigError, match="no workload 'logisitc'") as found:
        bench.workloads("logisitc")
    assert "logistic" in found.value.do
