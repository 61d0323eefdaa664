"""Writing a trained model for programs without fedkeel: ONNX, and `torch.export`.

What is written takes inputs [N, ...] before they are standardised, of a table in the order of its
``columns`` (a category is an input of 0 or 1), and returns what the module returns. Columns, names
of labels and the like stand in the file as texts: of ONNX as its metadata, of `torch.export` as the
extra file ``fedkeel.json``.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.data.read.scaling import Scale
from fedkeel.errors import ModelError
from fedkeel.predict.preparation import Preparation
from fedkeel.predict.trained_model import TrainedModel, metadata
from fedkeel.records.files import write_bytes
from fedkeel.user_code import one_line


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
        is_by_axis = len(scale.mean) == shape[0]
        view = (1, -1, *[1] * (len(shape) - 1)) if is_by_axis else (1, *shape)
        varies = scale.std != 0
        factor = torch.where(varies, 1 / torch.where(varies, scale.std, 1.0), 0.0)
        self.register_buffer("mean", scale.mean.reshape(view))
        self.register_buffer("factor", factor.reshape(view))

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401 - whatever the module returns
        """Return what the module returns for inputs [N, ...] before they are standardised."""
        ready = (x.double() - self.mean) * self.factor
        return self.module(ready.to(x.dtype))


def export(model: TrainedModel, path: Path) -> Path:
    """Write a model into a file.

    Args:
        model: the model.
        path: ends in ``.onnx``, or in ``.pt2``, which `torch.export.load` reads.

    Returns:
        The file.

    Raises:
        ModelError: the suffix is another one; the model has several inputs, or inputs that each
            client standardises by itself; it cannot be traced; or ONNX is not installed.
    """
    writers: dict[str, Callable[..., bytes]] = {".onnx": _onnx, ".pt2": _program}
    write = writers.get(path.suffix)
    if write is None:
        raise ModelError(
            f"Models are not written as {path.suffix or 'files without a suffix'!r}.",
            expected=".onnx, or .pt2 for torch.export.load",
        )
    module, example = _with_preparation(model.module, model.preparation)
    try:
        content = write(module, example, metadata(model))
    except ModelError:
        raise
    except Exception as error:  # whatever the user's module, or the exporter, does not support
        raise ModelError(
            f"The model cannot be written as {path.suffix}.",
            got=one_line(error),
            why="a file holds operations on tensors alone",
            do="see that the module has no branch on the values of its inputs",
        ) from error
    write_bytes(path, content)
    return path


def _with_preparation(module: nn.Module, preparation: Preparation) -> tuple[nn.Module, Tensor]:
    """Return a module that standardises its inputs, and an example of these."""
    if isinstance(preparation.shape, dict):
        raise ModelError(
            "A model of several inputs is not written.",
            got=", ".join(preparation.shape),
            do="take fedkeel.load(RUN).module, and export it yourself",
        )
    if preparation.client_scales:
        raise ModelError(
            "The inputs were standardised at each client by its own mean and deviation.",
            why="a file has one preparation",
            do="take fedkeel.load(RUN).module, and export it yourself",
        )
    is_tokens = any(isinstance(layer, nn.Embedding) for layer in module.modules())
    if is_tokens and preparation.scale is None:
        return module, torch.zeros(2, *preparation.shape, dtype=torch.int64)
    example = torch.zeros(2, *preparation.shape, dtype=preparation.dtype)
    if preparation.scale is None:
        return module, example
    return WithPreparation(module, preparation.scale, preparation.shape).eval(), example


def _program(module: nn.Module, example: Tensor, about: dict[str, str]) -> bytes:
    """Return the file of `torch.export`."""
    shapes = ({0: torch.export.Dim("examples")},)
    program = torch.export.export(module, (example,), dynamic_shapes=shapes)
    out = io.BytesIO()
    torch.export.save(program, out, extra_files={"fedkeel.json": json.dumps(about)})
    return out.getvalue()


def _onnx(module: nn.Module, example: Tensor, about: dict[str, str]) -> bytes:
    """Return the file of ONNX."""
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
    return content
