"""Low-rank adapters beside a network's layers: these are trained and sent, all else is frozen.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, by `peft`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedkeel.base.optional import imported
from fedkeel.base.user_code import one_line
from fedkeel.config import Lora
from fedkeel.errors import ModelError
from fedkeel.task.adapters import adapters_of


class AdaptedBuilder:
    """Makes the network that `build` makes, with adapters.

    Args:
        build: makes the network.
        settings: the adapters.
    """

    def __init__(self, build: Callable[[], nn.Module], settings: Lora) -> None:
        self.build, self.settings = build, settings

    def __call__(self) -> nn.Module:
        """Return a new network.

        Raises:
            ConfigError: `peft` is not installed.
            ModelError: the network has none of the layers that are named.
        """
        peft, settings = imported("peft", "[model.lora]"), self.settings
        module = self.build()
        try:
            wanted = peft.LoraConfig(
                r=settings.rank,
                lora_alpha=2 * settings.rank if settings.alpha is None else settings.alpha,
                lora_dropout=settings.dropout,
                target_modules=list(settings.layers) or None,
                modules_to_save=list(settings.train) or None,
            )
            adapted: nn.Module = peft.get_peft_model(module, wanted)
        except ValueError as error:
            linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
            raise ModelError(
                "[model.lora] does not fit the network.",
                got=one_line(error),
                expected=f"names of layers, such as {', '.join(linear[:6])}",
                do="set model.lora.layers",
            ) from error
        if settings.merged:
            for adapter in adapters_of(adapted):
                adapted.get_parameter(adapter.base).requires_grad_()
        return adapted
