"""The two ends of a federation as Flower runs them: a ServerApp and a ClientApp.

Flower starts a process for every message of a node, which answers it in a child process, see
`node.client_app`. Nothing remains from one message to the next but the files of
`node.client_storage`, and on a node that trains on a device the process of `node.trainer_process`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid, ServerApp

from fedkeel.base.user_code import add_flower_app
from fedkeel.config import Experiment, load
from fedkeel.errors import FedkeelError

ORPHAN_SECONDS = 10.0
"""Time that a ServerApp has to end once the SuperLink that started it is gone."""


def client_app(file: Path | str, mods: Sequence[Mod] = ()) -> ClientApp:
    """Return the app of a node.

    Args:
        file: the experiment, the same at the server and on every node.
        mods: Flower's own middlewares, the first one outermost.
    """
    from fedkeel.flower.node.answer import answer
    from fedkeel.flower.node.client_app import SupervisedClientApp

    file, app = Path(file), SupervisedClientApp(mods=list(mods))
    add_flower_app(file)

    def handle(message: Message, context: Context) -> Message:
        def read() -> tuple[Experiment, Experiment]:
            return load(file), read_experiment(file, context)

        return answer(file, read, message, context)

    for question in ("describe", "describe_data", "statistics", "totals"):
        app.query(question)(handle)
    for register in (app.train(), app.train("survey")):
        register(handle)
    for register in (app.evaluate(), app.evaluate("pictures"), app.evaluate("personal")):
        register(handle)
    for step in ("keys", "shares", "masked", "unmask"):  # of a secure sum
        app.train(step)(handle)
    return app


def server_app(file: Path | str) -> ServerApp:
    """Return the app of the server.

    Args:
        file: the experiment, the same at the server and on every node.
    """
    from fedkeel.flower.server.serve import RunOptions, serve_and_report
    from fedkeel.flower.server.statistics import report_statistics

    file, app = Path(file), ServerApp()
    add_flower_app(file)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _end_with_the_superlink()
        config = context.run_config
        options = RunOptions(Path(str(config.get("out") or "run")), bool(config.get("resume")))
        kinds = str(config.get("statistics") or "")
        try:
            experiment = read_experiment(file, context)
            if kinds:
                report_statistics(grid, experiment, kinds, options.out)
            else:
                serve_and_report(grid, experiment, options)
            print(f"run     {options.out}", flush=True)
        except FedkeelError as error:
            print("\n".join(error.lines()), flush=True)
            raise

    return app


def read_experiment(file: Path, context: Context) -> Experiment:
    """Return the experiment, with the settings that were given when the run was submitted.

    Raises:
        ConfigError: it cannot be read, or a setting cannot be used.
    """
    settings = str(context.run_config.get("settings") or "").split(";")
    return load(file, [setting.strip() for setting in settings if setting.strip()])


def _end_with_the_superlink() -> None:
    """End this process when the one that started it is gone.

    Flower asks for that with one interrupt, which a run understands as the wish to stop after the
    current round. But no node can reply any more, so the run would wait for ever, and nobody could
    go on with its folder.
    """
    parent = os.getppid()
    if "--parent-pid" not in sys.argv or str(parent) not in sys.argv:
        return  # Flower's own processes did not start it

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(ORPHAN_SECONDS / 2)
        os._exit(70)

    threading.Thread(target=watch, daemon=True).start()
