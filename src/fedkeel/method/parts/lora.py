"""FFA-LoRA and RoLoRA: one factor of each adapter rests, so that means of adapters are exact.

Source
    Sun, Li, Li and Ding, Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024 (key
    sun2024ffalora), section 4. Chen et al., Robust Federated Finetuning of LLMs via Alternating
    Optimization of LoRA, 2025 (key chen2025rolora), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedkeel.base.lazy import torch
from fedkeel.method.context import Round
from fedkeel.method.part import Capability
from fedkeel.method.roles import Codec, Phases
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import State, Tree, leaf


@dataclass(frozen=True)
class FFALoRA(Phases, Codec):
    r"""Trains B of each adapter BA and leaves A as it was initialised.

    .. math:: \sum_k p_k (B_k A) = \Bigl(\sum_k p_k B_k\Bigr) A

    An adapter adds B A to a matrix of the network. The mean of products is then the product of the
    means, which it is not where both factors are trained. Other parameters are trained as ever.

    Source: sun2024ffalora, section 4.

    Args:
        frozen: what the names of parameters that rest contain. ``lora_A`` is peft's name of A,
            which it initialises at random, and B at 0.
    Sent: the update without the parameters that rest, so about half of an adapter's.
    State: none.
    Cost: less than FedAvg.
    Laws: where no name matches it is FedAvg. Parameters that rest keep their bits. On adapters of
        one layer the mean model is the mean of the clients' functions before the softmax.
    Deviations: A is part of the model that is sent down, though it never changes.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("ffalora").codec.frozen
        'lora_A'
    """

    frozen: str = "lora_A"

    name: ClassVar[str] = "ffalora"
    paper: ClassVar[str] = "sun2024ffalora"

    def phases(self, layout: ParameterLayout, personal: frozenset[str]) -> Sequence[frozenset[str]]:
        """Return one phase, which trains what does not rest."""
        return [frozenset(name for name in layout.names if self.frozen not in name)]

    def phase(self, step: int, steps: int, round: int) -> int:
        """Return 0."""
        return 0

    def encode(self, update: Tree, round: Round) -> State:
        """Return the update without what rests."""
        return {k: v for k, v in update.items() if self.frozen not in k}

    def decode(self, sent: State, like: Tree) -> Tree:
        """Return the update, 0 for what rests."""
        return {
            k: torch.zeros_like(v) if self.frozen in k else leaf(sent, k) for k, v in like.items()
        }


@dataclass(frozen=True)
class RoLoRA(Phases):
    r"""Trains B of each adapter BA in one round and A in the next.

    In the first round B is trained: it is initialised at 0, where A has no gradient. In each round
    the mean of products is the product of the means, as in `ffalora`, and both factors learn.

    Source: chen2025rolora, Algorithm 1.

    Args:
        first: what the names of parameters contain that are trained in rounds 1, 3, 5, ...;
            ``lora_B`` is peft's name of B.
        second: what the names contain of those that are trained in rounds 2, 4, 6, ...
    Sent: nothing beyond the model.
    State: none.
    Cost: as FedAvg.
    Laws: where no name matches it is FedAvg. The factor that rests keeps its bits at the clients.
        The first round is `ffalora`'s.
    Deviations: both factors are sent up, with 0 for the one that rests. Parameters outside of
        adapters, such as a classifier, are trained in every round. A server's momentum goes on
        moving a factor that rests.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("rolora").phases.phase(step=0, steps=5, round=3)
        1
    """

    first: str = "lora_B"
    second: str = "lora_A"

    name: ClassVar[str] = "rolora"
    paper: ClassVar[str] = "chen2025rolora"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.FRESH_UPDATES})

    def phases(self, layout: ParameterLayout, personal: frozenset[str]) -> Sequence[frozenset[str]]:
        """Return all but the second factor, and all but the first."""
        return [
            frozenset(name for name in layout.names if rests not in name)
            for rests in (self.second, self.first)
        ]

    def phase(self, step: int, steps: int, round: int) -> int:
        """Return 0 in the first round, 1 in the second, and so on in turn."""
        return round % 2
