"""Watching operations does not load torch's compiler."""

from __future__ import annotations

from typing import Any

import torch

from fedkeel.dispatch import OperationMode


class Names(OperationMode):
    """Notes the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_operations_are_seen_without_a_wrapper_that_loads_the_compiler() -> None:
    assert not hasattr(Names.__torch_dispatch__, "__wrapped__")
    with Names() as mode:
        torch.ones(2) + 1
    assert mode.seen == ["ones", "add"]
