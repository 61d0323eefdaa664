"""What a node knows in a secure sum between its steps: a file that only one step can take."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedkeel.features.secure.participant import Participant
from fedkeel.features.secure.primitives import SecureSumError
from fedkeel.flower.node.log import disk_errors
from fedkeel.records.files import write_bytes

SECRETS = "secure-sum-{}.json"
"""File of what a node knows in a sum, by its number: nodes of one machine may share a folder. Only
its owner may read it, and it is removed with the last step, or by the next sum."""

REVEALED = "revealed-sum-{}.json"
"""File of the last reply by which a node has helped to unmask a sum. The server has had it, or it
was lost on its way: then the server asks again, and gets the same."""

NOT_KEPT = "The secrets of a sum cannot be kept"


@dataclass(frozen=True)
class Secrets:
    """What a node knows in a sum.

    Args:
        participant: its keys and shares.
        clients: how many clients each node was asked for, by the node's number.
        planned: smallest number of clients that share the noise of the sum, 0 for no noise.
        subject: digest of the model that the node has trained, and for whom; see `AnsweredSums`.
    """

    participant: Participant
    clients: Mapping[int, int] = field(default_factory=dict)
    planned: int = 0
    subject: str = ""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64"
    )


_SECRETS = TypeAdapter(Secrets)


@dataclass(frozen=True)
class SecretsFile:
    """Keeps the secrets of a node in a run, from one step of a sum to the next.

    Args:
        root: the node's folder.
        run: the server's name for the run. Its digest names a folder: no name is received.
        node: the node's number, digits only.
    """

    root: Path
    run: str
    node: str

    @property
    def _folder(self) -> Path:
        return self.root / hashlib.blake2b(self.run.encode(), digest_size=12).hexdigest()

    @property
    def _file(self) -> Path:
        return self._folder / SECRETS.format(self.node)

    def keep_reply(self, request: str, reply: str) -> None:
        """Write the reply to a request for shares, in place of an earlier one.

        Raises:
            RunError: the disk fails.
        """
        values = {"request": request, "reply": reply}
        with disk_errors(NOT_KEPT):
            file = self._folder / REVEALED.format(self.node)
            write_bytes(file, json.dumps(values).encode(), mode=0o600)

    def kept_reply(self, request: str) -> str:
        """Return the reply that the same request had before, "" where there is none."""
        try:
            values = json.loads((self._folder / REVEALED.format(self.node)).read_bytes())
            return str(values["reply"]) if values["request"] == request else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def save(self, secrets: Secrets) -> None:
        """Write the secrets in place of those of an earlier step, or of an earlier sum.

        Raises:
            RunError: the disk fails.
        """
        with disk_errors(NOT_KEPT):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._file, _SECRETS.dump_json(secrets), mode=0o600)

    def take(self, session: str) -> Secrets:
        """Return the secrets of a sum, and remove them: no other step finds them.

        Of two that ask at one time, one gets them. Who ends before `save` has left the sum.

        Raises:
            SecureSumError: the node has no part in this sum.
        """
        private_file = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            os.rename(self._file, private_file)
            data = private_file.read_bytes()
            private_file.unlink()
            secrets = _SECRETS.validate_json(data)
        except FileNotFoundError:
            raise _no_part() from None
        except (OSError, ValidationError) as error:
            with suppress(OSError):
                private_file.unlink()
            raise SecureSumError(
                f"The secrets of a sum are lost: {type(error).__name__}."
            ) from None
        if secrets.participant.session != session:
            self.save(secrets)
            raise _no_part()
        return secrets


def _no_part() -> SecureSumError:
    return SecureSumError("The node has no part in this secure sum, or has left it.")
