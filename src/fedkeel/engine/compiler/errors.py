"""The error that says why a function cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedkeel.errors import first_line


class CannotCompile(Exception):  # noqa: N818 - the caller takes another way, nothing has failed
    """A function cannot be compiled.

    Args:
        reason: why, in one line for the user.
        raised: what the function itself raised while it was traced, where that is not a refusal of
            torch. Only a run of the function without tracing tells whether it is the user's error.
    """

    def __init__(self, reason: str, raised: Exception | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.raised = raised


@contextmanager
def tracing() -> Iterator[None]:
    """Turn what is raised while a function is traced into `CannotCompile`.

    torch refuses by a `RuntimeError`: vmap has no rule for an operation, a tensor has no numbers.
    """
    try:
        yield
    except (CannotCompile, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise CannotCompile(first_line(error)) from error
    except Exception as error:
        raise CannotCompile(first_line(error), raised=error) from error
