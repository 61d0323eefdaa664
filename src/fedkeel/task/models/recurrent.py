"""A character LSTM that runs inside vmap."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedkeel.errors import ModelError
from fedkeel.task.models import checks


class LSTM(nn.Module):
    r"""One layer of long short-term memory, of plain operations.

    .. math::
        (i, f, g, o) = W_x x_t + W_h h_{t-1} + b, \quad
        c_t = \sigma(f) c_{t-1} + \sigma(i) \tanh g, \quad
        h_t = \sigma(o) \tanh c_t

    `torch.nn.LSTM` keeps a second list of its weights, and its kernel does not run inside vmap.
    The gates lie in `inputs` and `hidden` in the same order as in its ``weight_ih`` and
    ``weight_hh``, so that its weights can be copied.

    Args:
        inputs: size of x_t.
        hidden: size of h_t.
        biases: 1, or 2 as in `torch.nn.LSTM`, where b is a sum.
    """

    def __init__(self, inputs: int, hidden: int, biases: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(inputs, 4 * hidden)
        self.hidden = nn.Linear(hidden, 4 * hidden, bias=biases == 2)
        for p in self.parameters():
            nn.init.uniform_(p, -1.0 / math.sqrt(hidden), 1.0 / math.sqrt(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return h_1 ... h_T, [B, T, hidden], for x_1 ... x_T and h_0 = c_0 = 0."""
        h = c = x.new_zeros(x.shape[0], self.hidden.in_features)
        outputs = []
        for of_input in self.inputs(x).unbind(1):
            i, f, g, o = (of_input + self.hidden(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, dim=1)


class CharLSTM(nn.Module):
    """An embedding of characters, layers of LSTM, and a linear layer on the last state.

    For the arguments see `char_lstm`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int,
        biases: int,
    ) -> None:
        super().__init__()
        checks.input_size(shape)
        if len(shape) != 1:
            raise ModelError(
                "the network takes sequences of characters",
                got=f"inputs of shape {tuple(shape)}",
                expected="(number of characters,)",
            )
        if checks.positive_int("biases", biases) > 2:
            raise ModelError("`biases` must be 1 or 2", got=repr(biases))
        size = checks.positive_int("embedding", embedding)
        state = checks.positive_int("hidden", hidden)
        depth = checks.depth("layers", layers)
        self.embed = nn.Embedding(checks.positive_int("vocabulary", vocabulary), size)
        self.lstm = nn.Sequential(
            *(LSTM(size if i == 0 else state, state, biases) for i in range(depth))
        )
        self.fc = nn.Linear(state, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y] of the next character, for int64 characters [B, T]."""
        if x.is_floating_point():
            raise ModelError(
                "CharLSTM reads characters as whole numbers.",
                got=f"inputs of type {x.dtype}",
                do="in Python: fk.dataset(..., tokens=True), fk.from_clients(..., tokens=True), or "
                "fk.iid(..., tokens=True) and so on",
            )
        out: Tensor = self.fc(self.lstm(self.embed(x))[:, -1])
        return out


def char_lstm(
    shape: Sequence[int],
    classes: int,
    *,
    vocabulary: int | None = None,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    biases: int = 1,
) -> CharLSTM:
    """The character LSTM of FedAvg and LEAF for Shakespeare: two layers of 256.

    Source: McMahan et al., AISTATS 2017, section 3; Caldas et al., LEAF, 2018 (80 characters, the
    next one is predicted after 80).
    Layers: embed, lstm.0.inputs, lstm.0.hidden, lstm.1.inputs, lstm.1.hidden, fc. Parameters for 80
    characters: 817,872, and 819,920 with two biases as `torch.nn.LSTM` has; for 90, as in Reddi et
    al., ICLR 2021: 820,522.
    Initialisation: unstated in the papers; torch's own: embedding N(0, 1), layers of LSTM uniform
    in +- hidden^(-1/2).
    Cost: one small product for each character and layer, one after the other.
    Deviations: FedAvg states 866,578 parameters, which no number of characters gives. It predicts
    after every character of a line; as in LEAF, only the one after the last is predicted here.

    Args:
        shape: (number of characters of one input,). Inputs are whole numbers below `vocabulary`.
        classes: number of characters that may come next.
        vocabulary: number of characters that may be read; None has as many as `classes`.
        embedding: size of an embedded character.
        hidden: size of each layer's state.
        layers: number of layers.
        biases: bias vectors of each layer, 1 or 2.
    """
    return CharLSTM(
        shape,
        classes,
        vocabulary=classes if vocabulary is None else vocabulary,
        embedding=embedding,
        hidden=hidden,
        layers=layers,
        biases=biases,
    )
