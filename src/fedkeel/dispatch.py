"""Watching the operations of tensors one by one, at little cost."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `TorchDispatchMode` that torch's compiler knows nothing of.

    torch wraps every other one so that its compiler leaves it alone. At the first operation that
    loads the compiler, which takes seconds, and each further operation passes through the wrapper.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """Leave the class as it is, where `TorchDispatchMode` would wrap its operations."""
