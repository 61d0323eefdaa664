"""Tasks: what is made of a user's module, and what is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from each import each
from fedkeel.data.dataset import Dataset, dataset
from fedkeel.errors import ModelError
from fedkeel.task.network import Network
from fedkeel.task.task import Task


def digits(shape: tuple[int, ...] = (4,), classes: int = 3, n: int = 6) -> Dataset:
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))
    return dataset(x, torch.arange(n) % classes, classes=classes)


def network(
    model: nn.Module | Callable[[], nn.Module], seed: int = 0, **options: object
) -> Network:
    data = options.pop("data", None) or digits()
    return Task(model, **options).network(data, seed, torch.float64)


def refusal(model: nn.Module | Callable[[], nn.Module], **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        network(model, **options)
    assert len(str(caught.value).splitlines()) <= 4
    return str(caught.value)


class Body(nn.Module):
    """Two blocks and a classifier that does not come last in the definition."""

    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(5, 3)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.body(x))


class Bare(nn.Module):
    """Parameters of its own and no sub-modules."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


# --- the head --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "head", "found", "names"),
    [
        (plain(), None, "2", {"2.weight", "2.bias"}),
        (plain(), "0", "0", {"0.weight", "0.bias"}),
        (Body(), None, "body.2", {"body.2.weight", "body.2.bias"}),  # it owns the last parameter
        (Body(), "classify", "classify", {"classify.weight", "classify.bias"}),
        (Body(), "body", "body", {f"body.{i}.{k}" for i in (0, 2) for k in ("weight", "bias")}),
        (Bare(), None, "", set()),
    ],
)
def test_the_head_is_named_or_owns_the_last_parameter(
    model: nn.Module, head: str | None, found: str, names: set[str]
) -> None:
    made = network(model, head=head)
    assert made.head == found
    assert made.head_names == names


def test_a_head_that_is_not_there_or_has_nothing_to_learn() -> None:
    assert "Body has no sub-module 'clasify'" in refusal(Body(), head="clasify")
    assert "did you mean 'classify'?" in refusal(Body(), head="clasify")
    assert "The head '1' of Sequential has no parameters" in refusal(plain(), head="1")


# --- what cannot be trained ------------------------------------------------------------------


def frozen() -> nn.Module:
    module = plain()
    for p in module.parameters():
        p.requires_grad_(False)
    return module


def test_nothing_to_train() -> None:
    assert "Sequential has no parameters to train" in refusal(frozen())
    assert "Identity has no parameters to train" in refusal(nn.Identity())


@pytest.mark.parametrize("policy", ["average", "local"])
def test_buffers_need_a_policy(policy: str) -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    text = refusal(module)
    for part in ("3 buffers, such as '1.running_mean'", "model.buffers = 'average', or 'local'"):
        assert part in text
    assert "fedkeel.replace_batch_norm(module)" in text
    assert list(network(module, buffers=policy).buffers) == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert network(fk.replace_batch_norm(module)).buffers == {}


class Masked(nn.Module):
    """With a constant buffer."""

    def __init__(self, constant: Tensor) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("mask", constant)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


def test_complex_numbers_are_refused() -> None:
    text = refusal(Masked(torch.ones(2, dtype=torch.complex64)), buffers="local")
    assert "got 'mask' of torch.complex64" in text
    assert "torch.view_as_complex" in text


def test_a_buffer_that_has_no_mean() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    text = refusal(Masked(mask), buffers="average")
    assert "The buffer 'mask' of Masked has no mean over the clients" in text
    assert "model.buffers = 'local'" in text
    kept = network(Masked(mask), buffers="local").buffers["mask"]
    assert torch.equal(kept, mask)


def test_a_module_that_torch_cannot_copy() -> None:
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(4, 6))
    text = refusal(nn.Sequential(old, nn.Linear(6, 3)))
    assert "Sequential cannot be copied" in text
    assert "torch.nn.utils.parametrizations.weight_norm" in text
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    assert len(network(nn.Sequential(new, nn.Linear(6, 3))).names) == 5


def test_a_loss_with_parameters_of_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(3))

        def forward(self, scores: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(scores * self.scale.exp(), y, reduction="none")

    with pytest.raises(ModelError, match="parameters of its own") as found:
        fk.Task(plain(), loss=Scaled())
    assert "got scale" in str(found.value)
    fk.Task(plain(), loss=Scaled().requires_grad_(False))


def test_a_head_that_shares_its_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x)

    text = refusal(Tied(), head="last")
    assert "no parameters of its own" in text
    assert "another layer has" in text


def test_a_slash_in_a_name() -> None:
    module = nn.ModuleDict({"in/out": nn.Linear(4, 3)})
    assert "got '0.in/out.weight'" in refusal(nn.Sequential(module))


ONES = np.ones((4, 4))


@pytest.mark.parametrize(
    ("last", "data", "says"),
    [
        (nn.Linear(6, 2), digits(), "got 2 outputs for 3 classes; expected at least 3 outputs"),
        (nn.Sequential(nn.Linear(6, 3), nn.Flatten(0)), digits(), "one row of scores for each"),
        (nn.Sequential(nn.Linear(6, 3), nn.Unflatten(1, (3, 1))), digits(), "got [2, 3, 1]"),
        (
            nn.Linear(6, 3),
            dataset(np.ones((4, 4)), np.zeros((4, 1), int)),
            "take the second axis away",
        ),
        (nn.Linear(6, 3), dataset(np.ones((4, 4)), np.eye(4)[:, :3].astype(int)), "loss='bce'"),
        (nn.Linear(6, 3), dataset(np.ones((4, 4)), np.full((4, 5), 2)), "'token_cross_entropy'"),
        (nn.Linear(6, 3), dataset(np.ones((4, 4)), np.arange(4) + 0.5), "name another loss"),
    ],
)
def test_outputs_that_do_not_fit(last: nn.Module, data: Dataset, says: str) -> None:
    assert says in refusal(nn.Sequential(nn.Linear(4, 6), last), data=data)


def test_more_outputs_than_classes_are_no_mistake() -> None:
    assert len(network(nn.Linear(4, 10)).params["bias"]) == 10


class Fails(nn.Module):
    """Raises what it is told to."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.w, self.error = nn.Parameter(torch.zeros(1)), error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


class Headless(nn.Module):
    """Has layers, and says nothing of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)


def test_a_module_without_forward_is_told_to_have_one() -> None:
    text = refusal(Headless())
    assert "Headless cannot take the data" in text
    assert text.endswith(
        "do   write its method forward(self, x), which returns one row of scores for each example"
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("first\nsecond\nthird"), "inputs of shape [2, 4]: RuntimeError: first"),
        (AssertionError(), "inputs of shape [2, 4]: AssertionError"),
        (KeyError("channel"), "inputs of shape [2, 4]: KeyError: 'channel'"),
    ],
)
def test_a_forward_pass_that_fails(error: Exception, says: str) -> None:
    text = refusal(Fails(error))
    assert "Fails cannot take the data" in text
    assert says in text
    assert "raised in forward, line " in text
    assert __file__ in text
    assert ("check the first layer" in text) == isinstance(error, RuntimeError)
    assert "second" not in text


def test_a_first_layer_that_does_not_fit() -> None:
    text = refusal(nn.Linear(5, 3))
    assert "[2, 4]" in text
    assert "check the first layer" in text


def test_a_module_that_converts_its_inputs() -> None:
    class Converts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    text = refusal(Converts(4, 3))
    assert "do not convert types in the module" in text
    assert "engine.dtype" in text


def test_labels_that_do_not_begin_at_0_are_named_where_outputs_do_not_fit() -> None:
    data = fk.dataset(torch.ones(4, 4), [1, 2, 3, 3])
    text = refusal(nn.Linear(4, 3), data=data)
    assert "got 3 outputs for 4 classes" in text
    assert "from 0 up to the largest, 3, and none of these is 0" in text
    assert "none of these" not in refusal(nn.Linear(4, 2))


# --- the module that is made -----------------------------------------------------------------


def test_a_maker_is_called_under_the_runs_seed() -> None:
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    a, b, c = (network(plain, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)  # nobody else's numbers were drawn
    assert all(torch.equal(a.params[k], b.params[k]) for k in a.params)
    assert not torch.equal(a.params["0.weight"], c.params["0.weight"])
    assert all(
        torch.equal(v, network(Body, 5).params[k]) for k, v in network(Body, 5).params.items()
    )


def test_a_module_is_the_same_for_every_seed_and_stays_as_it_was() -> None:
    module = plain().eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    a, b = network(module, 0), network(module, 1)
    assert all(torch.equal(a.params[k], b.params[k]) for k in a.params)
    a.params["0.weight"].add_(1.0)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert not module.training
    assert module[0].weight.dtype == torch.float32
    assert a.params["0.weight"].dtype == torch.float64


def test_a_maker_that_makes_no_module() -> None:
    assert "did not return a torch.nn.Module.\n  got dict" in refusal(dict)


def test_a_loss_of_ones_own_is_the_one_that_is_used() -> None:
    def half(scores: Tensor, y: Tensor) -> Tensor:
        return 0.5 * nn.functional.cross_entropy(scores, y, reduction="none")

    data, module = digits(), plain()
    losses = [
        network(module, loss=loss).example_losses(torch.eye(3), data.y[:3])
        for loss in (half, Task(module).loss)
    ]
    torch.testing.assert_close(2 * losses[0], losses[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_is_the_runs(dtype: torch.dtype) -> None:
    made = Task(plain()).network(digits(), 0, dtype)
    assert {p.dtype for p in made.params.values()} == {dtype}
    assert made.dtype == dtype


# --- words and shapes ------------------------------------------------------------------------


@each(
    ("given", "says"),
    [
        (
            {"buffers": "avg"},
            "no policy 'avg' for a model's buffers.\n  do   did you mean 'average'",
        ),
        ({"buffers": None}, "known: average, local, refuse"),
        ({"model": "mlp"}, "neither a module nor a function that makes one.\n  got 'mlp'"),
        ({"head": 2}, "got int; expected a name such as 'fc2'"),
        ({"loss": "mes"}, "There is no loss 'mes'.\n  do   did you mean 'mse'"),
        ({"loss": 3}, "The loss is not a function.\n  got 3"),
        ({"metrics": "mae"}, "The metrics are not a list.\n  got 'mae'"),
        ({"loss": nn.CrossEntropyLoss}, "torch.nn.CrossEntropyLoss(reduction='none')"),
    ],
)
def test_a_task_refuses_what_it_does_not_know(given: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        Task(**{"model": plain, **given})
    assert says in str(caught.value)
    assert len(caught.value.lines()) <= 4


def test_lazy_layers_are_named_with_the_call_that_they_wait_for() -> None:
    text = refusal(lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3)))
    assert "got '0.weight', '0.bias', '2.weight' and 1 more" in text
    assert "module(torch.zeros(2, 4))" in text
    tokens = dataset([[0, 1], [1, 2]], [0, 1], tokens=True)
    assert "torch.zeros(2, 2, dtype=torch.long)" in refusal(nn.LazyLinear(3), data=tokens)

    def called() -> nn.Module:
        module = nn.LazyLinear(3)
        module(torch.zeros(2, 4))
        return module

    assert network(called).params["weight"].shape == (3, 4)


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), "one output for each class"),
        (nn.Unflatten(1, (3, 2)), "flatten what enters the last layer"),
    ],
)
def test_what_to_do_about_an_output(last: nn.Module, says: str) -> None:
    text = refusal(nn.Sequential(nn.Linear(4, 6), last))
    assert "expected [2, 3] for 2 examples of 3 classes" in text
    assert says in text


TOKENS, MASKS = torch.arange(14).view(2, 7) % 5, torch.arange(32).view(2, 4, 4) % 2
OF_TOKENS, OF_MASKS = torch.nn.Embedding(5, 5), nn.Conv2d(3, 1, 1)


@pytest.mark.parametrize(
    ("module", "loss", "x", "y", "says"),
    [
        (OF_TOKENS, "cross_entropy", TOKENS, TOKENS, "loss = 'token_cross_entropy'"),
        (OF_TOKENS, "mse", TOKENS, TOKENS, "loss = 'token_cross_entropy'"),
        (OF_MASKS, "cross_entropy", torch.ones(2, 3, 4, 4), MASKS, "loss = 'bce' or 'dice'; or"),
        (OF_MASKS, "cross_entropy", torch.ones(2, 3, 4, 4), MASKS.float(), "'bce' or 'dice'; or"),
        (OF_MASKS, "cross_entropy", torch.ones(2, 3, 4, 4), MASKS[:, None], "'bce' or 'dice'"),
        (OF_MASKS, "cross_entropy", torch.ones(2, 3, 6, 6), MASKS, "each place of the target"),
        (nn.Linear(4, 1), "cross_entropy", torch.ones(2, 4), [0, 1], "loss = 'bce'; or give"),
        (nn.Linear(4, 2), "bce", torch.ones(2, 4), [0, 1], "loss = 'cross_entropy'"),
        (nn.Conv2d(3, 2, 1), "token_cross_entropy", torch.ones(2, 3, 4, 4), MASKS, "'cross_ent"),
    ],
)
def test_a_loss_that_was_forgotten_is_named(
    module: nn.Module, loss: str, x: Tensor, y: object, says: str
) -> None:
    data = fk.dataset(x, y, tokens=not x.is_floating_point())
    with pytest.raises(ModelError) as caught:
        fk.Task(module, loss=loss).network(data, 0, torch.float32)
    assert says in str(caught.value)
    assert "flatten" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda scores, y: scores, "got [2, 3] for an output [2, 3] and targets [2]; expected [2]"),
        (lambda scores, y: scores.argmax(1) == y, "got [2] of torch.bool"),
        (lambda scores, y: 0.5, "got float"),
        (lambda scores, y: scores @ y, "got an output [2, 3] and targets [2]: "),
    ],
)
def test_a_loss_is_one_number_for_each_example(
    loss: Callable[[Tensor, Tensor], Tensor], says: str
) -> None:
    text = refusal(plain, loss=loss)
    assert "The loss" in text
    assert says in text


def test_a_loss_for_as_many_examples_as_scores_is_refused() -> None:
    examples = fk.dataset(torch.ones(6, 4), [0, 1] * 3)
    with pytest.raises(ModelError, match="The loss cannot be taken of the model's output"):
        fk.Task(nn.Linear(4, 2), loss=lambda scores, y: (scores - y).square().mean()).network(
            examples, 0, torch.float32
        )


def test_a_loss_may_be_a_mean_and_no_sum() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert network(plain, loss=nn.CrossEntropyLoss()).names
    assert network(plain, loss=nn.CrossEntropyLoss(weight=weights)).names
    for factor in (0.0, float("inf")):
        assert network(plain, loss=lambda scores, y, f=factor: f * scores.abs().sum()).names
    text = refusal(plain, loss=nn.CrossEntropyLoss(reduction="sum"))
    assert "The loss is a sum over the batch" in text


def test_a_likelihood_that_doubles_once_is_no_sum() -> None:
    """Cox's of equal scores is log 2 of two at risk, and log 4 of four."""
    times = dataset(torch.ones(4, 3), [[1.0, 1.0], [2.0, 0.0]] * 2)
    zeros = nn.Linear(3, 1)
    nn.init.zeros_(zeros.weight)
    assert network(zeros, loss="cox", data=times).names
