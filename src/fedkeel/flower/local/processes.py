"""A federation on this machine: SuperLink and SuperNodes as separate processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from fedkeel.engine.process.interrupts import exit_when_killed, hold_signals
from fedkeel.errors import RunError
from fedkeel.flower.local import keys, watcher
from fedkeel.flower.local.watcher import Watcher
from fedkeel.flower.node import resident

NAME = "here"
"""Name of the SuperLink in Flower's own configuration."""

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

AS_JSON = ("--format", "json")

NODE_ENVIRONMENT = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
"""Seconds between a node's looks for new messages; Flower's own value is 1."""


class FlowerProcesses:
    """SuperLink and SuperNodes on the loopback interface. Leaving the context ends all of them.

    Flower's helpers outlive the process that started them, some in sessions of their own. So each
    process leads a group, and is marked in its environment. A watcher ends them all where this
    process is killed.

    Args:
        folder: for logs, Flower's own files and the database.
        nodes: the configuration of each node, as Flower's ``--node-config`` takes it.
        secure: whether TLS is used, and nodes have to show a registered key.
        patience: seconds that a start may take.
    """

    def __init__(
        self, folder: Path, nodes: Sequence[str], secure: bool = False, patience: float = 120.0
    ) -> None:
        self.folder, self.nodes, self.secure, self._patience = folder, list(nodes), secure, patience
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watcher: Watcher | None = None
        self._on_exit = ExitStack()
        self.port = free_port()
        self.keys = folder / "keys"
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process."""
        path = search_path(*[self._resident] * resident.is_supported())
        return {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(self.folder / "home"), "PATH": path}

    @property
    def _resident(self) -> Path:
        return self.folder.absolute() / "resident"

    @property
    def address(self) -> str:
        """The address of the SuperLink."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(exit_when_killed())
            stack.callback(self._stop_all)
            self._kill_marked()  # processes of an earlier command that was killed
            self._watcher = Watcher(self._mark(""))
            if self.secure and not self.keys.exists():
                keys.make(self.keys, ["127.0.0.1", "localhost"], len(self.nodes))
            self._write_config()
            if resident.is_supported():
                resident.install(self._resident)
            self.start_link()
            for number in range(len(self.nodes)):
                if self.secure:
                    self.flwr("supernode", "register", str(self.keys / f"node-{number}.pub"), NAME)
                self.start_node(number)
            self._on_exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._on_exit.close()

    def _stop_all(self) -> None:
        with hold_signals():
            for name in list(self._processes):
                self.stop(name)
            if self._watcher is not None:
                self._watcher.end()

    def _write_config(self) -> None:
        home = self.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        security = "insecure = true"
        if self.secure:
            certificate = json.dumps(str(self.keys / keys.CA), ensure_ascii=False)
            security = f"root-certificates = {certificate}"
        text = (
            f'[superlink]\ndefault = "{NAME}"\n\n'
            f'[superlink.{NAME}]\naddress = "{self.address}"\n{security}\n'
        )
        (home / "config.toml").write_text(text, encoding="utf-8")

    def start_link(self) -> None:
        """Start the SuperLink, with the database of the last one, and wait until it listens."""
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--database", str(self.folder / "superlink.db")]
        command += ["--disable-runtime-dependency-installation"]
        if self.secure:
            command += ["--ssl-ca-certfile", str(self.keys / keys.CA)]
            command += ["--ssl-certfile", str(self.keys / keys.CERTIFICATE)]
            command += ["--ssl-keyfile", str(self.keys / keys.SERVER_KEY)]
            command += ["--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        self.start("superlink", command)
        end = time.monotonic() + self._patience
        while not _listens(self.port):
            if not self.is_alive("superlink") or time.monotonic() > end:
                raise RunError("The SuperLink does not start.", got=self.tail("superlink"))
            time.sleep(0.05)

    def start_node(self, number: int, link: str | None = None, options: Sequence[str] = ()) -> None:
        """Start a SuperNode.

        Args:
            number: which of the nodes.
            link: address of the SuperLink, where it is not this federation's own.
            options: of its command line, in place of certificates and keys.
        """
        command = ["flower-supernode", "--superlink", link or self.address]
        command += ["--port", str(free_port()), "--node-config", self.nodes[number]]
        if options:
            command += options
        elif self.secure:
            command += ["--root-certificates", str(self.keys / keys.CA)]
            command += ["--auth-supernode-private-key", str(self.keys / f"node-{number}")]
        else:
            command += ["--insecure"]
        self.start(f"node-{number}", command, NODE_ENVIRONMENT)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a process in a group of its own; its output goes to a log.

        Args:
            name: its name, for the log and for `stop`.
            command: its command line.
            environment: additional environment variables.
        """
        # an interrupt waits until the process is on record, or nobody could end it
        with (self.folder / f"{name}.log").open("ab") as log, hold_signals(deliver=True):
            self._processes[name] = subprocess.Popen(
                command,
                env={**self.environment, **(environment or {}), watcher.NAME: self._mark(name)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if self._watcher is not None:
                self._watcher.watch(self._processes[name].pid)

    def stop(self, name: str) -> None:
        """Kill a process and all that it has started, and wait until they have ended."""
        process = self._processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(self._patience)
        if self._watcher is not None:
            self._watcher.forget(process.pid)
        self._kill_marked(name)

    def _kill_marked(self, name: str = "") -> None:
        end = time.monotonic() + self._patience
        while (pids := self.find(name)) and time.monotonic() < end:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def find(self, name: str = "", command: str = "") -> list[int]:
        """Return the ids of one of the federation's processes and of those that it has started.

        Args:
            name: which, such as ``superlink`` or ``node-0``; "" for all processes of the folder.
            command: only those with this text in their command line.
        """
        return watcher.find(self._mark(name), is_whole=bool(name), command=command)

    def _mark(self, name: str) -> str:
        return f"{self.folder.absolute()}/{name}"

    def is_alive(self, name: str) -> bool:
        """Return whether a process runs."""
        return name in self._processes and self._processes[name].poll() is None

    def ended_nodes(self) -> list[str]:
        """Return the names of SuperNodes that have ended, though nobody stopped them."""
        nodes = [name for name in self._processes if name.startswith("node-")]
        return [name for name in nodes if not self.is_alive(name)]

    def unregister(self, name: str) -> None:
        """Tell the SuperLink that a SuperNode is gone.

        It would take the node to be there until a minute has passed without a heartbeat.

        Raises:
            RunError: the SuperLink does not know the node, or does not answer.
        """
        log = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        numbers = re.findall(r"SuperNode ID: ([0-9]+)", log)
        if numbers:
            self.flwr("supernode", "unregister", numbers[-1], NAME)

    def tail(self, name: str, count: int = 3) -> str:
        """Return the last lines of a process's log, as one line."""
        text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        lines = " | ".join(line.strip() for line in text.splitlines() if line.strip())
        return lines[-120 * count :]

    def flwr(self, *arguments: str) -> str:
        """Run one of Flower's commands and return its output.

        Raises:
            RunError: it fails, or does not return in time.
        """
        problem = f"'flwr {arguments[0]}' failed."
        try:
            done = subprocess.run(
                ["flwr", *arguments],
                env={**self.environment, watcher.NAME: self._mark("flwr")},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._patience,
                check=False,
                start_new_session=True,  # an interrupt from the keyboard is not meant for it
            )
        except subprocess.TimeoutExpired:
            raise RunError(problem, got=f"no answer within {self._patience:g} s") from None
        if done.returncode != 0:
            output = (done.stderr or done.stdout).strip().splitlines()
            raise RunError(problem, got=" ".join(output)[-300:])
        return done.stdout

    def submit(self, app: Path, config: Mapping[str, str | bool]) -> int:
        """Hand an app to the SuperLink and return Flower's number of the run.

        Raises:
            RunError: Flower does not accept it.
        """
        settings = " ".join(f"{key}={_toml(value)}" for key, value in config.items())
        return int(
            json_answer(self.flwr("run", str(app), NAME, *AS_JSON, "-c", settings))["run-id"]
        )

    def status(self, run: int) -> str:
        """Return Flower's status of a run, such as ``running`` or ``finished:completed``."""
        runs = json_answer(self.flwr("list", NAME, "--run-id", str(run), *AS_JSON))["runs"]
        return str(runs[0]["status"])


def search_path(*first: Path) -> str:
    """Return where commands are looked for: Flower's are beside this Python.

    Args:
        first: folders to look in before that.
    """
    folders = [*map(str, first), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return os.pathsep.join(folders)


def json_answer(output: str) -> dict[str, Any]:
    """Return the JSON that one of Flower's commands has printed.

    Raises:
        RunError: there is none, or it says that the command has failed, which Flower says there
            and not by the exit status.
    """
    try:
        values: dict[str, Any] = json.loads(output[output.index("{") :])
    except ValueError:
        raise RunError("Flower's answer cannot be read.", got=output.strip()[-300:]) from None
    if not values.get("success", True):
        reason = " ".join(str(values.get("error-message")).split())
        raise RunError("A command of Flower has failed.", got=reason[-300:])
    return values


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
        RunError: it has quotes of both kinds, or characters that are not printable.

    >>> print(quoted("/data/x.csv"), quoted('/data/"x".csv'))
    "/data/x.csv" '/data/"x".csv'
    """
    mark = "'" if '"' in text or "\\" in text else '"'
    if mark in text or not text.isprintable():
        raise RunError(
            "Flower's configuration cannot hold this text.",
            got=repr(text),
            why="it takes no quotes of both kinds, and no characters that are not printable",
            do="rename the folder or file",
        )
    return f"{mark}{text}{mark}"


def _toml(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else quoted(value)
