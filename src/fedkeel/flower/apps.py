"""The two ends of a federation, as Flower wants them: a ServerApp and a ClientApp.

Flower starts a process for every message of a node: nothing lives from one to the next but what
`keep` writes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid, ServerApp

from fedkeel.config import Experiment, load
from fedkeel.errors import FedkeelError, RunError
from fedkeel.flower.node.configuration import folder, site
from fedkeel.flower.node.node import Site, note, outward
from fedkeel.flower.server.serve import Options, told
from fedkeel.user_code import add_flower_app, one_line

RAISED = 2
"""Flower's code for a ClientApp that raised an exception."""

ORPHAN = 10.0
"""Seconds that a ServerApp has to end once the SuperLink that started it is gone."""

Handler = Callable[[Site, RecordDict], RecordDict]


class Watched(ClientApp):
    """A ClientApp that ends its process where its reply is no longer wanted.

    Flower's heartbeats go on while an app hangs, and its node would never be free again. The end
    comes from a thread that needs nothing of Python: a model that never returns is ended too. Where
    it hung is said in the SuperNode's output.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, or end the process when the message has lived its time."""
        left = message.metadata.created_at + message.metadata.ttl - time.time()
        faulthandler.dump_traceback_later(max(left, 1.0), exit=True, file=2)
        try:
            return super().__call__(message, context)
        finally:
            faulthandler.cancel_dump_traceback_later()


def client_app(file: Path | str, mods: Sequence[Mod] = ()) -> ClientApp:
    """Return the app of a node.

    Args:
        file: the experiment, the same at the server and on every node.
        mods: Flower's own middlewares, the first one outermost.
    """
    file, app = Path(file), Watched(mods=list(mods))
    add_flower_app(file)

    def register(where: Callable[..., object], handler: Handler) -> None:
        def handle(message: Message, context: Context) -> Message:
            return _answered(file, message, context, handler)

        where(handle)

    register(app.query("hello"), _hello)
    register(app.train(), lambda site, content: site.train(content))
    register(app.train("survey"), lambda site, content: site.survey(content))
    register(app.evaluate(), lambda site, content: site.evaluate(content))
    return app


def server_app(file: Path | str) -> ServerApp:
    """Return the app of the server.

    Args:
        file: the experiment, the same at the server and on every node.
    """
    file, app = Path(file), ServerApp()
    add_flower_app(file)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _end_with_the_superlink()
        try:
            chosen = options(context)
            told(grid, read(file, context), chosen)
            print(f"run     {chosen.out}", flush=True)
        except FedkeelError as error:
            print("\n".join(error.lines()), flush=True)
            raise

    return app


def options(context: Context) -> Options:
    """Return what was said when the run was submitted."""
    values = context.run_config
    return Options(Path(str(values.get("out") or "run")), bool(values.get("resume", False)))


def read(file: Path, context: Context) -> Experiment:
    """Return the experiment, with the settings that were given with the run.

    Raises:
        ConfigError: it cannot be read, or a setting cannot be used.
    """
    words = str(context.run_config.get("settings") or "")
    return load(file, [word.strip() for word in words.split(";") if word.strip()])


def _answered(file: Path, message: Message, context: Context, handler: Handler) -> Message:
    """Return the reply to a message."""
    try:
        found = site(read(file, context), dict(context.node_config))
        reply = Message(handler(found, message.content), reply_to=message)
    except FedkeelError as error:
        note(folder(context.node_config), error)
        said = outward(error)
    except Exception as error:  # whose words might be the data's: they stay here
        what = RunError("The node's app failed.", got=one_line(error))
        note(folder(context.node_config), what)
        said = type(error).__name__
    else:
        return reply
    return Message(Error(RAISED, said), reply_to=message)


def _end_with_the_superlink() -> None:
    """End this process when the one that started it is gone, as Flower asks its apps to.

    Flower asks by one interrupt, which a run takes as the wish to stop after the round at hand; but
    nobody is left to answer. It would wait for ever, and nobody could go on with the run folder.
    """
    parent = os.getppid()
    if "--parent-pid" not in sys.argv or str(parent) not in sys.argv:
        return  # it was not started by Flower's own processes

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(ORPHAN / 2)
        os._exit(70)

    threading.Thread(target=watch, daemon=True).start()


def _hello(site: Site, content: RecordDict) -> RecordDict:
    return site.hello()
