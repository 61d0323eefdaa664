"""Writing a trained model for programs without fedkeel: ONNX, and `torch.export`.

What is written takes inputs [N, ...] before they are standardised, of a table in the order of its
``columns`` (a category is an input of 0 or 1), and returns what the module returns. Columns, names
of labels and the like stand in the file as texts: of ONNX as its metadata, of `torch.export` as the
extra file ``fedkeel.json``.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel.base.user_code import one_line
from fedkeel.data.read.scaling import Scale, spread
from fedkeel.errors import ModelError, counted
from fedkeel.records.files import write_bytes
from fedkeel.task.outputs import tensors_in
from fedkeel.task.predict.preparation import InputPreparation
from fedkeel.task.predict.trained_model import TrainedModel, metadata

_Answers = Callable[[Tensor], Sequence[Tensor]]
"""Inputs [N, ...] -> what a file answers."""

_REGISTRATION = "torch.onnx._internal.exporter._registration"
"""The logger that names each operator of torchvision where that is not installed."""

_OTHERWISE = 1e-3
"""Difference of answers, as a share of the largest one and of 1, from which they are others."""


class _CannotTryError(Exception):
    """The file cannot be run here."""


class WithPreparation(nn.Module):
    """A module that standardises its inputs first.

    Args:
        module: the trained module.
        scale: mean and deviation of the training inputs.
        shape: shape of one input.
    """

    mean: Tensor
    factor: Tensor

    def __init__(self, module: nn.Module, scale: Scale, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.module = module
        varies = scale.std != 0
        factor = torch.where(varies, 1 / torch.where(varies, scale.std, 1.0), 0.0)
        self.register_buffer("mean", spread(scale.mean, shape)[None])
        self.register_buffer("factor", spread(factor, shape)[None])

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401 - whatever the module returns
        """Return what the module returns for inputs [N, ...] before they are standardised."""
        ready = (x.double() - self.mean) * self.factor
        return self.module(ready.to(x.dtype))


class OfOneInput(nn.Module):
    """A module that is called with one input: `torch.export` has to know how many there are.

    Args:
        module: the trained module, whose ``forward`` may take any number, as that of `peft` does.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401 - whatever the module returns
        """Return what the module returns."""
        return self.module(x)


def export(model: TrainedModel, path: Path) -> Path:
    """Write a model into a file.

    Args:
        model: the model.
        path: ends in ``.onnx``, or in ``.pt2``, which `torch.export.load` reads.

    Returns:
        The file.

    Raises:
        ModelError: the suffix is another one; the model has several inputs, or inputs that each
            client standardises by itself; it cannot be traced; the file answers otherwise than the
            model; or ONNX is not installed.
    """
    writers: dict[str, Callable[..., tuple[bytes, _Answers]]] = {".onnx": _onnx, ".pt2": _program}
    write = writers.get(path.suffix)
    if write is None:
        raise ModelError(
            f"Models are not written as {path.suffix or 'files without a suffix'!r}.",
            expected=".onnx, or .pt2 for torch.export.load",
        )
    module, example = _with_preparation(model.module, model.preparation)
    try:
        with _without_noise():
            content, answers = write(module, example, metadata(model))
        _check_answers(module, answers, _inputs_like(example, model.preparation, module), path)
    except ModelError:
        raise
    except Exception as error:  # whatever the user's module, or the exporter, does not support
        raise ModelError(
            f"The model cannot be written as {path.suffix}.",
            got=one_line(error),
            why="a file holds only operations on tensors",
            do="see that the module has no branch on the values of its inputs",
        ) from error
    write_bytes(path, content)
    return path


@contextmanager
def _without_noise() -> Iterator[None]:
    """Keep warnings of the exporters to themselves: they are about packages that nobody asked for.

    What cannot be written is an error, and `_check_answers` finds what is written wrongly.
    """
    loggers = [logging.getLogger(name) for name in (_REGISTRATION, "torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _with_preparation(module: nn.Module, preparation: InputPreparation) -> tuple[nn.Module, Tensor]:
    """Return a module that standardises its inputs, and an example of these."""
    if isinstance(preparation.shape, dict):
        raise ModelError(
            "A model of several inputs is not written.",
            got=", ".join(preparation.shape),
            do="take fedkeel.load(RUN).module, and export it yourself "
            "(docs/guides/hugging-face.md, The trained model on new text)",
        )
    if preparation.client_scales or preparation.is_scaled_on_nodes:
        raise ModelError(
            "The inputs were standardised at each client by its own mean and deviation.",
            why="a file has one preparation",
            do="take fedkeel.load(RUN).module, and export it yourself",
        )
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        module = OfOneInput(module).eval()
    if _takes_whole_numbers(module, preparation):
        return module, torch.zeros(2, *preparation.shape, dtype=torch.int64)
    example = torch.zeros(2, *preparation.shape, dtype=preparation.dtype)
    if preparation.scale is None:
        return module, example
    return WithPreparation(module, preparation.scale, preparation.shape).eval(), example


def _takes_whole_numbers(module: nn.Module, preparation: InputPreparation) -> bool:
    """Return whether the inputs that were trained on are whole numbers, such as tokens."""
    if preparation.whole:
        return preparation.whole[""]
    is_likely = preparation.scale is None and any(
        isinstance(layer, nn.Embedding) for layer in module.modules()
    )
    if is_likely:
        warnings.warn(
            "the run does not say of what type its inputs were, and its model has an embedding: "
            "the file asks for whole numbers (int64). Train again where they were other numbers",
            stacklevel=4,
        )
    return is_likely


def _inputs_like(example: Tensor, preparation: InputPreparation, module: nn.Module) -> list[Tensor]:
    """Return inputs [3, ...] like those of the training, before they are standardised."""
    shape, random = (3, *example.shape[1:]), torch.Generator().manual_seed(0)
    if not example.is_floating_point():
        known = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
        return [torch.randint(0, min(known, default=2), shape, generator=random)]
    noise = torch.randn(shape, generator=random, dtype=torch.float64)
    if preparation.scale is not None:
        mean, std = preparation.scale.mean, preparation.scale.std
        noise = spread(mean, shape[1:]) + spread(std, shape[1:]) * noise
    like_indices = torch.randint(0, 2, shape, generator=random)  # a column may be one
    return [noise.to(example.dtype), like_indices.to(example.dtype)]


def _check_answers(
    module: nn.Module, answers: _Answers, inputs: Sequence[Tensor], path: Path
) -> None:
    """Refuse a file that answers otherwise than the model, and warn where no input can be tried.

    Inputs that the model itself cannot take, such as no index of one of its tables, are left out.
    """
    reasons = []
    for x in inputs:
        try:
            expected = tensors_in(module(x))
        except Exception as error:  # a user's module may raise anything
            reasons.append(f"the model fails on an input that was made up: {one_line(error)}")
            continue
        try:
            results = answers(x)
        except _CannotTryError as error:
            reasons.append(str(error))
            continue
        if difference := _difference(results, expected):
            raise ModelError(
                f"The {path.suffix} file would answer otherwise than the model.",
                got=difference,
                why="what depends on the values of inputs was fixed when the file was made",
                do="see that the module has no branch on the values of its inputs",
            )
    if len(reasons) == len(inputs):
        warnings.warn(
            f"whether {path.name} answers as the model does is not known: {reasons[0]}",
            stacklevel=4,
        )


def _difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return in words how results differ from what the model answers, "" where they do not."""
    if len(results) != len(expected):
        return f"{counted(len(results), 'output')}, and {len(expected)} of the model"
    for result, answer in zip(results, expected, strict=True):
        if result.shape != answer.shape:
            return f"the shape {list(result.shape)}, and {list(answer.shape)} of the model"
        result, answer = result.double(), answer.double()
        size = answer[answer.isfinite()].abs().max().item() if answer.isfinite().any() else 0.0
        same = torch.isclose(result, answer, 0.0, _OTHERWISE * max(1.0, size), equal_nan=True)
        if not same.all():
            apart = (result - answer)[~same].abs().max().item()
            return f"answers that differ by {apart:.3g}"
    return ""


def _program(module: nn.Module, example: Tensor, about: dict[str, str]) -> tuple[bytes, _Answers]:
    """Return the file of `torch.export`, and what it answers."""
    shapes = ({0: torch.export.Dim("examples")},)
    program = torch.export.export(module, (example,), dynamic_shapes=shapes)
    out = io.BytesIO()
    torch.export.save(program, out, extra_files={"fedkeel.json": json.dumps(about)})
    read = torch.export.load(io.BytesIO(out.getvalue())).module()
    return out.getvalue(), lambda x: tensors_in(read(x))


def _onnx(module: nn.Module, example: Tensor, about: dict[str, str]) -> tuple[bytes, _Answers]:
    """Return the file of ONNX, and what it answers."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise ModelError(
            "Writing ONNX needs the packages onnx and onnxscript, which are not installed.",
            do="pip install 'fedkeel[onnx]'; or write a .pt2 file",
        )
    shapes = ({0: torch.export.Dim("examples")},)
    program = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=["inputs"],
        output_names=["scores"],
        verbose=False,
    )
    if program is None:
        raise ModelError("The model cannot be written as ONNX.")
    proto = program.model_proto
    for key, value in about.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    content: bytes = proto.SerializeToString()

    def answers(x: Tensor) -> list[Tensor]:
        from onnx.reference import ReferenceEvaluator

        try:
            numbers = ReferenceEvaluator(proto).run(None, {"inputs": x.numpy()})
        except Exception as error:  # it does not know all operations of all exporters
            raise _CannotTryError(f"it cannot be run here: {one_line(error)}") from error
        return [torch.from_numpy(np.asarray(values)) for values in numbers]

    return content, answers
