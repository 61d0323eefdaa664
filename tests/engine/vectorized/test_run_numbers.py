"""Runs that differ in numbers of the method: each with its own, though their clients are beside
those of others."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.each import each
from tests.engine.vectorized.test_side_by_side import (
    CHOICE,
    Breaks,
    alone,
    assert_close,
    made,
    ready,
    same_bits,
)
from torch import nn

from fedkeel.engine.choose.parallel_runs import DifferingNumbers
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.vectorized.memory import MemoryBound
from fedkeel.engine.vectorized.run_numbers import numbers_of
from fedkeel.engine.vectorized.side_by_side import are_alike, side_by_side
from fedkeel.errors import FedkeelError
from fedkeel.method.grammar import parse
from fedkeel.method.parts.index import METHODS
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import EngineChoice
from fedkeel.runner.result import Result
from fedkeel.runner.start import start

SOME = [
    ("fedprox(mu=0.01)", "fedprox(mu=0.1)", "fedprox(mu=1.0)"),
    ("ditto(lam=0.1)", "ditto(lam=1.0)"),
    ("feddyn(alpha=0.05)", "feddyn(alpha=0.5)"),
    ("fedntd(beta=0.3, tau=2.0)", "fedntd(beta=1.0, tau=1.0)"),
    ("clip(norm=0.05)", "clip(norm=0.2)"),
    ("fedprox(mu=0.1)+fedadam(lr=0.01)", "fedprox(mu=1.0)+fedadam(lr=0.1)"),
]


def differing(runs: list[Prepared]) -> DifferingNumbers:
    numbers = DifferingNumbers()
    for run in runs:
        numbers.add(run)
    return numbers


def sharing(runs: list[Prepared], **more: Any) -> EngineChoice:
    """The engine of runs whose numbers may all be inputs."""
    numbers = differing(runs)
    assert numbers.why_not
    assert not any(numbers.why_not.values()), numbers.why_not
    return replace(CHOICE, parallel_numbers=numbers.shared, **more)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Clients and runs of each group that is trained."""
    sizes: list[tuple[int, int]] = []
    genuine = VectorizedTrainer._train

    def seen(self: VectorizedTrainer, group: Any, *others: Any) -> Any:
        sizes.append((len(group), len(group.distinct_runs)))
        return genuine(self, group, *others)

    monkeypatch.setattr(VectorizedTrainer, "_train", seen)
    return sizes


def losses(row: RoundRecord) -> list[float | None]:
    """Those of personal models."""
    return (row.personal or {}).get("loss", [])


@each("methods", SOME)
def test_numbers_side_by_side_give_what_each_gives_by_itself(methods: tuple[str, ...]) -> None:
    runs = [ready(method, seed=seed) for seed in (0, 1) for method in methods][:4]
    results = made(runs, sharing(runs))
    for run, result in zip(runs, results, strict=True):
        by_itself = alone(run)
        assert_close(by_itself, result)
        for row, expected in zip(result.rows, by_itself.rows, strict=True):
            assert losses(row) == pytest.approx(losses(expected))
    last = [(r.params["2.bias"].tolist(), losses(r.rows[-1])) for r in results]
    assert last[0] != last[1]


def test_what_a_part_divides_by_is_of_its_own_run() -> None:
    """FedCurv's end is made client by client; FedNova divides by a length that depends on mu."""
    runs = [ready(f"fednova+fedprox(mu={mu})+fedcurv") for mu in (0.01, 1.0)]
    assert runs[0].plan.pull != runs[1].plan.pull
    for run, result in zip(runs, made(runs, sharing(runs)), strict=True):
        assert_close(alone(run), result)


def test_their_clients_are_in_one_group(groups: list[tuple[int, int]]) -> None:
    runs = [ready(f"fedprox(mu={mu})") for mu in (0.0, 0.1, 1.0)]
    choice = sharing(runs)
    groups.clear()
    made(runs, choice)
    assert groups == [(12, 3)] * 4


@each("methods", SOME[:3])
def test_the_bits_of_a_run_do_not_depend_on_who_is_beside_it(methods: tuple[str, ...]) -> None:
    runs = [ready(method, dtype="float32") for method in methods]
    choice = sharing(runs, dtype="float32")
    together = made(runs, choice)
    (single,) = made(runs[1:2], choice)
    assert same_bits(together[1], single)
    (with_a_seed, _) = made([runs[1], ready(methods[1], seed=1, dtype="float32")], choice)
    assert same_bits(with_a_seed, single)


def test_runs_without_other_numbers_keep_their_bits() -> None:
    """Numbers are inputs only where a study has several."""
    runs = [ready("fedprox(mu=0.1)", seed=seed, dtype="float32") for seed in (0, 1)]
    assert not differing(runs).why_not
    plain = replace(CHOICE, dtype="float32")
    named = replace(plain, parallel_numbers=["ditto.lam"])  # of another method of the study
    assert all(map(same_bits, made(runs, plain), made(runs, named)))


def test_which_runs_are_alike() -> None:
    first, second = (ready(f"fedprox(mu={mu})").setup for mu in (0.1, 1.0))
    assert not are_alike(first, second)
    assert are_alike(first, second, ["fedprox.mu"])
    assert not are_alike(first, second, ["fedprox.lam"])
    one, other = (ready(f"pfedme(inner_steps={k})").setup for k in (2, 3))  # a count is no number
    assert not are_alike(one, other, numbers_of(one.training.plan.parts))
    tied, free = (ready(method).setup for method in ("gcfed.local(lam=0.5)", "gcfed.local"))
    assert not are_alike(tied, free, ["gcfed.local.lam"])  # None is no number


def test_counts_and_choices_are_no_numbers() -> None:
    assert numbers_of(parse("pfedme(lam=1.0)").parts) == {
        "pfedme.lam": 1.0,
        "pfedme.inner_lr": 0.01,
        "pfedme.decay": 0.0,
    }
    assert numbers_of(parse("apfl(alpha=1)").parts) == {"apfl.alpha": 1}


def test_a_part_that_looks_at_its_number_is_trained_by_itself(
    groups: list[tuple[int, int]],
) -> None:
    """It is found out before anything is trained, and where it is not, the numbers stay right."""
    runs = [ready(f"fedlc(tau={tau})") for tau in (0.1, 0.5)]
    numbers = differing(runs)
    assert "fedlc.tau" in numbers.why_not
    assert numbers.why_not["fedlc.tau"]
    assert (numbers.shared, numbers.apart) == ([], {"tau"})
    groups.clear()
    for run, result in zip(runs, made(runs), strict=True):
        assert_close(alone(run), result)
    assert {runs for _, runs in groups} == {1}
    forced = replace(CHOICE, parallel_numbers=["fedlc.tau"])
    results = made(runs, forced)
    for run, result in zip(runs, results, strict=True):
        assert_close(alone(run), result)
    assert any("not trained side by side" in r for r in results[0].record.engine.reasons)


def test_numbers_are_a_run_s_own_where_clients_train_singly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where no more fits into memory: compiled steps of one client serve all runs."""
    runs = [ready(f"fedprox(mu={mu})") for mu in (0.1, 1.0)]
    choice = sharing(runs)
    monkeypatch.setattr(MemoryBound, "clients", lambda *given: 1)
    monkeypatch.setattr(MemoryBound, "reason", lambda *given: "one client fits")
    for run, result in zip(runs, made(runs, choice), strict=True):
        assert_close(alone(run), result)


SHORTENS = """
from dataclasses import dataclass
from fedkeel import tree
from fedkeel.method.part import param
from fedkeel.method.roles import UpdateTransform

@dataclass(frozen=True)
class {name}(UpdateTransform):
    share: float = param(0.5, ge=0.0)
    name = "{name}"
    def transform_update(self, update, round):
        {first}
        return tree.scale(update, {factor})
"""


def written(folder: Path, name: str, first: str = "pass", factor: str = "self.share") -> str:
    """A method of the user's own."""
    text = SHORTENS.format(name=name, first=first, factor=factor)
    (folder / f"own_{name}.py").write_text(text)
    return f"own_{name}:{name}"


def test_numbers_of_a_part_of_one_s_own(tmp_path: Path) -> None:
    """Also where each client ends by itself, since the part asks for all of its examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        plain = written(tmp_path, "plainly")
        asks = written(tmp_path, "asking", "round.all_examples_step()")
        for method in (plain, asks):
            runs = [ready(f"{method}(share={share})") for share in (0.3, 0.9)]
            for run, result in zip(runs, made(runs, sharing(runs)), strict=True):
                assert_close(alone(run), result)


def test_a_part_that_takes_a_number_for_another_is_found_out(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        by_type = "self.share if isinstance(self.share, float) else 0.1"
        method = written(tmp_path, "typed", factor=by_type)
        number = f"{method.partition(':')[2]}.share"
        numbers = differing([ready(f"{method}(share={share})") for share in (0.3, 0.9)])
        assert numbers.why_not == {
            number: "a step gives something else where the numbers are inputs"
        }
        method = written(tmp_path, "rooted", factor="__import__('math').sqrt(self.share)")
        numbers = differing([ready(f"{method}(share={share})") for share in (0.3, 0.9)])
        assert all(numbers.why_not.values())


def test_a_study_over_numbers_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    runs = [ready(f"feddyn(alpha={alpha})", dtype="float32") for alpha in (0.05, 0.1, 0.5)]
    choice = sharing(runs, dtype="float32")
    whole = made(runs, choice)

    def session(*places: int, stops: int = 99) -> list[Result]:
        return side_by_side(
            [
                partial(
                    start,
                    runs[i],
                    tmp_path / str(i),
                    True,
                    [Breaks(stops, KeyboardInterrupt())],
                    choice=choice,
                )
                for i in places
            ]
        )

    with pytest.raises(KeyboardInterrupt):
        session(0, 1, stops=2)
    (second,) = session(1)
    first, third = session(0, 2)
    assert all(map(same_bits, whole, (first, second, third)))


def test_dropout_is_tried_with_the_same_masks() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    runs = [ready(f"fedprox(mu={mu})", model=dropping) for mu in (0.1, 1.0)]
    for run, result in zip(runs, made(runs, sharing(runs)), strict=True):
        assert_close(alone(run), result)


# ---- all methods --------------------------------------------------------------------------------

APART = {
    "ifca.spread",  # whose clients begin one by one
    "fedlc.tau",
    "fedmlb.lambda1",
    "fedspeed.alpha",
    "gradma.w.margin",
    "topk.fraction",
}
"""The numbers of clients by which a part decides, or that it gives to what takes no tensor."""


def other_number(method: str) -> list[tuple[str, str, str]]:
    """Each number of a method, with two expressions that differ in it."""
    found = []
    for part in parse(method).parts:
        for name, value in numbers_of([part]).items():
            field = name.rpartition(".")[2]
            bounds = type(part).__dataclass_fields__[field].metadata
            high = bounds.get("le", bounds.get("lt", math.inf))
            low = bounds.get("ge", bounds.get("gt", -math.inf))
            values = [v for v in (value / 2, value + 0.1, value - 0.1) if low <= v < high]
            other = next(v for v in values if v not in (value, low))
            term = method if len(parse(method).parts) == 1 else part.name
            pair = (f"{term}({field}={value!r})", f"{term}({field}={other!r})")
            found.append((name, *pair))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"fedamp"}))  # it is not side by side
def test_every_method_with_other_numbers(method: str) -> None:
    tried = 0
    for name, one, other in other_number(method):
        try:
            runs = [ready(one), ready(other)]
        except FedkeelError:
            continue
        numbers = differing(runs)
        if name not in numbers.why_not:  # only the server computes with it
            continue
        tried += 1
        assert bool(numbers.why_not[name]) == (name in APART), numbers.why_not
        tolerance = 1e-10 if method == "fedgc" else 1e-12
        choice = replace(CHOICE, parallel_numbers=numbers.shared)
        for run, result in zip(runs, made(runs, choice), strict=True):
            assert_close(alone(run), result, tolerance)
    if not tried:
        pytest.skip("no number of a client, or it does not run on this task")
