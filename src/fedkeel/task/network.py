"""A module as a pure function of its parameters, with the loss it is trained on.

Nothing here steps a parameter. The client loop asks a `Network` for gradients at any point; a call
changes no state of the network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedkeel.base.dispatch import grad
from fedkeel.base.matmul import linear_layers
from fedkeel.base.values import (
    Values,
    copy_of,
    count_of,
    only_tensor,
)
from fedkeel.errors import ModelError
from fedkeel.task.adapters import Adapter, adapters_of
from fedkeel.task.batch import Batch, Output, batch_mean
from fedkeel.task.batch_norm import RealExamples
from fedkeel.task.functional import Functional
from fedkeel.task.losses import SOFT_TARGETS, Loss, cross_entropy, picked_cross_entropy
from fedkeel.task.model_description import describe_model
from fedkeel.task.outputs import Outputs, map_output, scores_of, tensors_in
from fedkeel.task.parameter_names import ParameterLayout, blocks_by_module, under
from fedkeel.task.traits import ModuleTraits, detect_traits
from fedkeel.tree import Tree, clone

Autograd = Literal["eager", "functional"]
"""How gradients are taken: by `torch.autograd`, which is faster for one client, or by `torch.func`,
which works inside vmap. Both differentiate the same function."""


def _contiguous_copy(tensor: Tensor) -> Tensor:
    """Return a copy in the memory layout of a tensor that has been sent or saved."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


ObjectiveFunction = Callable[[Output, Tree], Tensor]
"""(output, parameters) -> what is minimised, []."""


def with_same_frozen(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its frozen parameters, which may be large."""
    frozen = (p for p in module.parameters() if not p.requires_grad)
    return copy.deepcopy(module, {id(p): p for p in frozen})


class Network:
    """A module as a function of named parameters and buffers.

    Args:
        module: the user's module, with its initial parameters; it is copied, never changed.
        head: name of the classifier sub-module, "" where the module has none.
        loss: the task's loss.
        dtype: type of the parameters.
        batch_statistics: whether batch normalisation uses the batch at hand in evaluation too:
            where clients keep their statistics, the server has none.

    `has_mean_loss` tells whether the loss is one number for the batch, [], so that an evaluation
    has to keep all outputs, and not one number for each example, [B]. `scores_shape` is the shape
    of the scores of one example, and `scores_classes` tells whether they are one for each class of
    one label, [Y]. `weighs_examples` tells whether the loss is one number for the batch that is not
    the mean of those of its examples, as with class weights. `mixed`, which may be set,
    tells whether the module computes in bfloat16 where `torch.autocast` holds that to be safe; what
    it returns is of the parameters' type nevertheless.
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
                layer.sparse = False  # dense gradients of the same numbers, which all parts accept
        self._eval = with_same_frozen(self._train).eval()
        if batch_statistics:
            for layer in self._eval.modules():
                if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                    layer.train()
        self.channels_last = False
        self.mixed = False
        self.traits = ModuleTraits()
        self._functions = self._make_functions()
        self.head = head
        self._loss = loss
        self.has_mean_loss = False
        self.scores_shape: tuple[int, ...] = ()
        self.scores_classes = False
        self.weighs_examples = False
        self.dtype = dtype
        trained = {n: p for n, p in self._train.named_parameters() if p.requires_grad}
        self.names: tuple[str, ...] = tuple(trained)
        self.params: Tree = {n: _contiguous_copy(p) for n, p in trained.items()}
        self.buffers: Tree = {n: _contiguous_copy(b) for n, b in self._train.named_buffers()}
        # Taken here, before a call changes anything.
        self._description = describe_model(self._train, head, loss, self.names)

    def on(self, device: torch.device) -> Network:
        """Return the network on a device; itself where it is there already."""
        if all(t.device == device for t in self.initial_state().values()):
            return self
        twin = copy.copy(self)
        twin.channels_last = self.channels_last and device.type == "cpu"
        twin._train = copy.deepcopy(self._train).to(device)
        twin._eval = with_same_frozen(twin._train)
        for layer, its_twin in zip(self._eval.modules(), twin._eval.modules(), strict=True):
            its_twin.training = layer.training
        twin._functions = twin._make_functions()
        twin.params = {k: t.to(device) for k, t in self.params.items()}
        twin.buffers = {k: t.to(device) for k, t in self.buffers.items()}
        return twin

    def module(self, params: Tree, buffers: Tree) -> nn.Module:
        """Return a module of the user's class with copies of these tensors, in training mode.

        Its frozen parameters are its own, and have the memory of the network's.
        """
        frozen = (p for p in self._train.parameters() if not p.requires_grad)
        shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in frozen}
        module = copy.deepcopy(self._train, shared)
        values, places = {**buffers, **params}, {**dict(module.named_buffers())}
        places |= dict(module.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                places[name].copy_(value)
        return module

    def with_running_statistics(self) -> Network:
        """Return the network whose batch normalisation uses its buffers in evaluation."""
        if not any(layer.training for layer in self._eval.modules()):
            return self
        twin = copy.copy(self)
        twin._eval = with_same_frozen(self._train).eval()
        twin._functions = twin._make_functions()
        return twin

    def _make_functions(self) -> dict[bool, Functional]:
        """Return the module as a function by whether it is in training mode."""
        copied = self.traits.bypasses_modules
        return {True: Functional(self._train, copied), False: Functional(self._eval, copied)}

    @property
    def frozen(self) -> Tree:
        """Parameters that are not trained, and buffers that are constants, by name."""
        every = self._train.named_parameters()
        parameters = {n: p.detach() for n, p in every if not p.requires_grad}
        constants = {n: b for n, b in self._train.named_buffers() if n not in self.buffers}
        return {**parameters, **constants}

    def leave_out_constants(self, x: Values) -> None:
        """Take constants out of `buffers`, so that they are neither sent nor kept.

        These are buffers that the module does not save (``persistent=False``) and does not change,
        such as the positions of a transformer: every copy of the module has them.

        Args:
            x: [B, ...] a few inputs.
        """
        names = self.buffers.keys() - self._train.state_dict(keep_vars=True).keys()
        try:
            for train in (True, False) if names else ():
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    buffers = clone(self.buffers)
                    self.forward(self.params, buffers, x, train)
                names = {name for name in names if torch.equal(buffers[name], self.buffers[name])}
        except Exception:  # of the user's module, which is called again where the user sees it
            return
        self.buffers = {name: b for name, b in self.buffers.items() if name not in names}

    def initial_state(self) -> Tree:
        """Return every parameter and buffer of the initial module, frozen ones too."""
        return {k: v.detach() for k, v in self._train.state_dict(keep_vars=True).items()}

    def state_dict(self, params: Tree, buffers: Tree) -> Tree:
        """Return the module's state dict with copies of these parameters and buffers.

        Frozen parameters have their initial values, and are not copied. A tensor with several names
        has an entry for each.
        """
        return self.whole_state(self.changed_state(params, buffers))

    def changed_state(self, params: Tree, buffers: Tree) -> Tree:
        """Return the entries of the state dict that these parameters and buffers have, as copies.

        A large frozen base is not among them.
        """
        first_name = {id(p): name for name, p in self._train.named_parameters()}
        state: Tree = {}
        for name, initial in self._train.state_dict(keep_vars=True).items():
            tensor = params.get(first_name.get(id(initial), name), buffers.get(name))
            if tensor is not None:
                state[name] = tensor.detach().to("cpu", copy=True)
        return state

    def whole_state(self, changed: Tree) -> Tree:
        """Return the state dict with some of its entries; all others are the network's own."""
        return {
            name: changed[name] if name in changed else initial.to("cpu")
            for name, initial in self.initial_state().items()
        }

    def describe(self) -> str:
        """Return a text of all that decides what the network computes, except its numbers.

        That is the structure of the module, the names of trained parameters, the head and the
        loss; and of modules that are not torch's own, digests of their source and their attributes.
        It describes the network as it was made.
        """
        return self._description.text

    @property
    def unseen(self) -> tuple[str, ...]:
        """Where values are, in the module and the loss, that `describe` could not read in full."""
        return self._description.unseen

    @property
    def mixes_examples(self) -> bool:
        """Whether the examples of a batch see each other in training, by batch normalisation."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._train.modules())

    @property
    def task_loss(self) -> Loss:
        """The task's loss."""
        return self._loss

    @property
    def soft_target(self) -> Callable[[Tensor], Tensor] | None:
        """What makes of the scores a target that the loss takes; None where nothing does.

        A loss of the user's own takes class probabilities where there are classes.
        """
        if self._loss in SOFT_TARGETS:
            return SOFT_TARGETS[self._loss]
        return SOFT_TARGETS[cross_entropy] if self.scores_classes else None

    @property
    def uses_cross_entropy(self) -> bool:
        """Whether the loss is fedkeel's cross-entropy, which makes probabilities of scores."""
        return self._loss is cross_entropy

    @property
    def batch_statistics(self) -> bool:
        """Whether batch normalisation uses the batch at hand in evaluation too."""
        norms = (m for m in self._eval.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        return any(norm.training or norm.running_mean is None for norm in norms)

    @property
    def has_cpu_convolutions(self) -> bool:
        """Whether it has convolutions on a processor, and neither GroupNorm nor grouped ones."""
        on_cpu = any(p.ndim == 4 and p.device.type == "cpu" for p in self.params.values())
        return on_cpu and not any(
            isinstance(m, nn.GroupNorm) or (isinstance(m, nn.Conv2d) and m.groups > 1)
            for m in self._eval.modules()
        )

    @property
    def head_names(self) -> frozenset[str]:
        """Names of the parameters that belong to the classifier."""
        return self.layout.head

    @property
    def head_shape(self) -> tuple[int, int]:
        """Outputs and inputs of the classifier, (Y, F); (0, 0) where it has no linear layer."""
        head = self._train.get_submodule(self.head) if self.head else nn.Identity()
        linear = [m for m in head.modules() if isinstance(m, nn.Linear)]
        return (linear[-1].out_features, linear[0].in_features) if linear else (0, 0)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Low-rank adapters of matrices that are trained parameters, as their factors are."""
        every, trained = adapters_of(self._train), set(self.names)
        return tuple(one for one in every if {one.base, one.a, one.b} <= trained)

    @property
    def layout(self) -> ParameterLayout:
        """The trained parameters, and where they belong."""
        return ParameterLayout.of(self._train, self.head)

    def forward(
        self,
        params: Tree,
        buffers: Tree,
        x: Values,
        train: bool = True,
        weight: Tensor | None = None,
    ) -> Outputs:
        """Return what the module does. In training, batch normalisation updates `buffers` in place.

        It uses only the real examples, whose `weight` [B] is 1; all where `weight` is None. A
        module that writes to its parameters changes those whose gradient is taken, and no others.
        """
        if self.traits.writes_parameters:
            params = {
                k: v if v.is_leaf and v.requires_grad else v.clone() for k, v in params.items()
            }
        if self.traits.writes_inputs:
            x = copy_of(x)
        seen = nullcontext() if weight is None or not self.mixes_examples else RealExamples(weight)
        if not self.mixed:
            with seen:
                return self._functions[train](params, buffers, x)
        device = next(iter(params.values())).device.type
        # without the cache, which would keep what belongs to one trace for the next
        with seen, torch.autocast(device, torch.bfloat16, cache_enabled=False):
            out = self._functions[train](params, buffers, x)
        return map_output(self._widened, out)

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.dtype is torch.bfloat16 else tensor

    def logits(
        self,
        params: Tree,
        buffers: Tree,
        x: Values,
        train: bool = True,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return the scores, [B, Y] of a classifier; arguments as in `forward`."""
        return scores_of(self.forward(params, buffers, x, train, weight))

    def test_output(self, params: Tree, buffers: Tree, x: Values) -> Outputs:
        """Return what the module does outside training.

        Convolutions run with the channels last where `choose_memory_format` has found that the
        module can do so: on a processor that takes half the time.
        """
        if self.channels_last:
            last = torch.channels_last
            params = {
                k: v.contiguous(memory_format=last) if v.ndim == 4 else v for k, v in params.items()
            }
        with linear_layers():
            return self.forward(params, self.copy_buffers(buffers), x, train=False)

    def test_logits(self, params: Tree, buffers: Tree, x: Values) -> Tensor:
        """Return the scores outside training, see `test_output`."""
        return scores_of(self.test_output(params, buffers, x))

    def for_tracing(self) -> Network:
        """Return the network with a loss of fewer operations, which a trace runs one by one."""
        twin = copy.copy(self)
        if self.uses_cross_entropy:
            twin._loss = picked_cross_entropy
        return twin

    def detect_traits(self, x: Values) -> None:
        """Set `traits`, what the module does in a forward pass beside returning scores.

        Args:
            x: [B, ...] inputs, see `fedkeel.task.traits.detect_traits`.

        Raises:
            ModelError: gradients by given parameters are not those by the module's own.
        """
        self.traits = detect_traits(self._train, self.params, self.buffers, x)
        self._functions = self._make_functions()

    def choose_memory_format(self, x: Values) -> None:
        """Set `channels_last`, whether evaluation may use that memory format."""
        self.channels_last = False
        if not (self.has_cpu_convolutions and self.dtype == torch.float32):
            return
        with torch.no_grad():
            expected = self.test_logits(self.params, self.buffers, x)
            self.channels_last = True
            try:
                logits = self.test_logits(self.params, self.buffers, x)
                self.channels_last = torch.allclose(expected, logits, rtol=1e-3, atol=1e-5)
            except RuntimeError:  # a module that calls `view` does not accept this format
                self.channels_last = False

    def output(
        self,
        params: Tree,
        buffers: Tree,
        batch: Batch,
        train: bool = True,
        with_levels: bool = False,
    ) -> Output:
        """Return scores and features of a batch, as `logits`; without a head no features.

        Args:
            params: the parameters.
            buffers: the buffers, as in `forward`.
            batch: the examples.
            train: whether the module is in training mode.
            with_levels: whether the outputs of the blocks before the head are kept too.

        Raises:
            ModelError: the head is not called, or called more than once.
        """
        if not self.head:
            return Output.of(self.forward(params, buffers, batch.x, train, batch.weight))
        module = self._train if train else self._eval
        inputs: list[Tensor] = []
        levels: Tree = {}
        head = module.get_submodule(self.head)
        handles = [head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))]
        if with_levels:
            handles += self._keep_outputs(module, self.level_names, levels)
        try:
            returned = self.forward(params, buffers, batch.x, train, batch.weight)
        finally:
            for handle in handles:
                handle.remove()
        if len(inputs) != 1:
            raise ModelError(
                f"The head {self.head!r} is called {len(inputs)} times in a forward pass.",
                expected="once: the method takes its input as the features",
                do="name another head",
            )
        return Output.of(returned, self._widened(inputs[0]).flatten(1), levels)

    def layer_outputs(self, params: Tree, buffers: Tree, x: Values, names: Sequence[str]) -> Tree:
        """Return what sub-modules return outside training, [B, ...], at their last call, by name.

        One that is not called, or returns no tensor, is left out.
        """
        outputs: Tree = {}
        handles = self._keep_outputs(self._eval, names, outputs)
        try:
            self.test_output(params, buffers, x)
        finally:
            for handle in handles:
                handle.remove()
        return outputs

    def _keep_outputs(
        self, module: nn.Module, names: Sequence[str], outputs: Tree
    ) -> list[RemovableHandle]:
        """Let sub-modules write what they return into `outputs`, until the handles are removed."""

        def keep(name: str, returned: Outputs) -> None:
            if tensors_in(returned):
                outputs[name] = self._widened(scores_of(returned))

        return [
            module.get_submodule(name).register_forward_hook(
                lambda _, __, returned, name=name: keep(name, returned)
            )
            for name in names
        ]

    @cached_property
    def level_names(self) -> tuple[str, ...]:
        """Names of the blocks before the head that have a matrix or a filter, in order."""
        return tuple(
            block
            for block, names in blocks_by_module(self.names).items()
            if block
            and not under(self.head, block)
            and any(self.params[name].ndim > 1 for name in names)
        )

    def example_losses(self, output: Outputs, y: Values) -> Tensor:
        """Return the loss of each example, [B]; a loss that is a mean is repeated."""
        losses = self._loss(output, y)
        return losses.expand(count_of(y)) if losses.ndim == 0 else losses

    def task_losses(self, output: Outputs, y: Values) -> Tensor:
        """Return the task's losses, [B], or one number for the batch, []."""
        return self._loss(output, y)

    def loss(self, params: Tree, buffers: Tree, batch: Batch, train: bool = True) -> Tensor:
        """Return the mean task loss of a batch over its real examples, []."""
        output = self.forward(params, buffers, batch.x, train, batch.weight)
        return batch_mean(self._loss(output, batch.y), batch)

    def value_and_grad(
        self,
        params: Tree,
        buffers: Tree,
        batch: Batch,
        autograd: Autograd,
        objective: ObjectiveFunction | None = None,
        names: Collection[str] | None = None,
    ) -> tuple[Tensor, Tree]:
        """Return the mean task loss [], and the gradient of the objective by the parameters.

        As in `logits`, batch normalisation updates the given `buffers` in place.

        Args:
            params: the parameters at which the gradient is taken.
            buffers: the buffers that the forward pass sees and updates.
            batch: the examples.
            autograd: how the gradient is taken.
            objective: what is minimised; None is the task loss.
            names: of the parameters by which the gradient is taken; None takes it by all.
        """
        if names is None or self.traits.writes_parameters:  # that writes to those alone
            names = params.keys()
        if autograd == "functional":

            def value_at(p: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
                updated = clone(buffers)  # torch.func allows no change to a tensor from outside
                value, loss = self._values({**params, **p}, updated, batch, objective)
                return value, (loss, updated)

            chosen = {k: v for k, v in params.items() if k in names}
            grads, (loss, updated) = grad(value_at, has_aux=True)(chosen)
            for name, buffer in buffers.items():
                buffer.copy_(updated[name])
            return loss, grads
        leaves = {k: v.detach().requires_grad_() for k, v in params.items() if k in names}
        updated = self.copy_buffers(buffers)  # the objective sees them as before the step
        with torch.enable_grad():
            value, loss = self._values({**params, **leaves}, updated, batch, objective)
        for name, buffer in buffers.items():
            buffer.copy_(updated[name])
        if len(leaves) < len(params) and not value.requires_grad:  # it depends on the others alone
            gradients: Sequence[Tensor | None] = [None] * len(leaves)
        else:
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        if self.traits.writes_parameters:
            for name, leaf in leaves.items():  # the module may have replaced their memory
                params[name].copy_(leaf.detach())
        grads = {
            k: torch.zeros_like(v) if g is None else g
            for (k, v), g in zip(leaves.items(), gradients, strict=True)
        }
        return loss.detach(), grads

    def _values(
        self, params: Tree, buffers: Tree, batch: Batch, objective: ObjectiveFunction | None
    ) -> tuple[Tensor, Tensor]:
        """Return what is minimised, and the mean task loss: each []."""
        if objective is None:
            loss = self.loss(params, buffers, batch)
            return loss, loss
        output = self.output(params, buffers, batch, with_levels=True)
        detached = map_output(Tensor.detach, output.returned)
        loss = batch_mean(self._loss(detached, batch.y), batch)
        return objective(output, params), loss

    def input_grad(self, params: Tree, buffers: Tree, batch: Batch, autograd: Autograd) -> Tensor:
        """Return the gradient of the mean loss with respect to the inputs, [B, ...].

        The network is in evaluation mode.

        Raises:
            TypeError: the inputs are a mapping.
        """
        inputs = only_tensor(batch.x, "the gradient by the inputs")
        if autograd == "functional":

            def loss_of(x: Tensor) -> Tensor:
                return self.loss(params, buffers, Batch(x, batch.y, batch.weight), train=False)

            by_input: Tensor = grad(loss_of)(inputs)
            return by_input
        x = inputs.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.loss(params, buffers, Batch(x, batch.y, batch.weight), train=False)
        return torch.autograd.grad(loss, x)[0]

    def copy_buffers(self, buffers: Tree) -> Tree:
        """Return buffers that a forward pass may change without any effect."""
        return clone(buffers) if buffers else buffers
