"""``fedkeel flower``: the same experiment in a federation of real nodes."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from fedkeel.base.named_files import expanded
from fedkeel.cli.common import (
    JSON,
    QUIET,
    Command,
    CommandGroup,
    ExperimentSource,
    default_folder,
    document,
    many_imports,
    page_written,
    say,
    show,
    stderr,
    takes_experiment,
    values_of,
)
from fedkeel.errors import ConfigError, RunError

DEVICE = typer.Option(
    "auto",
    "--device",
    help="Where the node trains: auto, cpu, cuda, or names such as cuda:0, with commas.",
)
ENGINE = typer.Option(
    "auto",
    "--engine",
    help="By which engine: sequential, vectorized, or auto: vectorized on a GPU.",
)

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="A federation of nodes, with Flower."
)


@app.command(cls=Command)
@takes_experiment
def up(
    source: ExperimentSource,
    nodes: int = typer.Option(3, "--nodes", min=1, help="SuperNodes, which share the clients."),
    data: list[str] = typer.Option(None, "--data", help="Data of one node; repeatable."),
    device: str = DEVICE,
    engine: str = ENGINE,
    out: Path = typer.Option(None, "--out", help="Run folder; runs/NAME where nothing is given."),
    resume: bool = typer.Option(False, "--resume", help="Go on with an unfinished run."),
    secure: bool = typer.Option(False, "--secure", help="Use TLS and node keys here too."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Start SuperLink and SuperNodes on this machine, make a run with them, and end them."""
    _check_installed()
    from fedkeel.cli.experiment import check_methods, read_experiment

    experiment = read_experiment(source)
    check_methods([experiment.method], experiment.weights)

    with many_imports():
        from fedkeel.cli.progress import shown_progress
        from fedkeel.flower.data_on_nodes import how_to_move, is_on_nodes
        from fedkeel.flower.local.federation import data_configs, run_locally, shared_configs
        from fedkeel.records.folder import RunFolder
        from fedkeel.report.page import write_report

    out = default_folder(experiment.name, "run") if out is None else out
    console = stderr()
    count, needed = len(data or ()), experiment.partition.clients or 0
    needed = needed if is_on_nodes(experiment) else 0
    if count != needed:
        raise ConfigError(
            "--data goes with data.source = 'nodes', once for each client.",
            got=f"data.source = {experiment.data.source!r} and {count} times --data",
            expected=f"{needed} times --data" if needed else "no --data",
            do=None if needed else how_to_move(experiment, count),
        )
    hardware = " ".join(_hardware(device, engine))
    configs = data_configs(data) if data else shared_configs(nodes)
    configs = [f"{config} {hardware}".strip() for config in configs]
    go_on = "to go on from what was saved: the same command with --resume"
    with shown_progress(quiet, go_on) as progress:
        result = run_locally(experiment, out, configs, progress, resume, secure)
    page = page_written(lambda: write_report([out], out / "report.html"))
    rows, record = result.rows, RunFolder(out).read_run()
    if as_json:
        score = record.score
        scores = [row.test[score.name] for row in rows if row.test is not None]
        document(
            {
                "run_dir": str(out),
                "status": result.status,
                "message": result.message,
                "rounds": rows[-1].round,
                "best": score.best(scores) if scores else None,
                "last": scores[-1] if scores else None,
                "bytes_up": sum(sum(row.bytes_up.values()) for row in rows),
                "bytes_down": sum(sum(row.bytes_down.values()) for row in rows),
                "faults": {row.round: row.faults for row in rows if row.faults},
                "devices": record.engine.devices,
            }
        )
    if result.message:
        say(console, result.message)
    for text in record.engine.reasons:
        say(console, text)
    if record.engine.devices:
        say(console, f"devices {', '.join(record.engine.devices)}: not the bits of a simulation")
    for row in rows:
        for reason, clients in row.faults.items():
            say(console, f"round {row.round}: {reason}: clients {clients}")
    say(console, f"run     {out}")
    say(console, f"report  {page}")
    if result.status == "interrupted":
        say(console, f"after {rows[-1].round} of {experiment.rounds} rounds; to go on: --resume")
        raise typer.Exit(130)


@app.command(cls=Command)
@takes_experiment
def export(
    source: ExperimentSource,
    out: Path = typer.Option(..., "--out", help="Folder of the app."),
    superlink: str = typer.Option(
        "superlink.example.org:8000", "--superlink", help="Host and port that nodes connect to."
    ),
    contact: str = typer.Option("", "--contact", help="Whom administrators of sites may call."),
    data: str = typer.Option(
        None, "--data", help="Where nodes have their own data: some of that form, to count bytes."
    ),
) -> None:
    """Write a complete Flower app, a README with every command, and pages for administrators."""
    _check_installed()
    from fedkeel.cli.experiment import check_methods, read_experiment

    experiment = read_experiment(source)
    check_methods([experiment.method], experiment.weights)

    with many_imports():
        from fedkeel.flower.export import export as write
        from fedkeel.flower.export import files_warning, node_count
        from fedkeel.flower.handout.example_node import example_node
        from fedkeel.flower.handout.files import write_handout
        from fedkeel.flower.handout.places import Places

    console, places, nodes = stderr(), Places(superlink, contact), node_count(experiment)
    node, why_unknown = example_node(experiment, data, nodes)
    modules = write(experiment, out, places)
    pages = write_handout(experiment, out, places, nodes, node, why_unknown)
    for module in modules:
        say(console, f"the module {module!r} is not in the app: install it everywhere")
    if warning := files_warning(experiment):
        say(console, f"warning {warning}")
    if experiment.engine.devices:
        say(console, "engine.devices is ignored: the operator of a node names its devices")
    say(console, f"app     {out}")
    say(console, f"next    {out / 'README.md'}")
    for page in pages:
        say(console, f"print   {page}")


@app.command(cls=Command)
@takes_experiment
def stats(
    source: ExperimentSource,
    federation: str = typer.Option(
        None, "--federation", help="A federation that is up, by its name for flwr run."
    ),
    data: list[str] = typer.Option(
        None, "--data", help="Data of one node that is started here instead; repeatable."
    ),
    policy: Path = typer.Option(None, "--policy", help="Policy of the nodes that are started."),
    kinds: str = typer.Option("all", "--kinds", help="Statistics to ask for, with commas."),
    out: Path = typer.Option(None, "--out", help="Folder; runs/NAME-statistics else."),
    secure: bool = typer.Option(False, "--secure", help="Use TLS and node keys here too."),
    as_json: bool = JSON,
) -> None:
    """Ask sites for the statistics of their data that their policies consent to.

    Labels, missing values, categories, moments and quantiles come as counts and sums, never as
    examples; with flower.secure_aggregation only as sums over all sites.
    """
    _check_installed()
    from fedkeel.cli.experiment import read_experiment

    experiment = read_experiment(source)
    with many_imports():
        from fedkeel.flower.local.statistics import (
            configs_with_policy,
            of_federation,
            of_local_nodes,
        )
        from fedkeel.flower.server.statistics import read_kinds
        from fedkeel.report.statistics_text import statistics_page

    chosen = ",".join(read_kinds(kinds, bool(experiment.data.categories)))
    out = Path("runs") / f"{experiment.name}-statistics" if out is None else out
    flower, sites = experiment.flower, experiment.partition.clients
    waiting = (
        f"asking  {sites} sites; they have {flower.deadline_seconds:g} s to come and to answer"
    )
    if federation is not None and not data:
        if policy is not None or secure:
            raise ConfigError(
                "--policy and --secure go with --data.",
                got="--federation with " + ("--secure" if policy is None else "--policy"),
                why="the nodes of a federation that is up have policies and keys of their own",
                do="leave it out",
            )
        say(stderr(), waiting)
        found = of_federation(experiment, out, federation, chosen)
    else:
        configs = configs_with_policy(experiment, data or [], policy, federation)
        say(stderr(), waiting)
        found = of_local_nodes(experiment, out, configs, chosen, secure)
    show(as_json, found.to_json(), statistics_page(found))
    say(stderr(), f"written {out}")


@app.command(cls=Command)
def keys(
    host: list[str] = typer.Option(..., "--host", help="Name or address of the server."),
    nodes: int = typer.Option(..., "--nodes", min=1, help="Number of nodes."),
    out: Path = typer.Option(Path("keys"), "--out", help="Folder of the keys."),
    days: int = typer.Option(
        365, "--days", min=1, max=36_500, help="Days that certificates are valid."
    ),
) -> None:
    """Make the server's certificate and a key pair for each node."""
    _check_installed()
    from fedkeel.flower.local.keys import make

    make(out, host, nodes, days)
    say(stderr(), f"keys    {out}: ca.crt for every node, node-N for node N, the rest stays here")


@app.command(
    cls=Command,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def node(
    context: typer.Context,
    policy: Path = typer.Option(None, "--policy", help="What this site allows, a TOML file."),
    peers: Path = typer.Option(
        None, "--peers", help="Public keys of the nodes that may be in secure sums, one a line."
    ),
    device: str = DEVICE,
    engine: str = ENGINE,
) -> None:
    """Start a SuperNode, with flower-supernode's options, that imports once for all messages."""
    _check_installed()
    import os
    import secrets

    from fedkeel.flower.local import watcher
    from fedkeel.flower.local.processes import search_path
    from fedkeel.flower.node import resident

    words = _with_site(context.args, policy, peers, _hardware(device, engine, policy))
    path = search_path(*[resident.FOLDER] * resident.is_supported())
    if resident.is_supported():
        resident.install(resident.FOLDER)
        if watcher.NAME not in os.environ:  # else the whole federation is watched
            os.environ[watcher.NAME] = mark = f"node-{os.getpid()}-{secrets.token_hex(4)}"
            watcher.Watcher(mark).outlive_exec()
    os.environ["PATH"] = path
    os.execvp("flower-supernode", ["flower-supernode", *words])


@app.command(cls=Command)
def ledger(
    policy: Path = typer.Argument(..., metavar="POLICY.toml", help="A site's own policy."),
    as_json: bool = JSON,
) -> None:
    """Print what a site has spent of its epsilon, run by run."""
    from fedkeel.features.budget.ledger import Ledger, statement
    from fedkeel.features.budget.policy import read_policy
    from fedkeel.report.text_table import TextTable

    rules = read_policy(policy)
    spent = statement(Ledger(Path(rules.ledger)).read(), rules)
    limits = {"epsilon": rules.epsilon, "delta": rules.delta, "unit": rules.unit}
    if as_json:
        document({"ledger": rules.ledger, **limits, "runs": [vars(row) for row in spent]})
        return
    heads = ("run", "method", "noise", "releases", "last", "epsilon", "so far")
    rows = []
    for row in spent:
        noise = ", ".join(f"{sigma:g}" for sigma in row.sigmas)
        words = row.run[:8], row.method, noise, str(row.count), row.at[:10]
        rows.append((*words, f"{row.epsilon:.4g}", f"{row.total:.4g}"))
    Console().print(TextTable(heads, rows, texts=frozenset(range(5))).terminal())
    of = f"of {rules.epsilon:g} at delta {rules.delta:g}, unit {rules.unit}"
    print(f"spent {spent[-1].total if spent else 0:.4g} {of}")


def _hardware(device: str, engine: str, policy: Path | None = None) -> list[str]:
    """Return the keys of a node's configuration for where and how it trains.

    A mistake, or a GPU that is not there, is said here, and not with the first message.
    """
    if (device, engine) == ("auto", "auto"):
        return []
    from fedkeel import config
    from fedkeel.features.budget.policy import read_policy
    from fedkeel.flower.local.processes import quoted
    from fedkeel.flower.node.hardware import Hardware

    values = {"device": device, "engine": engine}
    rules = None if policy is None else read_policy(policy)
    Hardware.read(values).place(config.Engine(), rules)
    return [f"{name}={quoted(value)}" for name, value in values.items()]


def _with_site(
    words: list[str], policy: Path | None, peers: Path | None, hardware: list[str]
) -> list[str]:
    """Return the options of a SuperNode, with a site's files and devices in its configuration.

    The key by which it authenticates signs its keys in secure sums, too.
    """
    from fedkeel.features.budget.policy import read_policy
    from fedkeel.flower.local.processes import quoted
    from fedkeel.flower.node.signing import read_signing

    keys, _ = values_of("--auth-supernode-private-key", words)
    key = expanded(keys[-1]) if keys else None
    files = {"policy": policy, "key": key, "peers": peers}
    chosen = {name: file for name, file in files.items() if file is not None}
    if not chosen and not hardware:
        return words
    if policy is not None:  # a mistake in it is said here, and not with the first message
        read_policy(policy)
    read_signing(key, peers)
    option = "--node-config"
    config, others = values_of(option, words)
    config += [f"{name}={quoted(str(file.absolute()))}" for name, file in chosen.items()]
    return [*others, option, " ".join([*config, *hardware])]


def _check_installed() -> None:
    from importlib.util import find_spec

    modules = {"flwr": "flwr", "cryptography": "cryptography", "pycryptodome": "Crypto"}
    missing = [package for package, module in modules.items() if find_spec(module) is None]
    if missing:
        raise RunError(
            f"A federation needs {' and '.join(missing)}.", do="pip install 'fedkeel[flower]'"
        )
