"""Compiled functions are compared with the functions themselves before they are used."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx

from fedkeel.base import matmul
from fedkeel.config import Precision
from fedkeel.engine.compiler import cache, passes
from fedkeel.engine.compiler.cache import Arguments, Call, CompileCache, FlatState
from fedkeel.engine.compiler.compiled_function import CompiledFunction, CompiledResult
from fedkeel.engine.compiler.errors import CannotCompile
from fedkeel.engine.compiler.graph_nodes import remove_unused
from fedkeel.engine.compiler.trace import trace
from fedkeel.engine.process.numerics import use_numerics
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


@pytest.mark.parametrize(("error", "agrees"), [(2.0**-22, True), (2.0**-19, False)])
def test_a_small_move_is_compared_up_to_the_rounding_of_what_moved(
    error: float, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both are numbers near 1, their difference has no better places than they have."""
    start = torch.ones(4)

    def moves(state: State) -> State:
        return {"update": leaf(state, "start") * (1.0 + 1e-5) - leaf(state, "start")}

    wrong = CompiledFunction.__call__

    def inexact(self: CompiledFunction, *tensors: torch.Tensor) -> Sequence[CompiledResult]:
        return [result + error for result in wrong(self, *tensors) if isinstance(result, Tensor)]

    monkeypatch.setattr(CompiledFunction, "__call__", inexact)
    monkeypatch.setattr(cache, "_agrees_in_float64", lambda *_: False)
    call = Call("moves", moves, (0,), moved_from={"update": start})
    arguments = Arguments([FlatState.of({"start": start})], None)
    if agrees:
        assert CompileCache().run(call, arguments).paths == ("update",)
    else:
        with pytest.raises(CannotCompile, match="another update"):
            CompileCache().run(call, arguments)


@pytest.mark.parametrize(("precision", "searches"), [("float32", True), ("tf32", False)])
def test_a_gpu_searches_no_algorithm_for_a_comparison_alone(
    precision: Precision, searches: bool
) -> None:
    """With rounded factors, training has other convolutions than the comparison."""
    seen: list[bool] = []

    def watched(state: State) -> State:
        seen.append(torch.backends.cudnn.benchmark)
        return {"y": leaf(state, "x") * 2.0}

    arguments = Arguments([FlatState.of({"x": torch.arange(3.0)})], None)
    with use_numerics(precision):
        CompileCache(precision).run(Call("watched", watched, (0,)), arguments)
        assert torch.backends.cudnn.benchmark
    assert set(seen) == {searches}


def test_what_nothing_uses_is_removed() -> None:
    graph = trace(lambda x, y: [x + 1.0, y], [torch.ones(2)] * 2)
    x, y, *_ = graph.nodes
    with graph.inserting_after(y):
        negative = graph.call_function(torch.ops.aten.neg.default, (x,))
    with graph.inserting_after(negative):
        graph.call_function(torch.ops.aten.neg.default, (negative,))
    remove_unused(graph)
    assert [node.op for node in graph.nodes] == ["placeholder"] * 2 + ["call_function", "output"]
