"""Compiled functions are compared with the functions themselves before they are used."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fedkeel import matmul
from fedkeel.engine.compiler import passes
from fedkeel.engine.compiler.cache import Arguments, Call, CompileCache, FlatState
from fedkeel.engine.compiler.errors import CannotCompile
from fedkeel.tree import State, leaf


def doubled(state: State) -> State:
    return {"y": (leaf(state, "x") + 1.0) * 2.0}


def compile_and_run() -> FlatState:
    given = FlatState.of({"x": torch.arange(3.0)})
    return CompileCache().run(Call("doubled", doubled, (0,)), Arguments([given], None))


def test_a_compiled_function_gives_what_the_function_gives() -> None:
    assert torch.equal(leaf(compile_and_run().state, "y"), torch.tensor([2.0, 4.0, 6.0]))


def test_libraries_that_round_otherwise_make_no_other_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What follows a sign, as in FedReg, jumps where two products differ by rounding."""
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=random) for shape in ((64, 128), (128, 200)))
    known = torch.mm(x, w)

    def jumps(state: State) -> State:
        return {"y": torch.sign(torch.mm(leaf(state, "x"), leaf(state, "w")) - leaf(state, "z"))}

    def shifted(a: torch.Tensor, b: torch.Tensor, bias: object = None) -> torch.Tensor:
        return torch.mm(a, b) + 1e-6

    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(matmul, "_onednn_product", shifted)
    given = FlatState.of({"x": x, "w": w, "z": known})
    found = CompileCache().run(Call("jumps", jumps, (0,)), Arguments([given], None))
    assert (leaf(found.state, "y") > 0).any()  # also at the first call


def test_a_function_that_writes_over_what_it_does_not_own_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = passes.write_in_place

    def greedy(graph: fx.Graph, owned: set[fx.Node]) -> None:
        own(graph, {node for node in graph.nodes if node.op == "placeholder"})

    monkeypatch.setattr(passes, "write_in_place", greedy)
    with pytest.raises(CannotCompile, match="changes its inputs or constants"):
        compile_and_run()
