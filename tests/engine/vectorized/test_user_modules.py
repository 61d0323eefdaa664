"""Modules and losses of users, of all kinds: every engine gives the same numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.task.traits import detect_traits

SLOW = pytest.mark.slow

RAGGED, ALIKE = (9, 4, 13, 11, 3), (8, 8, 8, 8, 8)
X = np.random.default_rng(0).normal(size=(40, 24))
TOKENS = np.random.default_rng(1).integers(0, 20, size=(40, 6))
Y = np.random.default_rng(2).integers(0, 4, size=40)


def run(task: fk.Task, sizes: tuple[int, ...], tokens: bool, **more: Any) -> fk.Result:
    data = fk.dataset(TOKENS, Y, classes=4, tokens=True) if tokens else fk.dataset(X, Y, classes=4)
    ends = np.cumsum(sizes)
    clients = fk.federation(data, [np.arange(b - s, b) for b, s in zip(ends, sizes, strict=True)])
    given: dict[str, Any] = {"method": "fedavg", "dtype": "float64", "lr": 0.1, "rounds": 3, **more}
    return fk.run(
        given["method"],
        task=task,
        clients=clients,
        test=data,
        rounds=given["rounds"],
        local=fk.Local(lr=given["lr"], epochs=2, batch_size=4),
        engine=fk.Engine(device="cpu", dtype=given["dtype"], **given["engine"]),
        progress=False,
    )


def engine(chunk: int) -> dict[str, Any]:
    return {"kind": "vectorized", "workers": 1, "parallel_clients": chunk}


def agree(
    task: fk.Task,
    sizes: tuple[int, ...] = RAGGED,
    tokens: bool = False,
    close: float = 1e-12,
    **more: Any,
) -> list[str]:
    """Check that engines give the same model and losses; return why one was plainer.

    Where models may differ by more than 1e-6, their losses may too: they come from the same scores.
    """
    one = run(task, sizes, tokens, engine={"kind": "sequential"}, **more)
    reasons: list[str] = []
    for chunk in (1, 3):
        other = run(task, sizes, tokens, engine=engine(chunk), **more)
        for name, tensor in one.state_dict().items():
            found = other.state_dict()[name]
            torch.testing.assert_close(found, tensor, rtol=0, atol=close, msg=f"{name}, {chunk}")
        loss = pytest.approx(one.rows[-1].train_loss, rel=max(1e-6, close))
        assert other.rows[-1].train_loss == loss
        reasons += other.record.engine.reasons
    return reasons


class Own(nn.Module):
    """Two layers, between which something is done."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return out

    def between(self, h: Tensor) -> Tensor:
        return h.tanh()


class Gated(Own):
    """Keeps the largest three, by writing into zeros."""

    def between(self, h: Tensor) -> Tensor:
        values, where = h.topk(3, 1)
        return torch.zeros_like(h).scatter_(1, where, values)


class Sliced(Own):
    """Writes into a part of zeros."""

    def between(self, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        out[:, ::2] = h[:, ::2]
        return out


class Summed(Own):
    """Adds up rows of zeros in other places."""

    def between(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h).index_add_(0, torch.arange(len(h)).flip(0), h)


def smoothed(logits: Tensor, y: Tensor) -> Tensor:
    target = torch.full_like(logits, 0.05).scatter_(1, y[:, None], 0.85)
    return -(target * logits.log_softmax(1)).sum(1)


PERFORMANCE = "ignore:There is a performance drop"  # torch warns of vmap over such operations


@pytest.mark.filterwarnings(PERFORMANCE)
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (Gated, RAGGED),
        pytest.param(Sliced, ALIKE, marks=SLOW),
        pytest.param(Gated, ALIKE, marks=SLOW),
        pytest.param(Sliced, RAGGED, marks=SLOW),
    ],
)
def test_what_is_written_to_is_no_constant(model: type[nn.Module], sizes: tuple[int, ...]) -> None:
    assert agree(fk.Task(model), sizes) == []


@pytest.mark.filterwarnings(PERFORMANCE)
def test_a_loss_that_writes_into_its_target() -> None:
    assert agree(fk.Task(Own, loss=smoothed)) == []
    assert agree(fk.Task(Summed), ALIKE) == []


class Spectrum(nn.Module):
    """Gradients through a transform whose backward pass writes into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.fft.rfft(self.embed(x), dim=1).abs().mean(1))
        return out


@SLOW
def test_small_steps_are_compared_by_how_far_they_go() -> None:
    agree(fk.Task(Spectrum), tokens=True, dtype="float32", lr=1e-3, rounds=8, close=2e-6)


class Centred(Own):
    """Takes the batch's mean off."""

    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class Averages(Own):
    """Keeps a mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class Counts(Own):
    """Counts examples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.seen += len(h)
        return h


def instances() -> nn.Module:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (4, 6)), norm, nn.Flatten(), nn.Linear(24, 4))


@pytest.mark.parametrize(
    "model",
    [
        Averages,
        pytest.param(Centred, marks=SLOW),
        pytest.param(Counts, marks=SLOW),
        pytest.param(instances, marks=SLOW),
    ],
)
def test_models_that_mix_examples_see_no_padding(model: Callable[[], nn.Module]) -> None:
    agree(fk.Task(model, buffers="average"))


class Autocast(Own):
    """Computes its scores in bfloat16; the weights of a padded batch make their loss float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class Converted(Own):
    """The same without autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (Autocast, RAGGED),
        pytest.param(Autocast, ALIKE, marks=SLOW),
        pytest.param(Converted, RAGGED, marks=SLOW),
    ],
)
def test_scores_of_another_type_see_no_padding(
    model: type[nn.Module], sizes: tuple[int, ...]
) -> None:
    """The engines agree up to the rounding of bfloat16, 2^-8 of each product.

    So do their losses, which are means of what these scores give: each score is rounded to 2^-8 of
    itself, and the mean over all examples to less than that.
    """
    agree(fk.Task(model), sizes, dtype="float32", close=2e-3)


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_what_needs_no_gradient_is_refused_with_what_to_do(kind: str) -> None:
    class Frozen(Own):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    with pytest.raises(fk.errors.TrainingError, match="does not require grad") as caught:
        run(fk.Task(Frozen), RAGGED, False, engine={"kind": kind, "workers": 1})
    assert "torch.inference_mode()" in str(caught.value.do)


def test_nothing_is_trained_in_inference_mode() -> None:
    """Tensors that were made in it can be trained with outside."""
    with torch.inference_mode():
        with pytest.raises(fk.errors.RunError, match=r"inside torch.inference_mode\(\)"):
            run(fk.Task(Own), RAGGED, False, engine={"kind": "sequential"})
        module = Own()
        data = fk.dataset(torch.from_numpy(X), torch.from_numpy(Y), classes=4)
        clients = fk.federation(data, [np.arange(9), np.arange(9, 20)])
    results = [
        fk.run(
            "fedavg",
            task=fk.Task(module),
            clients=clients,
            test=data,
            rounds=1,
            local=fk.Local(lr=0.1, epochs=1, batch_size=4),
            engine=fk.Engine(kind=kind, workers=1, dtype="float64", device="cpu"),
            progress=False,
        ).state_dict()
        for kind in ("sequential", "vectorized")
    ]
    assert not torch.equal(results[0]["last.weight"], module.last.weight.double())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=SLOW)])
def test_buffers_that_a_model_has_not_are_kept_by_nobody(method: str) -> None:
    """The second round did not find them."""
    agree(fk.Task(Own, buffers="local"), method=method)
    one, two = (
        run(fk.Task(Own, buffers=kept), RAGGED, False, engine={"kind": "sequential"}, method=method)
        for kept in ("local", "average")
    )
    assert all(torch.equal(t, two.params[name]) for name, t in one.params.items())


EMBEDDINGS = [{"scale_grad_by_freq": True}, {"sparse": True}]


@pytest.mark.parametrize(
    ("more", "method"),
    [
        (EMBEDDINGS[0], "fedavg"),
        (EMBEDDINGS[1], "fedavg"),
        *(
            pytest.param(more, method, marks=SLOW)
            for more in EMBEDDINGS
            for method in ("scaffold", "gcfed", "fedcurv")
        ),
    ],
)
def test_embeddings(more: dict[str, bool], method: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 5, **more), nn.Flatten(), nn.Linear(30, 4))

    agree(fk.Task(model), tokens=True, method=method)


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=logits.dtype)[y]
    return F.cross_entropy(logits, y, reduction="none") * weight * len(y) / weight.sum()


def noisy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits + 0.1 * torch.randn_like(logits), y, reduction="none")


@pytest.mark.parametrize("loss", [weighted, noisy])
def test_losses_of_a_batch_as_a_whole(loss: Callable[..., Tensor]) -> None:
    agree(fk.Task(Own, loss=loss))


def test_a_mean_loss_is_compiled_too() -> None:
    reasons = agree(fk.Task(Own, loss=nn.CrossEntropyLoss()))
    assert not any("not compiled" in reason for reason in reasons)


class Turned(Own):
    """Drops from a tensor that lies the other way round in memory."""

    def between(self, h: Tensor) -> Tensor:
        h = h.unflatten(1, (3, 4)).transpose(1, 2)
        return F.dropout(h, 0.3, self.training).flatten(1)


class Attends(nn.Module):
    """A transformer's layer, which drops in several layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(20, 8), nn.Linear(8, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(self.embed(x)).mean(1))
        return out


class NoisyDrop(Own):
    """Draws other numbers before a mask."""

    def between(self, h: Tensor) -> Tensor:
        noise = 0.1 * torch.randn_like(h) if self.training else torch.zeros_like(h)
        return F.dropout(h + noise, 0.3, self.training)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (Turned, RAGGED),
        pytest.param(Attends, ALIKE, marks=SLOW),
        pytest.param(Turned, ALIKE, marks=SLOW),
        pytest.param(Attends, RAGGED, marks=SLOW),
    ],
)
def test_masks_are_filled_as_they_lie(model: type[nn.Module], sizes: tuple[int, ...]) -> None:
    assert agree(fk.Task(model), sizes, tokens=model is Attends) == []


def test_other_numbers_before_a_mask() -> None:
    assert agree(fk.Task(NoisyDrop), ALIKE)


@pytest.mark.parametrize("sizes", [ALIKE, (13, 13, 8)])
def test_what_is_drawn_after_the_steps_follows_them(sizes: tuple[int, ...]) -> None:
    """Also of a client that has ended and stays beside others, which go on."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(24, 12), nn.Dropout(0.5), nn.Linear(12, 4))

    agree(fk.Task(model), sizes, method="mimelite")


@SLOW
def test_what_is_drawn_after_the_steps_lies_as_that_of_one_alone() -> None:
    """By torch.func masks of attention are filled in another order than by the tape."""
    agree(fk.Task(Attends), ALIKE, method="mimelite", tokens=True)


class Fades(Own):
    """A buffer that shrinks, and matters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(12))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.size.mul_(0.9)
        return h * self.size


@pytest.mark.parametrize(
    "method", ["moon", pytest.param("fedavg", marks=SLOW), pytest.param("fedmlb", marks=SLOW)]
)
def test_objectives_see_the_buffers_from_before_the_step(method: str) -> None:
    agree(fk.Task(Fades, buffers="average", head="last"), method=method)


class Bounded(Own):
    """Bounds its weights before it uses them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Renormed(Own):
    """The same by other memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = torch.renorm(self.first.weight.data, 2, 0, 0.3)
        return super().forward(x)


def bounded() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 5, max_norm=0.5), nn.Flatten(), nn.Linear(30, 4))


@pytest.mark.parametrize(
    "model",
    [Bounded, pytest.param(Renormed, marks=SLOW), pytest.param(bounded, marks=SLOW)],
)
def test_a_model_that_writes_to_its_parameters(model: Callable[[], nn.Module]) -> None:
    task, tokens = fk.Task(model), model is bounded
    reasons = agree(task, tokens=tokens)
    assert all("writes to its parameters" in reason for reason in reasons)
    one, two = (
        run(task, ALIKE, tokens, engine={"kind": kind, "workers": workers})
        for kind, workers in (("sequential", None), ("workers", 2))
    )
    for name, tensor in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], tensor), name


def test_what_a_model_writes_is_trained_on_as_by_hand() -> None:
    task = fk.Task(Bounded)
    result = run(task, (40,), False, engine={"kind": "sequential"}, rounds=1)
    data = fk.dataset(X, Y, classes=4)
    network = task.network(data, 0, torch.float64)
    module = Bounded().double()
    module.load_state_dict(network.initial_state())
    from fedkeel.data import batches

    local = fk.Local(lr=0.1, epochs=2, batch_size=4)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for rows in batches.plan(local, 40, 0, 0, 0):
        x, y = data.x[torch.from_numpy(rows)].double(), data.y[torch.from_numpy(rows)]
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimiser.step()
    for name, tensor in result.state_dict().items():
        torch.testing.assert_close(tensor.double(), module.state_dict()[name], rtol=0, atol=1e-12)


class Remembers(Own):
    """Counts in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += self.training
        return h if self.calls < 12 else h / 2


class Drifts(Own):
    """Keeps a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(12)

    def between(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class Normalises(Own):
    """Keeps statistics for evaluation as plain attributes, and looks at them only there."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(12)

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            return h - self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - h.mean(0)


class Shows(Own):
    """Keeps what it has seen last, and never looks at it."""

    def between(self, h: Tensor) -> Tensor:
        self.last_seen = h.detach()
        return h


class Counts(Own):
    """Counts its calls in a list, which nobody sees before there have been many."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = {"calls": [0]}

    def between(self, h: Tensor) -> Tensor:
        self._seen["calls"][0] += 1
        return h * 2 if self._seen["calls"][0] > 12 else h


class Looks(Own):
    """Keeps its inner values, and works out once what it needs for a length."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Tensor] = []
        self._tables: dict[int, Tensor] = {}

    def between(self, h: Tensor) -> Tensor:
        self.shown = [h.detach()]
        width = h.shape[-1]
        return h * self._tables.setdefault(width, torch.linspace(1.0, 2.0, width, dtype=h.dtype))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Remembers, "calls"),
        (Drifts, "mean"),
        (Normalises, "mean"),
        (Counts, "_seen"),
        (Looks, ""),
        (Shows, ""),
        (Own, ""),
    ],
)
def test_what_a_model_remembers_is_found_out(model: type[nn.Module], told: str) -> None:
    module = model().train()
    before = repr(own(module))
    traits = detect_traits(module, dict(module.named_parameters()), {}, torch.randn(3, 24))
    assert not traits.writes_parameters
    assert traits.hidden_state.startswith(told)
    assert bool(traits.hidden_state) == bool(told)
    assert repr(own(module)) == before


def own(module: nn.Module) -> dict[str, Any]:
    """What a module keeps that is not torch's."""
    return {k: v for k, v in vars(module).items() if k not in vars(nn.Module())}


def test_a_model_with_a_memory_of_its_own_is_named_in_every_engine() -> None:
    for engine_ in ({"kind": "sequential"}, engine(3)):
        result = run(fk.Task(Remembers), ALIKE, False, engine=engine_)
        (reason,) = result.record.engine.reasons
        assert "changes calls in its forward pass" in reason


class Warms:
    """A loss that grows with the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, scores: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(scores, y, reduction="none") * (1.0 + self.calls / 100)


def test_a_loss_with_a_memory_of_its_own_is_named_in_every_engine() -> None:
    for engine_ in ({"kind": "sequential"}, engine(3)):
        result = run(fk.Task(Own, loss=Warms()), ALIKE, False, engine=engine_)
        (reason,) = result.record.engine.reasons
        assert "changes calls of its loss" in reason


class Skips(Own):
    """Leaves a layer out by numbers that are not torch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def between(self, h: Tensor) -> Tensor:
        return h.relu() if self.training and self.draw() < 0.5 else h


@pytest.mark.parametrize(
    ("draw", "whose"), [(random.random, "Python"), (lambda: np.random.rand(), "NumPy")]
)
def test_random_numbers_that_no_seed_sets_are_named_and_not_compiled(
    draw: Callable[[], float], whose: str
) -> None:
    def model() -> nn.Module:
        return Skips(draw)

    state, numpy = random.getstate(), np.random.get_state()[2]
    fk.Task(model).network(fk.dataset(X, Y, classes=4), 0, torch.float32)
    assert random.getstate() == state  # looking at it draws nothing
    assert np.random.get_state()[2] == numpy
    for engine_ in ({"kind": "sequential"}, engine(3)):
        result = run(fk.Task(model), ALIKE, False, engine=engine_)
        (reason,) = result.record.engine.reasons
        assert f"draws random numbers from {whose}" in reason


class Scales(Own):
    """Writes over its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x /= 2.0
        x += 1.0
        return super().forward(x)


class ScalesApart(Own):
    """The same by new tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / 2.0 + 1.0)


@pytest.mark.parametrize(
    "method",
    ["fedavg", *(pytest.param(m, marks=SLOW) for m in ("fedsam", "moon", "fedreg", "mime"))],
)
def test_a_model_that_writes_over_its_inputs_sees_them_anew_each_time(method: str) -> None:
    for engine_ in ({"kind": "sequential"}, engine(3)):
        one, two = (
            run(fk.Task(model), ALIKE, False, method=method, engine=engine_)
            for model in (Scales, ScalesApart)
        )
        assert not one.record.engine.reasons
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, two.state_dict()[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("fedgc", "float64"),
        pytest.param("fedgc", "float32", marks=SLOW),
        *(
            pytest.param(method, dtype, marks=SLOW)
            for method in ("fedgc.cgc", "fedavg+fedgc.sgc")
            for dtype in ("float32", "float64")
        ),
    ],
)
def test_the_rounding_of_a_zero_constrains_nothing(method: str, dtype: str) -> None:
    def model() -> nn.Module:
        norm = nn.BatchNorm1d(12)  # before which a bias has a gradient of zero
        return nn.Sequential(nn.Linear(24, 12), norm, nn.Linear(12, 4))

    task = fk.Task(model, buffers="average")
    close = 1e-12 if dtype == "float64" else 1e-5
    agree(task, ALIKE, method=method, dtype=dtype, lr=0.03, rounds=6, close=close)
    result = run(task, ALIKE, False, method=method, dtype=dtype, rounds=6, engine=engine(5))
    assert all(
        float(tensor.abs().max()) < 10
        for tensor in result.state_dict().values()
        if tensor.is_floating_point()
    )


@pytest.mark.parametrize(
    ("method", "layer", "buffers", "word"),
    [
        ("dpsgd", lambda: nn.Dropout(0.5), "refuse", "dropout"),
        ("fedcurv", lambda: nn.BatchNorm1d(12), "local", "batch normalisation"),
    ],
)
def test_examples_by_themselves_need_a_model_that_bears_it(
    method: str, layer: Callable[[], nn.Module], buffers: Any, word: str
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(24, 12), layer(), nn.Linear(12, 4))

    task = fk.Task(model, buffers=buffers)
    with pytest.raises(fk.FedkeelError, match=word):
        run(task, ALIKE, False, method=method, engine={"kind": "sequential"})


class Tempered(nn.Module):
    """Has a single number as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.temperature = nn.Linear(24, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.temperature


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("fedavg", "float32"),
        ("scaffold", "float64"),
        pytest.param("fedavg", "float64", marks=SLOW),
        pytest.param("scaffold", "float32", marks=SLOW),
        *(
            pytest.param(method, dtype, marks=SLOW)
            for method in ("fedcm", "fedgh")
            for dtype in ("float32", "float64")
        ),
    ],
)
def test_single_numbers_as_parameters(method: str, dtype: str) -> None:
    torch.manual_seed(0)
    close = 1e-12 if dtype == "float64" else 1e-5
    assert not agree(fk.Task(Tempered()), method=method, dtype=dtype, close=close)
