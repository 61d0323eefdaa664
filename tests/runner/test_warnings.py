"""What a user is told before a run."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import fedkeel as fk
from each import each
from fedkeel import config
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.features.progress.display import ProgressLines
from fedkeel.features.time.feature import rounds_of
from fedkeel.report.page import write_report
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.runner.warnings import find_warnings
from toys import Mapped, Net, of_sizes, prepared


def run(*sizes: int, model: object = None, **local: object) -> Prepared:
    """Clients of these sizes, and a network with batch normalisation."""
    return prepared(
        model=model or Net(norm=True),
        clients=of_sizes(*sizes),
        local=fk.Local(**{"lr": 0.05, "epochs": 1, "batch_size": 4, **local}),
        cohort=fk.Cohort(),
        rounds=1,
        buffers="average",
    )


def test_noise_that_promises_nothing() -> None:
    warned = prepared("dpsgd(sigma=0.5)+fedprox")
    (message,) = find_warnings(warned)
    assert message == (
        "dpsgd: no privacy is accounted for. No epsilon is computed for its noise (sigma = 0.5), "
        "so do not rely on it to protect examples: the table [privacy] sets a budget"
    )
    on_nodes = replace(warned.setup.federation, how={"kind": "nodes"})  # a server without the data
    setup = replace(warned.setup, federation=on_nodes)
    assert find_warnings(replace(warned, setup=setup)) == [message]
    assert find_warnings(prepared("fedprox")) == []


def test_two_examples_are_the_same_to_batch_normalisation() -> None:
    """+1 and -1, whatever they are, and no gradient but rounding."""
    x = torch.tensor([[0.3, 7.0], [-1.2, 9.5]], dtype=torch.float64, requires_grad=True)
    out = nn.functional.batch_norm(x, None, None, training=True, eps=1e-30)
    assert torch.allclose(out.abs(), torch.ones_like(out))
    out[0].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() < 1e-14


@each(
    ("sizes", "local", "told"),
    [
        ((8, 8), {}, 0),
        ((8, 2), {}, 1),
        ((8, 6, 2), {}, 2),  # 6 = 4 + 2
        ((8, 6), {"drop_last": "always"}, 0),
        ((7, 9), {"drop_last": "single"}, 0),
        ((6, 6), {"batch_size": "all"}, 0),
        ((2, 6), {"batch_size": "all"}, 1),
        ((8, 8), {"batch_size": 2}, 2),
        ((8, 6), {"epochs": None, "steps": 1}, 0),  # in one round: only the first batch
        ((8, 6), {"epochs": None, "steps": 2}, 1),
        ((8, 6), {"epochs": None, "steps": 5, "sampling": "random"}, 0),  # always of four
    ],
)
def test_batches_of_two(sizes: tuple[int, ...], local: dict[str, object], told: int) -> None:
    found = find_warnings(run(*sizes, **local))
    if not told:
        assert found == []
        return
    (text,) = found
    verb = "has" if told == 1 else "have"
    assert text.startswith(f"{told} of {len(sizes)} clients {verb} mini-batches of two examples")
    assert "fedkeel.replace_batch_norm" in text


@pytest.mark.parametrize("model", [Net(), Mapped()], ids=["none", "over positions"])
def test_networks_that_take_two_examples(model: nn.Module) -> None:
    assert find_warnings(run(8, 2, model=model)) == []


def test_it_is_told_once_and_stays_with_the_run(tmp_path: Path) -> None:
    text = io.StringIO()
    folders = [tmp_path / name for name in ("a", "b")]
    with ProgressLines(Console(file=text, width=80)) as display:
        for folder in folders:
            start(run(8, 2), folder, callbacks=[display.follow("a run")])
    assert text.getvalue().count("warning: 1 of 2 clients has mini-batches of two") == 1
    assert [json.loads((f / "run.json").read_text())["warnings"] for f in folders] == [
        find_warnings(run(8, 2))
    ] * 2
    page = write_report(folders, tmp_path / "report.html").read_text()
    assert page.count("1 of 2 clients has mini-batches of two examples") == 1


def test_a_run_that_has_none(tmp_path: Path) -> None:
    result = start(run(8, 8), tmp_path / "run")
    assert result.record.warnings == []


def test_numbers_of_every_size_are_no_hint_where_columns_have_no_names() -> None:
    """An image's pixels go to 255, and it is not a table."""
    data = fk.dataset(np.full((12, 5), 255.0, np.float32), np.arange(12) % 3, classes=3)
    clients = fk.federation(data, [np.arange(6), np.arange(6, 12)])
    assert find_warnings(prepared(clients=clients, per_round=2)) == []


def test_a_server_that_remembers_much(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepared("gradma.s", per_round=2)
    assert find_warnings(ready) == []
    monkeypatch.setattr("fedkeel.runner.warnings.MUCH_MEMORY", 1000)
    [told] = find_warnings(ready)
    assert told.startswith("gradma.s lets the server remember up to 0.0 GB, as much as 9 models")
    assert find_warnings(prepared("fedavg", per_round=2)) == []


@pytest.mark.parametrize(
    ("method", "augment", "told"),
    [("mime", "crop_flip", 1), ("mime", "none", 0), ("mimelite", "crop_flip", 0)],
)
def test_corrections_that_take_off_what_augmentation_adds(
    method: str, augment: str, told: int
) -> None:
    data = fk.dataset(np.zeros((12, 1, 8, 8), np.float32), np.arange(12) % 3, classes=3)
    settings = config.Run(
        method=method,
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1),
        cohort=fk.Cohort(clients=2),
    )
    made = Ingredients(
        fk.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 3))),
        lambda _: fk.federation(data, [np.arange(6), np.arange(6, 12)]),
        fk.dataset(np.ones((12, 1, 8, 8), np.float32), np.arange(12) % 3, classes=3),
        "linear",
        augment == "crop_flip",
    )
    found = find_warnings(prepare(settings, made))
    assert len(found) == told
    assert all("data.augment" in one and "fedkeel methods mime`" in one for one in found)


def test_labels_that_nobody_trains_on() -> None:
    """From arrays such a test set passed without a word, from files it is refused."""
    random = np.random.default_rng(0)
    x = random.normal(size=(30, 5)).astype(np.float32)
    clients = fk.iid(x[:20], np.arange(20) % 2, clients=2)
    given = {"task": fk.Task(lambda: nn.Linear(5, 3)), "clients": clients, "rounds": 1}
    local = fk.Local(lr=0.1, epochs=1, batch_size=5)
    found = fk.run("fedavg", test=(x[20:], np.arange(10) % 3), local=local, **given)
    assert found.record.warnings == [
        "3 of 10 test examples have a label that no training example has: nobody can learn it"
    ]
    found = fk.run("fedavg", test=(x[20:], np.arange(10) % 2), local=local, **given)
    assert found.record.warnings == []


def test_a_test_set_that_is_nearly_all_of_one_label() -> None:
    """The table said 99.2 %, and nothing that every model had learnt to say "well"."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 5)).astype(np.float32)
    y = (np.arange(60) % 20 == 0).astype(np.int64)
    clients = fk.iid(x[:40], y[:40], clients=2)
    local = fk.Local(lr=0.1, epochs=1, batch_size=5)
    task = fk.Task(lambda: nn.Linear(5, 2))
    found = fk.run(
        "fedavg", task=task, clients=clients, test=(x[40:], y[40:]), rounds=1, local=local
    )
    (told,) = found.record.warnings
    assert told.startswith("19 of 20 test examples have the label 0: a model that always predicts")
    assert "reaches 95.0 %" in told
    assert len(repr(found)) < 200  # what a notebook shows
    assert "fedavg, seed 0: finished, 1 of 1 rounds, best 0." in repr(found)


class Softened(nn.Module):
    """Ends as many tutorials' networks do."""

    def __init__(self, log: bool = False) -> None:
        super().__init__()
        self.scores, self.log = nn.Linear(5, 3), log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.scores(x)
        return z.log_softmax(dim=1) if self.log else z.softmax(dim=1)


def test_a_module_that_ends_in_a_softmax() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(30, 5)).astype(np.float32), np.arange(30) % 3
    given = {
        "clients": fk.iid(x[:20], y[:20], clients=2),
        "test": (x[20:], y[20:]),
        "rounds": 1,
        "local": fk.Local(lr=0.1, epochs=1, batch_size=5),
    }
    (told,) = fk.run("fedavg", task=fk.Task(Softened), **given).record.warnings
    assert told.startswith("the model returns probabilities, and the loss 'cross_entropy' takes")
    likely = fk.Task(Softened, loss=lambda p, y: -p.log().gather(1, y[:, None]).squeeze(1))
    for task in (likely, fk.Task(partial(Softened, log=True)), fk.Task(lambda: nn.Linear(5, 3))):
        assert fk.run("fedavg", task=task, **given).record.warnings == []


# --- data and settings that may not be what was meant -----------------------------------------


def of_rows(
    x: np.ndarray, y: np.ndarray, test: tuple[np.ndarray, np.ndarray], **more: object
) -> list[str]:
    """What is told of clients with these examples, and of a test set."""
    names = more.pop("labels", ())
    data = fk.dataset(x, y, classes=int(y.max()) + 1, label_names=names)
    rows = np.array_split(np.arange(len(x)), 2)
    held = fk.dataset(*test, classes=data.classes, label_names=names)
    ready = prepared(
        model=nn.Linear(5, data.classes),
        clients=fk.federation(data, rows, **more),
        test=held,
        per_round=2,
    )
    return find_warnings(ready)


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 5)).astype(np.float32)


def test_numbers_that_may_be_a_quantity() -> None:
    y = np.arange(200) % 40
    (told,) = of_rows(normal(200), y, (normal(40, 1), y[:40]))
    assert told.startswith("200 training examples have 40 different numbers for labels")
    few = y % 10
    assert of_rows(normal(200), few, (normal(40, 1), few[:40])) == []
    names = tuple(f"species {k}" for k in range(40))
    assert of_rows(normal(200), y, (normal(40, 1), y[:40]), labels=names) == []


def test_test_examples_that_are_trained_on() -> None:
    x, y = normal(60), np.arange(60) % 3
    (told,) = of_rows(x, y, (x[:20], y[:20]))
    assert told.startswith("20 of 20 test examples are among those that are trained on")
    assert of_rows(x, y, (normal(20, 1), y[:20])) == []
    assert of_rows(x, y, (x[:20], (y[:20] + 1) % 3)) == []  # other labels: other examples


def test_rows_that_a_hold_out_has_taken_out_are_not_trained_on() -> None:
    """The doctor's test set is what clients hold out: none of its rows is trained on."""
    data = fk.dataset(normal(60), np.arange(60) % 3)
    clients = fk.federation(data, np.array_split(np.arange(60), 2)).hold_out(0.25, seed=0)
    assert clients.holdout_rows is not None
    for test, count in ((clients.holdout_rows, 0), (clients.rows[:20], 1)):
        ready = prepared(
            model=nn.Linear(5, 3), clients=clients, test=data.take(np.sort(test)), per_round=2
        )
        told = [text for text in find_warnings(ready) if "are among those" in text]
        assert len(told) == count


def test_names_that_differ_in_case_alone() -> None:
    x, y = normal(60), np.arange(60) % 3
    test = normal(20, 1), y[:20]
    told = of_rows(x, y, test, labels=("a", "b", "B"), names=("North", "north"))
    assert told == [
        "'b' and 'B' are two labels: they differ only in case",
        "'North' and 'north' are two clients: they differ only in case",
    ]


def test_settings_that_decide_nothing() -> None:
    local = fk.Local(lr=0.1, epochs=1, schedule=config.Schedule(kind="cosine", decay=0.5))
    assert find_warnings(prepared(local=local)) == [
        "local.schedule.decay = 0.5 has no effect: it is for kind 'exponential'"
    ]
    assert find_warnings(prepared(local=fk.Local(lr=0.1, epochs=1))) == []


@pytest.mark.parametrize("engine", ["sequential", "workers", "vectorized"])
def test_clients_too_small_to_hold_anything_out(engine: str) -> None:
    x, y = normal(8), np.arange(8) % 3
    clients = fk.from_clients([(x[:3], y[:3]), (x[3:6], y[3:6]), (x[6:], y[6:])], holdout=0.2)
    result = fk.run(
        "fedavg",
        task=fk.Task(nn.Linear(5, 3)),
        clients=clients,
        test=(normal(6, 1), np.arange(6) % 3),
        rounds=2,
        local=fk.Local(lr=0.1, epochs=1, batch_size=4),
        engine=fk.Engine(kind=engine),
        progress=False,
    )
    assert result.rows[-1].per_client is not None
    assert result.rows[-1].per_client["examples"] == [0.0, 0.0, 0.0]
    assert [told for told in result.record.warnings if "to hold any out" in told]


def test_a_method_that_counts_on_all_clients() -> None:
    local = fk.Local(lr=0.1, steps=2, batch_size=4)  # as many as it makes
    assert find_warnings(prepared("scaffnew(p=0.5)", local=local, per_round=6)) == []
    (message,) = find_warnings(prepared("scaffnew(p=0.5)", local=local, per_round=4))
    assert message.startswith("scaffnew counts on all 6 clients in each round; with 4 it ends")
    assert find_warnings(prepared("scaffold", per_round=4)) == []


def test_a_method_for_adapters_without_adapters() -> None:
    (message,) = find_warnings(prepared("ffalora"))
    assert message.startswith(
        "ffalora has no effect: no trained parameter's name contains 'lora_A'"
    )
    assert find_warnings(prepared("ffalora(frozen='fc1')")) == []
    (message,) = find_warnings(prepared("rolora"))
    assert message.startswith("rolora has no effect")


@each(
    ("method", "clients", "told"),
    [
        (
            "trimmed_mean(beta=0.2)",
            4,
            "nobody of 4 clients: use 5 clients or more, or set beta = 0.25",
        ),
        ("trimmed_mean(beta=0.2)", 5, ""),
        ("trimmed_mean(beta=0.0)", 4, ""),  # the mean, as its page says
        ("trimmed_mean", 3, "nobody of 3 clients: use 10 clients or more, or set beta = 0.334"),
        ("multikrum", 4, "multikrum leaves out nobody of 4 clients: use 5 clients or more"),
        (
            "multikrum(keep=6)",
            6,
            "multikrum(keep=6) leaves out nobody of 6 clients: use 7",
        ),
        ("krum", 3, "krum reckons with no broken client among 3 clients: use 5 clients or more"),
        ("bulyan", 6, "bulyan leaves out nobody of 6 clients: use 7 clients or more"),
        (
            "nnm+median",
            4,
            "nobody of 4 clients: use 5 clients or more, or set beta = 0.25",
        ),
        ("bucketing(size=4)+median", 4, "bucketing(size=4) makes one update of 4 clients"),
        ("bucketing+krum(beta=0.4)", 6, "krum(beta=0.4) reckons with no broken client among 3"),
        ("median", 2, "median leaves out nobody of 2 clients: use 3 clients or more"),
        ("geomedian", 3, ""),
        ("cclip", 4, ""),
        ("fedavg", 4, ""),
    ],
)
def test_a_defence_of_too_few_clients(method: str, clients: int, told: str) -> None:
    found = find_warnings(prepared(method, per_round=clients))
    assert len(found) == bool(told), found
    assert told in " ".join(found)


@pytest.mark.parametrize("sampling", ["uniform", "power_of_choice"])
def test_a_deadline_that_nobody_misses(sampling: str) -> None:
    """The warning speaks of the schedule that the run follows."""

    def ready(seconds: float | None, jitter: float = 0.0) -> Prepared:
        system = config.System(
            speed="lognormal",
            step_seconds=1.0,
            mbit_down=0.001,
            mbit_up=0.01,
            jitter=jitter,
            deadline_seconds=seconds,
        )
        return prepared(cohort=config.Cohort(sampling=sampling), system=system)

    longest = rounds_of(ready(None)).longest
    for deadline, jitter, is_told in (
        (1.01 * longest, 0.0, True),
        (0.99 * longest, 0.0, False),
        (1.01 * longest, 0.1, False),
    ):
        run = ready(deadline, jitter)
        texts = [text for text in find_warnings(run) if "deadline" in text]
        assert len(texts) == is_told
        assert all(
            text.startswith(f"system.deadline_seconds = {deadline:g} leaves nobody out: the")
            for text in texts
        )
        if not jitter:
            assert any(row.dropped for row in start(run).rows) is not is_told


def test_a_share_of_replies_that_is_all_of_them() -> None:
    for enough, told in ((0.9, "system.enough = 0.9 of 4 clients is rounded up to all"), (0.5, "")):
        ready = prepared(per_round=4, system=config.System(enough=enough))
        found = [text for text in find_warnings(ready) if "system.enough" in text]
        assert len(found) == bool(told)
        assert all(text.startswith(told) for text in found)
    of_three = prepared(per_round=3, flower=config.Flower(quorum=0.8, enough=0.9))
    assert find_warnings(replace(of_three, on_nodes=True)) == [
        "flower.quorum = 0.8 of 3 clients is rounded up to all of them, so that one silent node "
        "stops the run; give at most 0.666",  # and not 0.667, of which 3 are more than 2
        "flower.enough = 0.9 of 3 clients is rounded up to all of them, so that nobody is left "
        "out; give at most 0.666",
    ]
    enough_left = prepared(per_round=3, flower=config.Flower(quorum=0.666))
    assert find_warnings(replace(enough_left, on_nodes=True)) == []
    assert not any("flower." in text for text in find_warnings(of_three))
    alone = prepared(per_round=1, system=config.System(enough=0.9))
    assert not any("system.enough" in text for text in find_warnings(alone))
