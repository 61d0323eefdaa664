"""Fine-tuning: each client trains the global model once more before it uses it.

Source
    Yu et al., Salvaging Federated Learning by Local Adaptation, 2020 (key yu2020salvaging),
    section 2: fine-tuning, and freeze-base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.config import Local
from fedkeel.method.part import param
from fedkeel.method.roles import FineTuning
from fedkeel.task.parameter_names import ParameterLayout


def plain_training(local: Local, epochs: int | None, steps: int | None, lr: float) -> Local:
    """Return settings of so many epochs or steps at a constant rate; 0 keeps the run's rate."""
    work = {"epochs": epochs, "steps": steps, "lr": lr or local.lr, "keep_state": False}
    return local.model_copy(update={**work, "schedule": type(local.schedule)()})


@dataclass(frozen=True)
class FineTune(FineTuning):
    r"""Evaluates each client with the global model after training on the client's examples.

    Source: yu2020salvaging, section 2.

    Args:
        epochs: passes over the client's training examples, >= 1.
        only: what is trained: comma-separated names of sub-modules or parameters, ``*`` for any
            text; "" for all.
        lr: learning rate; 0 for the run's initial one.
    Sent: nothing beyond the model.
    State: none: it is done anew for each evaluation of the clients.
    Cost: `epochs` of training at every client whenever clients are evaluated.
    Laws: the global model is that of the method without it, bit for bit.
    Deviations: plain training on the task's loss, whatever corrections the method has.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("scaffold+finetune(epochs=2)").fine_tuning.epochs
        2
    """

    epochs: int = param(1, ge=1)
    only: str = param("")
    lr: float = param(0.0, ge=0.0)

    name: ClassVar[str] = "finetune"
    paper: ClassVar[str] = "yu2020salvaging"

    def fine_tuning(self, local: Local) -> Local:
        """Return the settings of so many epochs."""
        return plain_training(local, self.epochs, None, self.lr)

    def fine_tuned(self, layout: ParameterLayout) -> frozenset[str]:
        """Return the parameters that are named."""
        if not self.only:
            return frozenset(layout.names)
        return layout.choose(self.only, part=self.name)
