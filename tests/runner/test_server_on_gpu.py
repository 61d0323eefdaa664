"""The server's part on the device of the clients: its parts, and the sums that stay there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.vectorized.test_engine import ready
from fedkeel import tree
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.vectorized.single_process import SingleProcess
from fedkeel.errors import TrainingError
from fedkeel.method import server_round as rounds
from fedkeel.method.round_values import Replies, Server
from fedkeel.method.server_round import server_message, server_round
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.engines import may_be_on_gpu
from fedkeel.runner.start import start
from fedkeel.study.conformance.small_federation import SmallFederation
from method.players import ENTRIES

META = torch.device("meta")
"""Stands for a GPU: torch refuses its tensors beside those of a processor."""


def there(tensor: Tensor) -> Tensor:
    return tensor.to(META)


NAMED = ["fedbuff(buffer=3)" if name == "fedbuff" else name for name in ENTRIES]


@pytest.mark.parametrize("entry", NAMED)
def test_parts_make_no_tensors_on_the_processor(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = SmallFederation(entry, None).prepare()
    if not may_be_on_gpu(prepared):
        pytest.skip("the server's part of this method stays on the processor")
    seen: list[Replies] = []

    def noted(plan, server, message, replies, *rest):  # type: ignore[no-untyped-def]
        seen.append(replies)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedkeel.runner.loop.server_round", noted)
    with pytest.raises(KeyboardInterrupt):
        start(prepared)
    monkeypatch.setattr(rounds, "check_finite_model", lambda *_: None)  # it reads numbers
    server = prepared.server.on(META)
    message = server_message(prepared.plan, server, 0.1)
    replies = replace(
        seen[0],
        update={name: there(t) for name, t in seen[0].update.items()},
        uploads=tree.substates(tree.map_tensors(there, dict(seen[0].uploads))),
    )
    try:
        result = server_round(prepared.plan, server, message, replies, prepared.population, 0)
    except TrainingError as error:
        if "meta tensor" not in str(error):
            raise
        return  # it reads a number, which a GPU has and `META` has not
    for path, tensor in tree.walk({"": dict(result.server.params), **result.server.memory}):
        assert tensor.device == META, path


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedadam"])
@pytest.mark.parametrize("parallel_clients", [1, 3])
def test_sums_that_stay_where_they_are_change_no_bit(
    method: str, parallel_clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"kind": "vectorized", "workers": 1, "parallel_clients": parallel_clients}
    expected = start(ready(method=method, engine=engine))
    made: list[SingleProcess] = []
    begin = SingleProcess.__enter__

    def kept(self: SingleProcess) -> SingleProcess:
        made.append(self)
        self.keep_sums_on_device()
        return begin(self)

    monkeypatch.setattr(SingleProcess, "__enter__", kept)
    monkeypatch.setattr(VectorizedTrainer, "queue_length", 1)  # one work item, as on a GPU
    found = start(ready(method=method, engine=engine))
    assert made
    assert made[0].sums_replies
    for name, tensor in expected.params.items():
        torch.testing.assert_close(found.params[name], tensor, rtol=0, atol=1e-12)


def test_an_error_of_a_gpu_reaches_the_user_and_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Callback):
        def on_round_end(self, row: Any, model: Any) -> None:
            if row.round == 2:
                monkeypatch.setattr(Server, "on", lost)
                raise RuntimeError("in round 2")

    def lost(self: Server, device: torch.device) -> Server:
        raise RuntimeError("the device has failed")

    prepared = ready(engine={"checkpoint_seconds": 0.0})
    whole = start(prepared)
    with pytest.raises(RuntimeError, match="in round 2"):
        start(prepared, tmp_path / "run", callbacks=[Broken()])
    monkeypatch.undo()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["message"]) == ("failed", "RuntimeError: in round 2")
    found = start(prepared, tmp_path / "run", resume=True)
    assert [row.round for row in found.rows] == [0, 1, 2, 3]
    for name, tensor in whole.params.items():
        assert torch.equal(found.params[name], tensor)
