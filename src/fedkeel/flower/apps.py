"""The two ends of a federation, as Flower wants them: a ServerApp and a ClientApp.

Flower starts a process for every message of a node: nothing lives from one to the next but what
`keep` writes.
"""

from __future__ import annotations

import os
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
from fedkeel.flower.place import folder, site
from fedkeel.flower.server import Options, told
from fedkeel.flower.site import Site, note
from fedkeel.own import one_line

RAISED = 2
"""Flower's code for a ClientApp that raised an exception."""

Handler = Callable[[Site, RecordDict], RecordDict]


def client_app(file: Path | str, mods: Sequence[Mod] = ()) -> ClientApp:
    """Return the app of a node.

    Args:
        file: the experiment, the same at the server and on every node.
        mods: Flower's own middlewares, the first one outermost.
    """
    file, app = Path(file), ClientApp(mods=list(mods))

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

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            told(grid, read(file, context), options(context))
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
    """Return the reply to a message, and end the process where none is wanted any more."""
    left = message.metadata.created_at + message.metadata.ttl - time.time()
    watchdog = threading.Timer(max(left, 1.0), os._exit, (70,))
    watchdog.daemon = True
    watchdog.start()
    try:
        found = site(read(file, context), dict(context.node_config))
        reply = Message(handler(found, message.content), reply_to=message)
    except FedkeelError as error:
        note(folder(context.node_config), error)
        said = f"{type(error).__name__}: {error.what}"
    except Exception as error:  # whose words might be the data's: they stay here
        what = RunError("The node's app failed.", got=one_line(error))
        note(folder(context.node_config), what)
        said = type(error).__name__
    else:
        return reply
    finally:
        watchdog.cancel()
    return Message(Error(RAISED, said[:200]), reply_to=message)


def _hello(site: Site, content: RecordDict) -> RecordDict:
    return site.hello()
