"""One client's round by the user's own function, in place of the local steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel import tree
from fedkeel.base.rng import torch_seed
from fedkeel.base.user_code import where_raised
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.client_inputs import take_examples
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.features.own_training.given import ClientExamples, TrainingRound
from fedkeel.method import checks
from fedkeel.method.context import Message
from fedkeel.method.local_loop import ClientRound, LocalState, client_finish
from fedkeel.method.round_values import Reply
from fedkeel.task.batch import Batch, batch_mean
from fedkeel.tree import State, Tree

Train = Callable[[Any, ClientExamples, TrainingRound], Mapping[str, Any]]
"""(module, examples, round) -> numbers, with ``loss`` among them."""

NAME = "local_training"
"""What the numbers of the user's function are called, before their own names."""


def train_client(
    train: Train,
    setup: TrainingSetup,
    client: ClientRound,
    local: LocalState,
    job: ClientJob,
    make_batch: Callable[[int], Batch],
    work: tuple[int, int],
    is_trial: bool,
) -> tuple[Reply, int, int]:
    """Train a client by the user's function, and end its round.

    Args:
        train: the function.
        setup: method, model, data and seed.
        client: what stays the same during the round.
        local: where the client begins.
        job: the client.
        make_batch: number of a mini-batch, from 1 -> the mini-batch.
        work: steps and examples that the settings ask for.
        is_trial: whether it is a rehearsal.

    Returns:
        What the client sends, keeps and logs; steps made; examples processed.

    Raises:
        TrainingError: the function raised an exception, or what it did cannot be used.
    """
    training, message = setup.training, client.message
    who = f"at client {job.client}, round {message.round + 1}"
    data = take_examples(setup, setup.federation.client(job.client))
    start = {**local.params, **local.personal}
    module = training.network.module(start, local.buffers)
    round = _told(setup, message, job, local, work[0], is_trial)
    frozen = checks.tensor_versions(training.network.frozen)
    with torch.enable_grad(), _seeded(round.seed):
        examples = ClientExamples(data.x, data.y, work[0], make_batch)
        returned = _called(train, module, examples, round, who)
    if checks.tensor_versions(training.network.frozen) != frozen:
        raise _unusable(
            f"changed frozen parameters {who}",
            why="they are never sent, and all clients have the same",
            do="train only parameters whose requires_grad was True",
        )
    end = _tensors(dict(module.named_parameters()), start, f"parameters {who}")
    trained = replace(
        local,
        params={name: end[name] for name in local.params},
        personal={name: end[name] for name in local.personal},
        buffers=_tensors(dict(module.named_buffers()), local.buffers, f"buffers {who}"),
        optimiser=_kept(round.state, training.keeps_optimiser, who),
    )
    numbers, (steps, examples_done) = _numbers(returned, work, who)
    # the sum over steps, of which the end of a round makes the mean for parts
    trained = replace(trained, loss=local.loss.new_tensor(numbers["loss"] * steps))
    reply = client_finish(client, trained, steps, path_length=local.loss.new_tensor(torch.nan))
    if bool(reply.finite):
        _check_finite(numbers, who)
    values = {name: local.loss.new_tensor(value) for name, value in numbers.items()}
    loss = values.pop("loss")
    noted = {f"{NAME}.{name}": value for name, value in values.items()}
    reply = replace(reply, loss=loss, diagnostics={**reply.diagnostics, **noted})
    return reply, steps, examples_done


def _told(
    setup: TrainingSetup,
    message: Message,
    job: ClientJob,
    local: LocalState,
    steps: int,
    is_trial: bool,
) -> TrainingRound:
    """Return what the function is told of the round."""
    training = setup.training

    def mean_loss(output: Any, y: Any) -> Tensor:  # noqa: ANN401 - whatever the module returns
        return batch_mean(training.network.task_losses(output, y), Batch(y, y))

    return TrainingRound(
        number=message.round,
        rounds=training.rounds,
        client=job.client,
        seed=torch_seed(setup.seed, "torch", message.round, job.client) % 2**32,
        lr=message.lr,
        local=training.local,
        steps=steps,
        step_factors=training.step_factors(message.round, steps),
        device=local.loss.device,
        loss=mean_loss,
        state=tree.map_tensors(torch.clone, local.optimiser),
        is_trial=is_trial,
    )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python and NumPy, and of GPUs; torch's own is seeded before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _called(
    train: Train, module: nn.Module, data: ClientExamples, round: TrainingRound, who: str
) -> object:
    """Return what the user's function returns; what it raises stays the cause of the error."""
    try:
        return train(module, data, round)
    except FedkeelError:
        raise
    except Exception as error:
        raise TrainingError(
            f"Your own training raised an error {who}.",
            got=f"{type(error).__name__}: {error}",
            why=f"raised in {where_raised(error)}",
        ) from error


def _tensors(found: Mapping[str, Tensor], like: Tree, what: str) -> Tree:
    """Return the trained tensors, on the device where they began."""
    for name, tensor in like.items():
        got = found.get(name)
        if got is None or (got.shape, got.dtype) != (tensor.shape, tensor.dtype):
            form = "nothing" if got is None else f"{list(got.shape)} of {got.dtype}"
            raise _unusable(
                f"changed the form of the model's {what}",
                got=f"{name!r}: {form}",
                expected=f"{list(tensor.shape)} of {tensor.dtype}",
                why="the update is what they are now minus what they were",
                do="leave names, shapes and types of the model that you are given",
            )
    # copies: the user's function may keep the module
    return {name: found[name].detach().to(t.device, copy=True) for name, t in like.items()}


def _kept(state: State, is_kept: bool, who: str) -> State:
    """Return what the client keeps for its next round."""
    if state and not is_kept:
        raise _unusable(
            f"wrote into round.state {who}",
            got=", ".join(map(repr, list(state)[:4])),
            why="a client keeps nothing unless the settings say so",
            do="set local.keep_state = true, or leave round.state empty",
        )
    checks.check_states("keeps in round.state", {NAME: state})
    return tree.map_tensors(lambda t: t.detach().to("cpu", copy=True), state)


def _numbers(
    returned: object, work: tuple[int, int], who: str
) -> tuple[dict[str, float], tuple[int, int]]:
    """Return the numbers by name, and the steps and examples, or refuse what is none."""
    fault = f"returned something else than numbers {who}"
    expected = "a dict of numbers with 'loss', such as {'loss': 0.7, 'accuracy': 0.8}"
    if not isinstance(returned, Mapping):
        raise _unusable(fault, got=f"an object of {type(returned).__name__}", expected=expected)
    if "loss" not in returned:
        got = ", ".join(map(repr, returned)) or "an empty dict"
        raise _unusable(f"returned no 'loss' {who}", got=got, expected=expected)
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        number = value
        if isinstance(value, Tensor | np.ndarray | np.generic) and not value.shape:
            number = value.item()
        if not isinstance(name, str) or not isinstance(number, Real) or isinstance(number, bool):
            raise _unusable(fault, got=f"{name!r}: {value!r}", expected=expected)
        numbers[name] = float(number)
    steps, examples = (
        numbers.pop(name, asked) for name, asked in zip(("steps", "examples"), work, strict=True)
    )
    if not (
        1 <= steps <= examples <= work[1] and steps == int(steps) and examples == int(examples)
    ):
        raise _unusable(
            f"says that it did other work than can be {who}",
            got=f"steps = {steps:g}, examples = {examples:g}",
            expected=f"whole numbers, 1 <= steps <= examples <= {work[1]}",
            why="the settings of local training bound the work, and clients may be weighted by it",
            do="raise local.epochs (local.steps) where your function works more",
        )
    return numbers, (int(steps), int(examples))


def _check_finite(numbers: Mapping[str, float], who: str) -> None:
    """Refuse numbers that are not finite beside a model that is."""
    for name, number in numbers.items():
        if not np.isfinite(number):
            raise _unusable(
                f"returned a number that is not finite {who}",
                got=f"{name!r}: {number}",
                why="the model's parameters are finite",
                do="correct the number, or leave it out",
            )


def _unusable(fault: str, **facts: Any) -> TrainingError:  # noqa: ANN401 - as `FedkeelError`'s
    return TrainingError(f"Your own training {fault}.", **facts)
