"""The settings of examples at the server."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fedkeel.base.settings import Settings


class Root(Settings):
    """Examples of the server's own, on which a method such as ``fltrust`` trains at the server.

    Args:
        examples: number of examples that are drawn from those of all clients, which then train
            without them: with every method, also with one that does not use them. The seed of the
            run decides which.
        file: in place of `examples`, path of an ``.npz`` file at the server with arrays ``x`` and
            ``label``: inputs as they were before they were standardised, and targets.
    """

    examples: int | None = Field(None, ge=1)
    file: str | None = None

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if (self.examples is None) == (self.file is None):
            raise ValueError("give 'examples' or 'file': where the server's examples come from")
        return self
