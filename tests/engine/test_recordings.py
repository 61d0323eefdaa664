"""Recordings are tried before they are used: against the function, and for what they leave."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fedkeel.engine.recording import passes
from fedkeel.engine.recording.recordings import Flat, NotTheSame, Recordings
from fedkeel.tree import State, leaf


def doubled(state: State) -> State:
    return {"y": (leaf(state, "x") + 1.0) * 2.0}


def record() -> Flat:
    given = Flat.of({"x": torch.arange(3.0)})
    return Recordings().run("doubled", doubled, [given], varies=0, sources=None)


def test_a_recording_gives_what_the_function_gives() -> None:
    assert torch.equal(leaf(record().state, "y"), torch.tensor([2.0, 4.0, 6.0]))


def test_a_recording_that_writes_over_what_it_does_not_own_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = passes.reuse

    def greedy(graph: fx.Graph, owned: set[fx.Node]) -> None:
        own(graph, {node for node in graph.nodes if node.op == "placeholder"})

    monkeypatch.setattr(passes, "reuse", greedy)
    with pytest.raises(NotTheSame, match="leaves something behind"):
        record()
