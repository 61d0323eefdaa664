"""A federation on this machine: SuperLink and SuperNodes as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from fedkeel.errors import RunError
from fedkeel.flower.local import keys
from fedkeel.flower.node import resident

NAME = "here"
"""What the SuperLink is called in Flower's own configuration."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

LOOK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
"""How often a node looks for a message that has come, in seconds; Flower's own is 1."""


MARK = "FEDKEEL_PROCESS"
"""Name in the environment of a process, which its helpers inherit, that says what it is part of."""


class Federation:
    """SuperLink and SuperNodes on the loopback interface. Leaving it ends all of them.

    Flower's helpers outlive whoever started them, some in sessions of their own. So each process
    leads a group, and is marked in its environment.

    Args:
        folder: where logs, Flower's own files and the database go.
        nodes: the configuration of each node, as Flower's ``--node-config`` takes it.
        secure: whether TLS is used and nodes have to show a key that was registered.
        patience: seconds until a start is given up on.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        secure: bool = False,
        patience: float = 120.0,
    ) -> None:
        self.folder, self.nodes, self.secure, self._patience = folder, list(nodes), secure, patience
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._before: dict[int, Any] = {}  # what polite kills did before
        self.port = free_port()
        self.keys = folder / "keys"
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process."""
        places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        if resident.possible():
            places = [str(self.folder.absolute() / "warm"), *places]
        path = os.pathsep.join(places)
        return {**os.environ, **QUIET, "FLWR_HOME": str(self.folder / "home"), "PATH": path}

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # a polite kill ends all of them
            for kill in (signal.SIGTERM, signal.SIGHUP):  # the other is a terminal that closes
                if signal.getsignal(kill) != signal.SIG_IGN:  # as nohup has it
                    self._before[kill] = signal.signal(kill, lambda one, _: sys.exit(128 + one))
        try:
            self._end()  # of a federation here whose command was killed
            if self.secure and not self.keys.exists():
                keys.make(self.keys, ["127.0.0.1", "localhost"], len(self.nodes))
            self._configure()
            if resident.possible():
                resident.install(self.folder / "warm")
            self.start_link()
            for number in range(len(self.nodes)):
                if self.secure:
                    self.flwr("supernode", "register", str(self.keys / f"node-{number}.pub"), NAME)
                self.start_node(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with _undisturbed():
            for name in list(self._running):
                self.stop(name)
        for kill, before in self._before.items():
            signal.signal(kill, before)
        self._before = {}

    def _configure(self) -> None:
        home = self.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        how = "insecure = true"
        if self.secure:
            how = f"root-certificates = {json.dumps(str(self.keys / keys.CA), ensure_ascii=False)}"
        text = (
            f'[superlink]\ndefault = "{NAME}"\n\n'
            f'[superlink.{NAME}]\naddress = "{self.address}"\n{how}\n'
        )
        (home / "config.toml").write_text(text, encoding="utf-8")

    def start_link(self) -> None:
        """Start the SuperLink, with the database of the last one, and wait until it listens."""
        words = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--database", str(self.folder / "superlink.db")]
        words += ["--disable-runtime-dependency-installation"]
        if self.secure:
            words += ["--ssl-ca-certfile", str(self.keys / keys.CA)]
            words += ["--ssl-certfile", str(self.keys / keys.CERTIFICATE)]
            words += ["--ssl-keyfile", str(self.keys / keys.SERVER_KEY), "--enable-supernode-auth"]
        else:
            words += ["--insecure"]
        self.start("superlink", words)
        end = time.monotonic() + self._patience
        while not _listens(self.port):
            if not self.alive("superlink") or time.monotonic() > end:
                raise RunError("The SuperLink does not start.", got=self.tail("superlink"))
            time.sleep(0.05)

    def start_node(self, number: int, link: str | None = None, more: Sequence[str] = ()) -> None:
        """Start a SuperNode.

        Args:
            number: which of the nodes.
            link: address of the SuperLink, where it is not this federation's own.
            more: further words of its command line, in place of certificates and keys.
        """
        words = ["flower-supernode", "--superlink", link or self.address]
        words += ["--port", str(free_port()), "--node-config", self.nodes[number]]
        if more:
            words += more
        elif self.secure:
            words += ["--root-certificates", str(self.keys / keys.CA)]
            words += ["--auth-supernode-private-key", str(self.keys / f"node-{number}")]
        else:
            words += ["--insecure"]
        self.start(f"node-{number}", words, LOOK)

    def start(self, name: str, words: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        """Start a process in a group of its own; what it says goes to a log.

        Args:
            name: what to call it.
            words: its command line.
            more: of its environment.
        """
        # nobody could end a process of which an interrupt left no trace
        with (self.folder / f"{name}.log").open("ab") as log, _undisturbed(later=True):
            self._running[name] = subprocess.Popen(
                words,
                env={**self.environment, **(more or {}), MARK: self._mark(name)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self, name: str) -> None:
        """End a process and all that it has started, at once; nothing of it is left on return."""
        process = self._running.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(self._patience)
        self._end(name)

    def _end(self, name: str = "") -> None:
        end = time.monotonic() + self._patience
        while (left := self.started(name)) and time.monotonic() < end:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def started(self, name: str = "", command: str = "") -> list[int]:
        """Return the processes that run on behalf of one of the federation's, itself included.

        They are found by their environment, where the system shows it (Linux); elsewhere nothing is
        found, and Flower's helpers end by themselves when they see that their parent is gone.

        Args:
            name: which, such as ``superlink`` or ``node-0``; "" for all that began in the folder.
            command: only those whose command line holds this.
        """
        mark, found = f"{MARK}={self._mark(name)}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to somebody else
                words = (place / "cmdline").read_bytes()
                client_info = (place / "environ").read_bytes().split(b"\0")
                ours = any(
                    one == mark or (not name and one.startswith(mark)) for one in client_info
                )
                found += [int(place.name)] if ours and command.encode() in words else []
        return found

    def _mark(self, name: str) -> str:
        return f"{self.folder.absolute()}/{name}"

    def alive(self, name: str) -> bool:
        """Return whether a process runs."""
        return name in self._running and self._running[name].poll() is None

    def tail(self, name: str, count: int = 3) -> str:
        """Return the last lines of a process's log, as one."""
        text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())[
            -120 * count :
        ]

    def flwr(self, *words: str) -> str:
        """Run one of Flower's commands and return what it prints.

        Raises:
            RunError: it fails, or does not return in time.
        """
        try:
            done = subprocess.run(
                ["flwr", *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._patience,
                check=False,
                start_new_session=True,  # an interrupt from the keyboard is not meant for it
            )
        except subprocess.TimeoutExpired:
            got = f"no answer within {self._patience:g} s"
            raise RunError(f"'flwr {words[0]}' failed.", got=got) from None
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise RunError(f"'flwr {words[0]}' failed.", got=" ".join(said)[-300:])
        return done.stdout

    def submit(self, app: Path, config: Mapping[str, str | bool]) -> int:
        """Hand an app to the SuperLink and return the number of the run.

        Raises:
            RunError: it is not taken.
        """
        words = " ".join(f"{key}={_toml(value)}" for key, value in config.items())
        said = self.flwr("run", str(app), NAME, "--format", "json", "-c", words)
        try:
            return int(json.loads(said[said.index("{") :])["run-id"])
        except (ValueError, KeyError) as error:
            raise RunError("Flower did not take the run.", got=f"{said.strip()[-300:]}") from error

    def status(self, run: int) -> str:
        """Return what Flower says of a run, such as ``running`` or ``finished:completed``."""
        said = self.flwr("list", NAME, "--run-id", str(run), "--format", "json")
        found = json.loads(said[said.index("{") :])
        return str(found["runs"][0]["status"])


@contextmanager
def _undisturbed(later: bool = False) -> Iterator[None]:
    """Let interrupts and polite kills pass, or come `later`: who is in haste leaves processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.signal(one, lambda one, _: heard.append(one)) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        for number in heard if later else ():
            signal.raise_signal(number)


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def quoted(text: str) -> str:
    """Return a text as Flower reads it in a configuration on the command line.

    Raises:
        RunError: it has quotes of both kinds, or characters that are not printed.

    >>> print(quoted("/data/x.csv"), quoted('/data/"x".csv'))
    "/data/x.csv" '/data/"x".csv'
    """
    mark = "'" if '"' in text or "\\" in text else '"'
    if mark in text or not text.isprintable():
        raise RunError(
            "Flower's configuration cannot hold this text.",
            got=repr(text),
            why="it takes no quotes of both kinds, and no characters that are not printed",
            do="use a folder and files of other names",
        )
    return f"{mark}{text}{mark}"


def _toml(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else quoted(value)
