"""Where the parts of a federation are: the server's address, and folders on each machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fedkeel.errors import ConfigError

EXAMPLE = "superlink.example.org:8000"
"""Address of the server where none is given, which has to be replaced."""

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5})")
_PATH = re.compile(r"(/[A-Za-z0-9._+-]+)+")


@dataclass(frozen=True)
class Places:
    """Addresses and folders of a federation.

    Args:
        superlink: host and port under which nodes reach the server.
        contact: who answers questions, "" where the page leaves a line to fill in.
        programs: folder of the installed programs, the same on each machine.
        settings: folder of keys, certificates and a site's policy.
        state: folder that the service may write to.
    """

    superlink: str = EXAMPLE
    contact: str = ""
    programs: str = "/opt/fedkeel/bin"
    settings: str = "/etc/fedkeel"
    state: str = "/var/lib/fedkeel"

    def __post_init__(self) -> None:
        match = _ADDRESS.fullmatch(self.superlink)
        if match is None or not 0 < int(match["port"]) < 2**16:
            raise ConfigError(
                "The address of the server is not a host and a port.",
                got=self.superlink,
                expected=f"such as {EXAMPLE}",
                do="leave out https://",
            )
        for path in (self.programs, self.settings, self.state):
            if not _PATH.fullmatch(path):
                raise ConfigError(
                    "A folder has a name that a unit of systemd or a shell could misread.",
                    got=path,
                    expected="a whole path of letters, digits and ._+-",
                )

    @property
    def host(self) -> str:
        """The server's name, or its address without brackets."""
        return self.superlink.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port to which nodes connect."""
        return int(self.superlink.rpartition(":")[2])

    @property
    def loopback_port(self) -> int:
        """The port of the SuperLink behind the proxy, on the server itself."""
        return 8001 if self.port != 8001 else 8002
