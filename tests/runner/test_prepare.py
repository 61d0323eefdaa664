"""What decides a run, what it will need, and what is refused before it starts."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from each import each
from fedkeel.base.fingerprint.reached_values import describe_value
from fedkeel.engine.choose import memory as module
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import ConfigError, DataError, FedkeelError, ModelError, RunError
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import to_json
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.manifest import describe_run, environment
from fedkeel.runner.start import start
from fedkeel.task.losses import Loss
from fedkeel.task.models import make
from fedkeel.task.network import Network
from toys import MODELS, Mapped, Net, federation, held, of_sizes, prepared, same

# --- the key: all that decides the numbers, and nothing else --------------------------------------


def shifted(by: float) -> fk.Federation:
    data = federation()
    return replace(data, data=replace(data.data, x=data.data.x + by))


def relabelled() -> fk.Federation:
    data = federation()
    return replace(data, data=replace(data.data, y=data.data.y.flip(0)))


def told(**more: object) -> fk.Federation:
    """The same numbers, which stand for something else."""
    data = federation()
    return replace(data, data=replace(data.data, **more))


def divided() -> fk.Federation:
    """The same examples, another division."""
    data = federation()
    return replace(data, rows=data.rows[::-1].copy())


LOCAL = fk.Local(lr=0.05, epochs=2, batch_size=4, momentum=0.5)


def local(**more: object) -> fk.Local:
    return fk.Local(**{**LOCAL.model_dump(), **more})


@each(
    "change",
    [
        {"method": "scaffold"},
        {"method": "fedprox"},
        {"seed": 1},
        {"rounds": 4},
        {"local": local(lr=0.06)},
        {"local": local(epochs=3)},
        {"local": local(schedule=fk.Schedule(kind="cosine"))},
        {"cohort": fk.Cohort(clients=3)},
        {"cohort": fk.Cohort(clients=4, dropout=0.1)},
        {"dtype": "float64"},
        {"precision": "bf16"},
        {"model": partial(Net, width=7)},
        {"model": partial(Net, dropout=0.1)},
        {"loss": nn.functional.multi_margin_loss},
        {"clients": shifted(1e-3)},
        {"clients": relabelled()},
        {"clients": told(label_names=("a", "b", "c"))},
        {"clients": told(columns=("a", "b", "c", "d", "e"))},
        {"clients": told(scale=((0.0,) * 5, (2.0,) * 5))},
        {"clients": divided()},
        {"clients": federation().hold_out(0.3, seed=0)},
        {"test": held(61)},
    ],
)
def test_the_key_changes_with_what_decides_numbers(change: dict[str, object]) -> None:
    method = str(change.pop("method", "fedavg"))
    assert prepared(method, **change).key != prepared().key


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "workers", "workers": 3},
        {"checkpoint_seconds": 99.0},
        {"memory_gb": 100.0},
        {"state": "disk"},
        {"name": "another"},
        {"method": "fedavg+fedavg"},
    ],
    ids=lambda given: "+".join(given),
)
def test_the_key_does_not_change_with_anything_else(change: dict[str, object]) -> None:
    method = str(change.pop("method", "fedavg"))
    assert prepared(method, **change).key == prepared().key


def test_the_initial_model_is_part_of_the_key() -> None:
    module = Net()
    before = prepared(model=module).key
    with torch.no_grad():
        module.fc2.bias += 1e-3
    assert prepared(model=module).key != before


class Scaled(Net):
    """The same layers and numbers as a `Net`, and another output."""

    def __init__(self, by: float = 2.0) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by * super().forward(x)


def frozen() -> nn.Module:
    net = Net()
    net.fc1.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": Scaled}, {"model": partial(Scaled, by=3.0)}),
        ({"model": Net}, {"model": frozen}),
        ({"loss": lambda z, y: (z**2).sum(1)}, {"loss": lambda z, y: (z**4).sum(1)}),
    ],
    ids=["an attribute", "what is trained", "a loss without a name"],
)
def test_what_a_repr_does_not_say_is_part_of_the_key(
    one: dict[str, object], other: dict[str, object]
) -> None:
    assert prepared(**one).key == prepared(**one).key != prepared(**other).key


def weighted(heavy: float) -> torch.Tensor:
    return torch.tensor([1.0, heavy, 1.0])


def closed_over(weight: torch.Tensor) -> Loss:
    return lambda z, y: nn.functional.cross_entropy(z, y, weight=weight, reduction="none")


class Weighted:
    """A loss with a state of its own."""

    def __init__(self, weight: object) -> None:
        self.weight = weight

    def __call__(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = torch.as_tensor(self.weight, dtype=z.dtype).expand(z.shape[1])
        return nn.functional.cross_entropy(z, y, weight=weight, reduction="none")


class Private(Weighted):
    """One that hides it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._hidden = weight

    @property
    def weight(self) -> torch.Tensor:
        return self._hidden


class Buffered(nn.Module):
    """One that is a module, with a buffer that is not saved, in a module within."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("weight", weight, persistent=False)

    def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(z, y, weight=self.inner.weight, reduction="none")


class Within(Weighted):
    """One that holds a module."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.inner = nn.CrossEntropyLoss(weight, reduction="none")

    def __call__(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner(z, y)


HEAVY = torch.ones(3)


def named(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(z, y, weight=HEAVY, reduction="none")


LOSSES: dict[str, Callable[[torch.Tensor], Loss]] = {
    "torch's own": lambda weight: nn.CrossEntropyLoss(weight, reduction="none"),
    "a closure": closed_over,
    "a class": Weighted,
    "a private attribute": Private,
    "an array": lambda weight: Weighted(weight.numpy()),
    "a list of tensors": lambda weight: Weighted([*weight]),
    "a number of numpy's": lambda weight: Weighted(np.float32(weight[1])),
    "a buffer": Buffered,
    "a module within": Within,
    "a partial": lambda weight: partial(
        nn.functional.cross_entropy, weight=weight, reduction="none"
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_another_loss_is_another_run(tmp_path: Path, kind: str) -> None:
    def ready(heavy: float) -> Prepared:
        return prepared(loss=LOSSES[kind](weighted(heavy)), rounds=1)

    first = start(ready(2.0), tmp_path / "run")
    with pytest.raises(RunError, match="holds another run"):
        start(ready(50.0), tmp_path / "run")
    assert same(first, start(ready(2.0), tmp_path / "run"))


def test_a_tensor_that_a_loss_names_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(heavy: float) -> str:
        monkeypatch.setitem(globals(), "HEAVY", weighted(heavy))
        return prepared(loss=named).key

    assert key(2.0) == key(2.0) != key(3.0)


class Held(Net):
    """Multiplies by a tensor that is not a parameter, and keeps what it has seen."""

    def __init__(self, by: object, buffer: bool = False) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.last = torch.zeros(())
        self.listed = list(self.parameters())
        if buffer:
            self.register_buffer("by", torch.as_tensor(by), persistent=False)
        else:
            self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach().sum()
        return torch.as_tensor(self.by) * super().forward(x)


@pytest.mark.parametrize("kind", ["tensor", "array", "number", "buffer"])
def test_what_a_model_multiplies_by_is_part_of_the_key(kind: str) -> None:
    def key(by: float) -> str:
        given = {"array": np.array, "number": np.float32}.get(kind, torch.tensor)(by)
        make = partial(Held, given, buffer=kind == "buffer")
        return prepared(model=make, buffers="average" if kind == "buffer" else "refuse").key

    assert key(2.0) == key(2.0) != key(3.0)


def test_a_network_is_told_as_it_was_before_any_call() -> None:
    """Nodes whose data differ make the same of it, and their parameters' numbers are not in it."""
    module = Held(2.0)
    network = Network(module)
    before = network.describe()
    network.logits(network.params, {}, federation().data.x[:3])
    assert network.describe() == before
    with torch.no_grad():
        module.fc2.bias += 1
    assert Network(module).describe() == before


def test_a_tensor_is_told_by_its_numbers_wherever_it_lies() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    assert (
        describe_value(whole).text
        == describe_value(whole.T.contiguous().T).text
        == describe_value(nn.Parameter(whole)).text
    )
    others = [whole.T, whole.double(), whole + 1, whole.reshape(6), whole.bfloat16()]
    odd = [whole > 1, whole[:0], torch.tensor(1.0), whole.to_sparse() * 2, whole * 1j]
    arrays = [np.arange(6), np.array([["a"]]), np.array([1, None]), np.zeros((3, 0)), np.array(1)]
    told = [
        describe_value(one).text for one in (whole, *others, *odd, *arrays, whole.numpy().T[::-1])
    ]
    assert len(set(told)) == len(told)


def test_a_loss_that_calls_itself_has_a_key() -> None:
    def loss(z: torch.Tensor, y: torch.Tensor, times: int = 1) -> torch.Tensor:
        return (z**2).sum(1) if not times else loss(z, y, times - 1)

    assert prepared(loss=loss).key == prepared(loss=loss).key != prepared().key


class Circular(Net):
    """Holds a function that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.again = lambda x: self(x)


def test_a_module_that_holds_itself_has_a_key() -> None:
    assert prepared(model=Circular).key == prepared(model=Circular).key


def test_a_built_in_network_s_arguments_are_part_of_the_key() -> None:
    def network(heads: int) -> str:
        made = make("vit", (3, 16, 16), 3, {"patch": 8, "width": 12, "depth": 1, "heads": heads})
        return Network(made).describe()

    assert network(2) == network(2) != network(3)


def test_a_forward_that_was_rewritten_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = "from toys import Net\nclass Own(Net):\n def forward(self, x): return {}\n"
    (tmp_path / "own_net.py").write_text(text.format("super().forward(x)"))
    own = importlib.import_module("own_net")
    before = prepared(model=own.Own).key
    (tmp_path / "own_net.py").write_text(text.format("2 * super().forward(x)"))
    assert prepared(model=own.Own).key == before  # what runs is what was loaded
    assert prepared(model=importlib.reload(own).Own).key != before
    sys.modules.pop("own_net")


def test_a_spelling_of_a_method_is_not_part_of_the_key() -> None:
    assert prepared("fedavg+fedprox( mu = 0.3 )").key == prepared("fedprox(mu=0.3)").key
    assert prepared("fedavgm").key == prepared("momentum").key


def test_a_key_is_the_same_in_every_process() -> None:
    """Even where a loss is an object whose name says where it lies in memory."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from functools import partial\n"
        "from torch.nn import functional as F\n"
        "from toys import prepared\n"
        "print(prepared(loss=partial(F.cross_entropy, label_smoothing=0.1)).key)\n"
    )
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60, check=True)
    found = run([sys.executable, "-c", code]).stdout.strip()
    here = prepared(loss=partial(nn.functional.cross_entropy, label_smoothing=0.1)).key
    assert found == here
    assert here != prepared(loss=partial(nn.functional.cross_entropy, label_smoothing=0.2)).key


# --- what it will need ----------------------------------------------------------------------------


def test_an_estimate_is_what_is_sent_and_kept() -> None:
    ready = prepared("scaffold")
    needs = estimate_run(ready)
    model = sum(t.numel() * 4 for t in ready.server.params.values())
    assert needs.down == {"model": model, "scaffold": model}
    assert needs.up == {"model": model, "scaffold": model}
    assert (needs.client_state, needs.clients) == (model, 6)
    assert needs.resident == 6 * model + needs.server_state
    few = estimate_run(prepared("scaffold", rounds=2, per_round=1))
    assert few.clients == 2  # no more than that can take part
    row = start(ready).rows[1]
    assert row.bytes_up == {part: 4 * n for part, n in needs.up.items()}


def test_too_much_state_is_refused_with_the_figure_and_the_ways_out() -> None:
    with pytest.raises(RunError, match="would not fit into memory") as found:
        prepared("scaffold", memory_gb=1e-6, state="memory")
    text = str(found.value)
    assert "x 6 clients" in text
    assert "kept by scaffold" in text
    assert "engine.memory_gb" in text
    assert "engine.state = 'disk'" in text
    assert len(found.value.lines()) <= 4
    prepared("scaffold", memory_gb=1e-3, state="memory")


def test_a_method_without_state_fits_anywhere() -> None:
    prepared("fedavg", memory_gb=1e-9)
    assert prepared("fedavg", memory_gb=1e-9, state="disk").state == "memory"


def test_what_is_refused_is_shown_in_figures_that_can_be_read() -> None:
    """Not as 0.0 GB, however small the limit."""
    with pytest.raises(RunError) as found:
        prepared("scaffold", memory_gb=1e-6, state="memory")
    assert "228 bytes x 6 clients" in found.value.got
    assert found.value.expected == "at most 1.0 KB"


def test_without_a_limit_it_is_the_memory_that_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    free = module.free_memory()
    assert free is not None
    assert free > 10_000_000
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    assert free == pytest.approx(available * 1024, rel=0.2)
    monkeypatch.setattr(module, "free_memory", lambda: 100)
    for state in ("memory", "disk", "auto"):  # what the server remembers is 228 bytes
        with pytest.raises(RunError, match="would not fit"):
            prepared("scaffold", state=state)
    monkeypatch.setattr(module, "free_memory", lambda: None)
    prepared("scaffold", state="memory")


def test_state_goes_to_the_disk_where_memory_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """228 bytes for each of six clients and the server: 1596."""
    assert prepared("scaffold", memory_gb=1.6e-6).state == "memory"
    ready = prepared("scaffold", memory_gb=1.5e-6)
    needs = estimate_run(ready)
    assert (ready.state, needs.state) == ("disk", "disk")
    assert needs.resident == needs.server_state == 228
    assert describe_run(ready).estimate.disk == needs.disk
    monkeypatch.setattr(module, "free_memory", lambda: 1500)
    assert prepared("scaffold").state == "disk"
    monkeypatch.setattr(module, "free_memory", lambda: 1600)
    assert prepared("scaffold").state == "memory"
    monkeypatch.setattr(module, "COMFORTABLE_BYTES", 1367)  # whatever is free
    assert prepared("scaffold").state == "disk"
    assert prepared("scaffold", memory_gb=1.6e-6).state == "memory"
    assert prepared("scaffold", state="memory").state == "memory"


def test_the_file_of_state_is_never_larger_than_estimated(tmp_path: Path) -> None:
    """Each row twice and a round's rows once more; or what was ever written, where that is less."""
    row = 64 + 2 * 128 + 2 * 64  # which matrices are products; tensors of 120, 24, 72 and 12 bytes
    few = prepared("scaffold", rounds=2, per_round=3, state="disk", checkpoint_seconds=1e6)
    assert estimate_run(few).disk == 2 * 3 * row
    many = prepared("scaffold", rounds=12, per_round=6, state="disk", checkpoint_seconds=1e6)
    assert estimate_run(many).disk == (2 * 6 + 6) * row
    sizes: list[int] = []

    class Meter(Callback):
        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            sizes.append((tmp_path / "run" / "state" / "clients.bin").stat().st_size)

    for ready, name in ((few, "few"), (many, "many")):
        sizes.clear()
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        start(ready, tmp_path / "run", callbacks=[Meter()])
        assert 0 < max(sizes) <= estimate_run(ready).disk, name


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared("scaffold", state="disk")
    needed, usage = estimate_run(ready).disk, shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    for out in (tmp_path / "deep" / "run", None):
        with pytest.raises(RunError, match="would not fit on the disk") as found:
            start(ready, out)
        assert "228 bytes x 6 clients (kept by scaffold)" in found.value.got
        assert len(found.value.lines()) <= 4
    assert list(tmp_path.iterdir()) == []
    start(prepared("scaffold", state="memory"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    start(ready, tmp_path / "run")


def test_local_buffers_are_client_state_too() -> None:
    plain = fk.Local(lr=0.1, epochs=1, batch_size=4, drop_last="single")
    ready = prepared(model=MODELS["norm"], buffers="local", local=plain)
    assert estimate_run(ready).client_state == 6 * 4 + 6 * 4 + 8
    with pytest.raises(RunError, match="kept by buffers"):
        prepared(model=MODELS["norm"], buffers="local", local=plain, memory_gb=1e-7, state="memory")


# --- refused before it starts ---------------------------------------------------------------------


def refused(**more: object) -> FedkeelError:
    with pytest.raises(FedkeelError) as found:
        prepared(**more)
    assert len(found.value.lines()) <= 4
    return found.value


def test_a_test_set_of_another_shape() -> None:
    wide = fk.dataset(np.zeros((4, 6)), [0, 1, 2, 0], classes=3)
    error = refused(test=wide)
    assert isinstance(error, ModelError)
    assert (error.got, error.expected) == (
        "[4, 6] of the test set",
        "[75, 5], as in training, but for the number of examples",
    )


def test_a_test_set_with_more_classes_than_outputs() -> None:
    more = fk.dataset(np.zeros((4, 5)), [0, 1, 2, 3])
    assert refused(test=more).got == "3 outputs for 4 classes"


def test_a_test_set_that_names_its_labels_in_another_order() -> None:
    """Its labels were taken for others, without a word."""
    clients, own = told(label_names=("a", "b", "c")), held()
    turned = replace(own, y=2 - own.y, label_names=("c", "b", "a"))
    test = prepared(clients=clients, test=turned).setup.test
    assert torch.equal(test.y, own.y)
    assert test.label_names == ("a", "b", "c")
    fewer = fk.dataset(own.x[:2], [0, 1], label_names=("b", "c"))
    assert prepared(clients=clients, test=fewer).setup.test.y.tolist() == [1, 2]
    error = refused(clients=clients, test=replace(own, label_names=("a", "b", "d")))
    assert (error.got, error.expected) == ("'d'", "one of 'a', 'b', 'c'")


def test_a_test_set_with_its_columns_in_another_order() -> None:
    clients = told(columns=("a", "b", "c", "d", "e"))
    error = refused(clients=clients, test=replace(held(), columns=("a", "c", "b", "d", "e")))
    assert (error.got, error.expected) == ("'c'", "'b'")


def test_a_test_set_of_one_example_where_the_batch_is_normalised_by_itself() -> None:
    """It ended in torch's words."""
    with pytest.raises(ModelError, match="evaluation has one example"):
        prepared(
            model=MODELS["norm"],
            clients=of_sizes(8, 6),
            buffers="local",
            cohort=fk.Cohort(),
            test=held(1),
        )


def test_nobody_takes_part() -> None:
    error = refused(cohort=fk.Cohort(participation=0.01))
    assert isinstance(error, ConfigError)
    assert "selects nobody" in error.what


def test_more_take_part_than_there_are() -> None:
    assert refused(cohort=fk.Cohort(clients=7)).expected == "1..6"


def test_buffers_without_a_policy() -> None:
    assert "norm" in str(refused(model=MODELS["norm"]))


def test_too_few_clients_to_sample_by_examples() -> None:
    ready = prepared(cohort=fk.Cohort(clients=4, sampling="examples"))
    result = start(ready)
    assert all(len(row.clients) == 4 for row in result.rows[1:])
    with pytest.raises(DataError):
        fk.federation(federation().data, [np.array([0]), np.array([], dtype=np.int64)])


# --- what it says of itself -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "per_round", "expected"),
    [
        ({"kind": "auto", "workers": 4}, 4, ("workers", 4)),
        ({"kind": "auto", "workers": 4}, 2, ("workers", 2)),
        ({"kind": "auto", "workers": 4}, 1, ("sequential", 1)),
        ({"kind": "auto", "workers": 1}, 4, ("sequential", 1)),
        ({"kind": "workers", "workers": 1}, 4, ("workers", 1)),
        ({"kind": "workers", "workers": 9}, 4, ("workers", 4)),
        ({"kind": "sequential", "workers": 9}, 4, ("sequential", 1)),
    ],
)
def test_the_engine_that_is_chosen(
    asked: dict[str, object], per_round: int, expected: tuple[str, int]
) -> None:
    record = describe_run(prepared(per_round=per_round, **asked))
    assert (record.engine.kind, record.engine.workers) == expected
    assert record.engine.asked == asked["kind"]


def test_a_record_says_what_ran() -> None:
    ready = prepared("fedprox+gcfed", cohort=fk.Cohort(clients=4, dropout=0.25), seed=3)
    record = describe_run(ready)
    assert record.key == ready.key
    assert (record.seed, record.rounds, record.status) == (3, 3, "running")
    assert [part.name for part in record.parts] == ["fedprox", "gcfed.local", "gcfed.global"]
    assert record.citations == ["li2020fedprox", "gcfed2025"]
    assert record.bibtex.count("@") == 2
    assert record.model.parameters == 6 * 5 + 6 + 3 * 6 + 3
    assert record.model.head == "fc2"
    assert record.data.train == sum(record.partition.sizes)
    assert np.sum(record.partition.histogram) == record.data.train
    assert record.participation == "4 of 6 clients a round, each drops out with probability 0.25"
    assert record.local == "SGD, lr 0.05, 2 epochs, batch 4, momentum 0.5"
    assert all(to_json(environment()).values())


# --- batches of one example -----------------------------------------------------------------------


def begin(sizes: tuple[int, ...], model: object = MODELS["norm"], **local: object) -> object:
    values = {"lr": 0.05, "batch_size": 4, **({} if "steps" in local else {"epochs": 1}), **local}
    return prepared(
        model=model,
        clients=of_sizes(*sizes),
        local=fk.Local(**values),
        buffers="average",
        cohort=fk.Cohort(),
        rounds=3,
    )


@pytest.mark.parametrize(
    ("sizes", "local", "count", "cures"),
    [
        ((8, 9, 5), {}, "2 of 3 clients have", "set local.drop_last = 'single'; or use"),
        ((8, 1), {}, "1 of 2 clients has", "do   give every client more examples (min_size = 2"),
        ((8, 1), {"drop_last": "single"}, "1 of 2 clients has", "more examples"),
        ((8, 1), {"steps": 1, "sampling": "random"}, "1 of 2 clients has", "more examples"),
        ((9, 1), {}, "2 of 2 clients", "'single', and give every client more examples"),
        ((8, 6), {"batch_size": 1}, "2 of 2 clients", "raise local.batch_size"),
        ((8, 5), {"steps": 1}, "1 of 2 clients", "drop_last"),
    ],
)
def test_a_batch_of_one_is_refused_where_batch_normalisation_cannot_take_it(
    sizes: tuple[int, ...], local: dict[str, object], count: str, cures: str
) -> None:
    with pytest.raises(ModelError, match="a mini-batch of one example") as found:
        begin(sizes, **local)
    text = str(found.value)
    assert count in text
    assert cures in text
    assert "fedkeel.replace_batch_norm(module)" in text
    assert "Expected more than 1 value per channel" in text
    assert len(found.value.lines()) <= 4


@each(
    ("sizes", "model", "local"),
    [
        ((8, 6), MODELS["norm"], {}),
        ((9, 5), MODELS["norm"], {"drop_last": "single"}),
        ((9, 5), MODELS["norm"], {"drop_last": "always"}),
        ((9, 5), MODELS["norm"], {"batch_size": "all"}),
        ((9, 5), MODELS["norm"], {"steps": 2, "sampling": "random"}),
        ((17, 8), MODELS["norm"], {"steps": 1}),  # three rounds end before the fifth batch
        ((9, 1), MODELS["plain"], {}),
        ((9, 1), Mapped, {}),
    ],
)
def test_what_trains_is_not_refused(
    sizes: tuple[int, ...], model: object, local: dict[str, object]
) -> None:
    assert len(start(begin(sizes, model, **local)).rows) == 4


@pytest.mark.parametrize(("batch", "says"), [(13, "batch_size = 14"), (1, "batch_size = ")])
def test_an_evaluation_that_ends_with_one_example(batch: int, says: str) -> None:
    def scored(batch: int) -> object:
        return prepared(
            model=MODELS["norm"],
            clients=of_sizes(8, 6),
            buffers="local",
            cohort=fk.Cohort(),
            evaluation=fk.Evaluation(batch_size=batch),
            rounds=1,
        )

    with pytest.raises(ModelError, match="evaluation has one example") as found:
        scored(batch)
    text = str(found.value)
    assert says in text
    assert "Expected more than 1 value per channel" in text
    fits = int(text.split("evaluation.batch_size = ")[1])
    assert len(start(scored(fits)).rows) == 2


def test_a_server_that_would_not_fit_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(*_: object) -> None:
        raise AssertionError("the server was made")

    monkeypatch.setattr("fedkeel.runner.prepare.server_start", made)
    monkeypatch.setattr(module, "COMFORTABLE_BYTES", 0)
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    with pytest.raises(RunError, match="would not fit") as found:
        prepared("gradma", memory_gb=1e-7)
    assert "at the server" in found.value.got
    with pytest.raises(AssertionError):
        prepared("gradma", memory_gb=1.0)


@pytest.mark.parametrize("half", ["clients", "test"])
def test_a_number_that_float32_does_not_hold_is_refused(half: str) -> None:
    given = {"clients": federation(), "test": held()}
    data = given[half].data if half == "clients" else given[half]
    x = data.x.double()
    x[3, 1] = -1.797e308
    large = replace(data, x=x)
    given[half] = replace(given[half], data=large) if half == "clients" else large
    with pytest.raises(DataError, match="too large for float32, in which models") as found:
        prepared(**given)
    assert found.value.got == "-1.797e+308 in row 3 (counted from 0)"
    prepared(**given, dtype="float64")
