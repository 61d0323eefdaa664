"""A vision transformer that is small enough for small images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.errors import ModelError
from fedkeel.task.models import checks

EPS = 1e-6
"""Added to variances by layer normalisation, as in the paper's code."""

STD = 0.02
"""Deviation of initial weights."""


class Attention(nn.Module):
    """Softmax attention of all tokens to all, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim((-3, -2), (0, 2))
        scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        seen = torch.matmul(scores.softmax(dim=-1), v)  # [B, heads, T, width / heads]
        out: Tensor = self.proj(seen.transpose(1, 2).flatten(2))
        return out


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    `dropout` is the share dropped of what each of the two adds.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, width]."""
        x = x + self.drop(self.attention(self.norm1(x)))
        out: Tensor = x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return out


class VisionTransformer(nn.Module):
    """Patches as tokens, a class token, pre-norm encoder blocks, and a linear layer.

    For the arguments see `vit`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        channels, height, across = checks.image_shape(
            shape, min_side=checks.positive_int("patch", patch)
        )
        if height % patch or across % patch:
            raise ModelError(
                "the patches do not tile the images",
                got=f"patches of {patch} x {patch} on {height} x {across} pixels",
                do="set `patch` to a divisor of both sides",
            )
        if checks.positive_int("width", width) % checks.positive_int("heads", heads):
            raise ModelError(
                "`width` must be a multiple of `heads`", got=f"width {width} and {heads} heads"
            )
        tokens = 1 + (height // patch) * (across // patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, tokens, width))
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.drop = nn.Dropout(checks.dropout_rate("dropout", dropout))
        self.blocks = nn.Sequential(
            *(EncoderBlock(width, heads, dropout) for _ in range(checks.depth("depth", depth)))
        )
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.class_token, std=STD)
        nn.init.trunc_normal_(self.positions, std=STD)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=STD)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = self.patches(x).flatten(2).transpose(1, 2)  # [B, T - 1, width]
        first = self.class_token.expand(x.shape[0], -1, -1)
        x = self.drop(torch.cat([first, x], dim=1) + self.positions)
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


def vit(
    shape: Sequence[int],
    classes: int,
    *,
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    dropout: float = 0.0,
) -> VisionTransformer:
    """A vision transformer; by default half as deep as DeiT-Tiny, on patches of 4 x 4 pixels.

    Source: Dosovitskiy et al., ICLR 2021, section 3.1 (layout); Touvron et al., ICML 2021 (width
    and heads of the tiny one, initialisation).
    Layers: class_token, positions, patches, blocks.0 ..., norm, head. Parameters on 3 x 32 x 32:
    2,693,578 for 10 classes. Smallest image: one patch; sides are multiples of `patch`.
    Initialisation: linear layers, class token and positions N(0, 0.02^2) cut at 2, their biases 0;
    1 and 0 for normalisation; torch's own for `patches`.
    Deviations: FedReg fine-tunes a pretrained ViT-B/32 on 384 x 384 pixels, which is `patch` = 32,
    `width` = 768, `depth` = 12, `heads` = 12; no pretrained weights come with this one.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        patch: height and width of a patch, a divisor of both sides of the image.
        width: size of a token, a multiple of `heads`; the hidden layers are four times as wide.
        depth: number of encoder blocks.
        heads: number of attention heads.
        dropout: share dropped of the embedded patches and of what each half of a block adds.
    """
    return VisionTransformer(
        shape, classes, patch=patch, width=width, depth=depth, heads=heads, dropout=dropout
    )
