"""A module as a pure function of its parameters, with the loss it is trained on.

Nothing here steps a parameter. The client loop asks a `Network` for gradients at whatever point it
likes; the network holds no state that a call could change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedkeel.errors import ModelError
from fedkeel.matmul import linear_layers
from fedkeel.task.batch_norm import RealExamples
from fedkeel.task.functional import Functional
from fedkeel.task.losses import Loss, cross_entropy, picked_cross_entropy
from fedkeel.task.model_description import in_words
from fedkeel.task.parameter_names import under
from fedkeel.task.traits import Traits, detect_traits
from fedkeel.tree import Tree, clone

Autograd = Literal["eager", "functional"]
"""How gradients are taken: by the tape, which is faster for one client, or by torch.func, which can
stand inside vmap. Both differentiate the same function."""


@dataclass(frozen=True)
class Batch:
    """Examples of one step.

    Args:
        x: [B, ...] inputs.
        y: [B] labels, or [B, Y] class probabilities.
        weight: [B] 1 for a real example and 0 for padding; None where all are real.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    def real(self, dtype: torch.dtype) -> Tensor:
        """Return [B] 1 for a real example and 0 for padding."""
        return self.x.new_ones(len(self.x), dtype=dtype) if self.weight is None else self.weight

    def part(self, rows: slice) -> Batch:
        """Return some of the examples."""
        return Batch(self.x[rows], self.y[rows], None if self.weight is None else self.weight[rows])


@dataclass(frozen=True)
class Output:
    """What the network makes of a batch.

    Args:
        logits: [B, Y] scores.
        features: [B, F] inputs of the classifier, flattened; as many as the module has one for.
    """

    logits: Tensor
    features: Tensor | None = None


def _in_order(own: Tensor) -> Tensor:
    """Return a copy that lies row after row, as one that has been sent or saved."""
    return own.detach().clone(memory_format=torch.contiguous_format)


Objective = Callable[[Output, Tree], Tensor]
"""(output, parameters) -> what is minimised, []."""


class Network:
    """A module as a function of named parameters and buffers.

    Args:
        module: the user's module, with its initial parameters; it is copied, never changed.
        head: name of the classifier sub-module, "" where the module has none.
        loss: the task's loss.
        dtype: type of the parameters.
        batch_statistics: whether batch normalisation uses the batch at hand in evaluation too:
            where clients keep their statistics, the server has none.
    """

    def __init__(
        self,
        module: nn.Module,
        head: str = "",
        loss: Loss = cross_entropy,
        dtype: torch.dtype = torch.float32,
        batch_statistics: bool = False,
    ) -> None:
        self._train = copy.deepcopy(module).to(dtype).train()
        for layer in self._train.modules():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
                layer.sparse = False  # gradients of the same numbers, which every part can take
        self._eval = copy.deepcopy(self._train).eval()
        if batch_statistics:
            for layer in self._eval.modules():
                if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                    layer.train()
        self.channels_last = False
        self.traits = Traits()
        self._functions = self._made()
        self.head = head
        self._loss = loss
        self.dtype = dtype
        self.names: tuple[str, ...] = tuple(
            name for name, p in self._train.named_parameters() if p.requires_grad
        )
        every = dict(self._train.named_parameters())
        self.params: Tree = {name: _in_order(every[name]) for name in self.names}
        self.buffers: Tree = {n: _in_order(b) for n, b in self._train.named_buffers()}
        self._words = in_words(self._train, head, loss, self.names)  # before any call changes it

    def on(self, device: torch.device) -> Network:
        """Return the network on a device; itself where it is there."""
        if all(t.device == device for t in self.initial_state().values()):
            return self
        twin = copy.copy(self)
        twin.channels_last = self.channels_last and device.type == "cpu"
        twin._train = copy.deepcopy(self._train).to(device)
        twin._eval = copy.deepcopy(self._eval).to(device)
        twin._functions = twin._made()
        twin.params = {k: t.to(device) for k, t in self.params.items()}
        twin.buffers = {k: t.to(device) for k, t in self.buffers.items()}
        return twin

    def _made(self) -> dict[bool, Functional]:
        """Return the module as functions, in training and in evaluation."""
        own = self.traits.bypasses_modules
        return {True: Functional(self._train, own), False: Functional(self._eval, own)}

    @property
    def frozen(self) -> Tree:
        """Parameters that are not trained, by name."""
        every = self._train.named_parameters()
        return {n: p.detach() for n, p in every if not p.requires_grad}

    def initial_state(self) -> Tree:
        """Return every parameter and buffer of the initial module, frozen ones too."""
        return {k: v.detach() for k, v in self._train.state_dict(keep_vars=True).items()}

    def state_dict(self, params: Tree, buffers: Tree) -> Tree:
        """Return the module's state dict with these parameters and buffers.

        Frozen parameters are as they were. A tensor that has several names is there under each.
        """
        first = {id(p): name for name, p in self._train.named_parameters()}
        out: Tree = {}
        for name, own in self._train.state_dict(keep_vars=True).items():
            given = params.get(first.get(id(own), name), buffers.get(name))
            out[name] = (own if given is None else given).detach().to("cpu", copy=True)
        return out

    def describe(self) -> str:
        """Return all that decides what the network computes, but its numbers, in words.

        That is the structure of the module, which of its parameters are trained, its head and its
        loss; and of modules that are not torch's own, how they are written, and their attributes.
        All is told as it was when the network was made.
        """
        return self._words

    @property
    def mixes_examples(self) -> bool:
        """Whether the examples of a batch see each other in training, by batch normalisation."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._train.modules())

    @property
    def uses_cross_entropy(self) -> bool:
        """Whether its loss makes probabilities of what the module returns."""
        return self._loss is cross_entropy

    @property
    def batch_statistics(self) -> bool:
        """Whether batch normalisation uses the batch at hand in evaluation too."""
        norms = (m for m in self._eval.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        return any(norm.training or norm.running_mean is None for norm in norms)

    @property
    def has_cpu_convolutions(self) -> bool:
        """Whether it convolves images on a processor, in full and not channel by channel."""
        on_cpu = any(p.ndim == 4 and p.device.type == "cpu" for p in self.params.values())
        return on_cpu and not any(
            isinstance(m, nn.GroupNorm) or (isinstance(m, nn.Conv2d) and m.groups > 1)
            for m in self._eval.modules()
        )

    @property
    def head_names(self) -> frozenset[str]:
        """Names of the parameters that belong to the classifier."""
        if not self.head:
            return frozenset()
        return frozenset(n for n in self.names if under(n, self.head))

    def logits(
        self,
        params: Tree,
        buffers: Tree,
        x: Tensor,
        train: bool = True,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return [B, Y]. In training, batch normalisation updates the given `buffers` in place.

        It sees real examples alone, of `weight` [B] 1; all where there is None. What a module
        writes to its parameters lasts where their gradient is taken, and only there.
        """
        if self.traits.writes_parameters:
            params = {
                k: v if v.is_leaf and v.requires_grad else v.clone() for k, v in params.items()
            }
        function, x = self._functions[train], x.clone() if self.traits.writes_inputs else x
        if weight is None or not self.mixes_examples:
            return function(params, buffers, x)
        with RealExamples(weight):
            return function(params, buffers, x)

    def test_logits(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        """Return [B, Y] outside training.

        Convolutions run with the channels last where `choose_memory_format` has found that the
        module can do so: on a processor that takes half the time.
        """
        if self.channels_last:
            last = torch.channels_last
            params = {
                k: v.contiguous(memory_format=last) if v.ndim == 4 else v for k, v in params.items()
            }
        with linear_layers():
            return self.logits(params, self.copy_buffers(buffers), x, train=False)

    def for_tracing(self) -> Network:
        """Return the network with a loss of few operations: a recording makes them one by one."""
        other = copy.copy(self)
        if self.uses_cross_entropy:
            other._loss = picked_cross_entropy
        return other

    def detect_traits(self, x: Tensor) -> None:
        """Find out what the module does in a forward pass, beside returning scores.

        Args:
            x: [B, ...] a few inputs.

        Raises:
            ModelError: gradients by given parameters are not those by the module's own.
        """
        self.traits = detect_traits(self._train, self.params, self.buffers, x)
        self._functions = self._made()

    def choose_memory_format(self, x: Tensor) -> None:
        """Find out whether convolutions may lie with the channels last; a `view` may forbid it."""
        self.channels_last = False
        if not (self.has_cpu_convolutions and self.dtype == torch.float32):
            return
        with torch.no_grad():
            usual = self.test_logits(self.params, self.buffers, x)
            self.channels_last = True
            try:
                turned = self.test_logits(self.params, self.buffers, x)
                self.channels_last = torch.allclose(usual, turned, rtol=1e-3, atol=1e-5)
            except RuntimeError:
                self.channels_last = False

    def output(self, params: Tree, buffers: Tree, batch: Batch, train: bool = True) -> Output:
        """Return scores and features of a batch, as `logits`; without a head no features.

        Raises:
            ModelError: the head is not called, or called more than once.
        """
        given = params, buffers, batch.x, train, batch.weight
        if not self.head:
            return Output(self.logits(*given))
        head = (self._train if train else self._eval).get_submodule(self.head)
        caught: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, given: caught.append(given[0]))
        try:
            logits = self.logits(*given)
        finally:
            handle.remove()
        if len(caught) != 1:
            raise ModelError(
                f"The head {self.head!r} is called {len(caught)} times in a forward pass.",
                expected="once: its input is what the method calls features",
                do="name another head",
            )
        return Output(logits, caught[0].flatten(1))

    def example_losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example, [B]; a loss that is a mean is repeated."""
        losses = self._loss(logits, y)
        return losses.expand(len(logits)) if losses.ndim == 0 else losses

    def task_losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the task's losses, [B], or their mean, []."""
        return self._loss(logits, y)

    def loss(self, params: Tree, buffers: Tree, batch: Batch, train: bool = True) -> Tensor:
        """Return the mean task loss of a batch over its real examples, []."""
        logits = self.logits(params, buffers, batch.x, train, batch.weight)
        return batch_mean(self._loss(logits, batch.y), batch)

    def value_and_grad(
        self,
        params: Tree,
        buffers: Tree,
        batch: Batch,
        autograd: Autograd,
        objective: Objective | None = None,
    ) -> tuple[Tensor, Tree]:
        """Return the mean task loss [], and the gradient of the objective by the parameters.

        As in `logits`, batch normalisation updates the given `buffers` in place.

        Args:
            params: where.
            buffers: the buffers that the forward pass sees and updates.
            batch: the examples.
            autograd: how.
            objective: what is minimised; None is the task loss.
        """
        if autograd == "functional":

            def aim_of(p: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
                own = clone(buffers)  # what torch.func differentiates may not change what it found
                aim, value = self._aim(p, own, batch, objective)
                return aim, (value, own)

            grads, (value, own) = torch.func.grad(aim_of, has_aux=True)(params)
            for name, buffer in buffers.items():
                buffer.copy_(own[name])
            return value, grads
        leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
        own = self.copy_buffers(buffers)  # the objective sees them as they were before the step
        with torch.enable_grad():
            aim, value = self._aim(leaves, own, batch, objective)
        for name, buffer in buffers.items():
            buffer.copy_(own[name])
        found = torch.autograd.grad(aim, list(leaves.values()), allow_unused=True)
        if self.traits.writes_parameters:
            for name, leaf in leaves.items():  # which may have been given other memory
                params[name].copy_(leaf.detach())
        grads = {
            k: torch.zeros_like(v) if g is None else g
            for (k, v), g in zip(params.items(), found, strict=True)
        }
        return value.detach(), grads

    def _aim(
        self, params: Tree, buffers: Tree, batch: Batch, objective: Objective | None
    ) -> tuple[Tensor, Tensor]:
        """Return what is minimised, and the mean task loss: each []."""
        if objective is None:
            loss = self.loss(params, buffers, batch)
            return loss, loss
        output = self.output(params, buffers, batch)
        value = batch_mean(self._loss(output.logits.detach(), batch.y), batch)
        return objective(output, params), value

    def input_grad(self, params: Tree, buffers: Tree, batch: Batch, autograd: Autograd) -> Tensor:
        """Return the gradient of the mean loss with respect to the inputs, [B, ...].

        The network is in evaluation mode, as when data are made from it.
        """
        if autograd == "functional":

            def loss_of(x: Tensor) -> Tensor:
                return self.loss(params, buffers, Batch(x, batch.y, batch.weight), train=False)

            grad: Tensor = torch.func.grad(loss_of)(batch.x)
            return grad
        x = batch.x.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.loss(params, buffers, Batch(x, batch.y, batch.weight), train=False)
        return torch.autograd.grad(loss, x)[0]

    def copy_buffers(self, buffers: Tree) -> Tree:
        """Return buffers that a forward pass may change without trace."""
        return clone(buffers) if buffers else buffers


def batch_mean(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of a value for each example, [B], over the real ones; [] as it stands.

    Raises:
        ModelError: some examples are padding, and there is one value for all.
    """
    if batch.weight is None:
        return values.mean() if values.ndim else values
    if values.ndim == 0:
        raise ModelError(
            "The loss is a mean over the batch, which cannot leave out padded examples.",
            expected="one loss for each example, [B]",
            do="return the losses before their mean, e.g. with reduction='none'",
        )
    return (values * batch.weight).sum() / batch.weight.sum()
