"""What administrators get: pages, units of systemd, a container file, and the bytes they name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest
from flwr.app import RecordDict

import sites
from commands import call, experiment
from each import each
from fedkeel.config import Experiment, load
from fedkeel.errors import ConfigError
from fedkeel.flower.apps import client_app
from fedkeel.flower.export import export, node_count
from fedkeel.flower.handout.example_node import example_node
from fedkeel.flower.handout.files import write_handout
from fedkeel.flower.handout.messages import answers, requests
from fedkeel.flower.handout.places import Places
from fedkeel.flower.local import keys
from fedkeel.flower.local.processes import NAME, FlowerProcesses, free_port
from fedkeel.flower.node.log import SENT, log_reply
from fedkeel.flower.node.node import Node
from fedkeel.flower.server.serve import RunOptions, serve
from fedkeel.flower.server.traffic import EVALUATION
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.version import __version__
from flower.units import Unit
from in_process_grid import InProcessGrid, run_on_nodes
from report.browser import BROWSER, look_at
from toys import eventually
from wires import WebProxy

HOSPITALS = Path(__file__).parents[2] / "examples" / "three_hospitals" / "experiment.toml"
CONTACT = "Ada Example, +44 20 7946 0000"
MADE_UP = "a,b,diagnosis\n" + "1.5,2.5,benign\n0.5,-1.0,malignant\n" * 20
ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes for three hospitals, by a file of the same form."""
    folder = tmp_path_factory.mktemp("hospitals")
    (folder / "made_up.csv").write_text(MADE_UP)
    words = ["--superlink", "fl.north.example:8443", "--contact", CONTACT]
    words += ["--data", str(folder / "made_up.csv")]
    done = call("flower", "export", HOSPITALS, "--out", folder / "app", *words)
    assert done.code == 0, done.err
    for name in ("node.html", "server.html"):
        assert str(folder / "app" / "for-it" / name) in done.err
    return folder / "app"


class Text(HTMLParser):
    """The text of a page, and the elements and attributes by which a page loads something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        loading = {"src", "href", "srcset", "data", "action", "poster", "background"}
        self.loads += [f"{tag} {name}" for name, _ in attributes if name in loading]
        if tag in ("script", "link", "iframe", "img", "object", "embed"):
            self.loads.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(app: Path, name: str) -> str:
    return (app / "for-it" / f"{name}.html").read_text(encoding="utf-8")


# --- bytes ----------------------------------------------------------------------------------------


def first_round(settings: Experiment, root: Path, nodes: int = 3) -> tuple[Node, RoundRecord]:
    """A node, and the record of the first round of a run in which all clients train."""
    prepared = prepare(settings, gather(settings))
    clients = range(prepared.population.clients)
    # Flower's numbers of nodes have 64 bits
    members = {
        2**63 + i: Node(prepared, frozenset(clients[i::nodes]), root / str(i)) for i in range(nodes)
    }
    run = run_on_nodes(prepared, InProcessGrid(members))
    assert run.rows[1].faults == {}
    return members[2**63], run.rows[1]


@each(
    "method",
    ["fedavg", "scaffold", "mime", "fedgc", "topk(fraction=0.1)", "quantise", "ifca(clusters=2)"],
)
def test_the_bytes_of_tensors_are_those_of_the_record(
    method: str, toy: Path, tmp_path: Path
) -> None:
    words = [f"method={method}", "rounds=1", "partition.clients=6", "cohort.clients=6"]
    settings = load(toy, words)
    folder = tmp_path / re.sub("[^a-z]", "", method)
    node, row = first_round(settings, folder)
    up: dict[str, int] = {}
    down: dict[str, int] = {}
    for items, total, times in (
        (answers(settings, node, 3), up, 6),
        (requests(settings, node, 3), down, 3),
    ):
        for item in items:
            if item.part and item.in_round:
                assert item.size is not None
                total[item.part] = total.get(item.part, 0) + times * item.size
    found = {part: count for part, count in row.bytes_up.items() if part != EVALUATION}
    assert up == {part: count for part, count in found.items() if count}
    trained = {part: count for part, count in row.bytes_down.items() if part != EVALUATION}
    assert down == {part: count for part, count in trained.items() if count}
    evaluated = [item for item in requests(settings, node, 3) if "evaluated" in item.what]
    assert bool(evaluated) == (EVALUATION in row.bytes_down) == (EVALUATION in row.bytes_up)


def test_the_bytes_of_secure_sums_are_those_of_the_record(toy: Path, tmp_path: Path) -> None:
    words = ["rounds=1", "partition.clients=6", "cohort.clients=6", "method=scaffold"]
    settings = load(toy, [*words, "flower.secure_aggregation=true"])
    node, row = first_round(settings, tmp_path)
    sent = [item for item in answers(settings, node, 3) if item.in_round]
    found = 3 * sum(item.size or 0 for item in sent if "steps and examples" not in item.what)
    assert found == pytest.approx(sum(row.bytes_up.values()), rel=0.01)
    words_of_update = [item for item in sent if item.what.startswith("The update")]
    assert words_of_update == [], "no single update is sent"


@each("metric", ["accuracy", "auroc", "auroc(bins=20)"])
def test_the_bytes_of_scores_are_at_most_those_of_the_page(metric: str, tmp_path: Path) -> None:
    """Sums that are 0 are left out where most are, so what is sent depends on the examples."""
    evaluation = {"model": "global", "clients_every": 1}
    settings = sites.experiment(
        method="ditto", rounds=2, task={"metrics": [metric]}, evaluation=evaluation
    )
    sites.write_tables(tmp_path)
    grid, out = sites.grid_of(tmp_path, settings), tmp_path / metric
    result = serve(grid, settings, RunOptions(out))
    rows = RunFolder(out).rows()
    assert rows == result.rows
    sent = answers(settings, grid.nodes[sites.FIRST], 3)
    (scores,) = [item for item in sent if item.with_scores]
    assert scores.when == "after each round"
    assert scores.size is not None
    assert scores.at_most
    evaluations = 3  # of the global model, of it by client, of the personal models
    for row, count in zip(rows[1:], [1 + evaluations, evaluations], strict=True):
        most, found = 3 * count * scores.size, row.bytes_up[EVALUATION]
        assert found == most if metric == "accuracy" else 0 < found < most
        assert row.bytes_down[EVALUATION] == count * row.bytes_down["model"]


def test_what_counts_by_score_tell_is_named(tmp_path: Path) -> None:
    sites.write_tables(tmp_path)
    data = sites.DATA | {"labels": ["no", "yes"]}
    for metric, cells in (("auroc", "30,724"), ("auroc(bins=20)", "44")):
        one = sites.experiment(data=data, task={"metrics": ["accuracy", metric]})
        node, _ = example_node(one, str(tmp_path / "0.csv"), 3)
        assert node is not None
        found = [item for item in answers(one, node, 3) if item.at_most]
        assert [item.when for item in found] == [
            "after each round",
            "at the end of a run",
        ]
        assert f"counts by score and true label for auroc ({cells} cells)" in found[0].what
        assert f"counts by score and true label ({cells} cells)" in found[1].what
        app = tmp_path / cells
        write_handout(one, app, Places(), 3, node)
        text = Text(page(app, "node")).text
        assert "the server sees the score and the true label of nearly each example" in text
        assert "auroc(bins=100)" in text
        assert "before the first round too, and after the last up to three times" in text


IN_WORDS = {
    "query.describe": "A description",
    "query.describe_data": "A description",
    "query.statistics": "Statistics of the data",
    "query.totals": "Statistics of the data",
    "train.default": "The update",
    "train.survey": "Before training",
    "train.keys": "Two new public keys",
    "train.shares": "Parts of this node's secrets",
    "train.masked": "The masked sum",
    "train.unmask": "What takes the masks off",
    "evaluate.default": "Scores of the model",
    "evaluate.personal": "and of a model of the site's own",
    "evaluate.pictures": "Counts for the pictures",
}
"""Type of a message -> what the page says of its answer."""


def test_the_page_has_words_for_every_message_that_a_node_answers(hospitals: Path) -> None:
    """A new kind of message would leave the building without being named."""
    app = client_app(hospitals / "federation" / "experiment.toml")
    assert set(app._registered_funcs) == set(IN_WORDS)
    sums = ("flower.secure_aggregation=true",)
    runs = [load(HOSPITALS), load(HOSPITALS, ["method=mime"]), load(HOSPITALS, sums)]
    words = " ".join(item.what for run in runs for item in answers(run, None, 3))
    for kind, beginning in IN_WORDS.items():
        assert beginning in words, kind


def test_a_node_says_what_it_sends_with_the_bytes_of_the_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert {f"{k}.default" if k in ("train", "evaluate") else k for k in SENT} == set(IN_WORDS)
    settings = sites.experiment(rounds=2, task={"metrics": ["accuracy"]})
    sites.write_tables(tmp_path)
    grid = sites.grid_of(tmp_path, settings)

    def said(kind: str, reply: RecordDict) -> RecordDict:
        log_reply(kind, reply)
        return reply

    grid.edits[sites.FIRST] = said
    serve(grid, settings, RunOptions(tmp_path / "run"))
    found = re.findall(r"UTC (.*), ([\d,]+) bytes$", capfd.readouterr().err, re.MULTILINE)
    lines = {words: int(size.replace(",", "")) for words, size in found}
    assert next(iter(lines)) == "for the server: a description of this site"
    page = {item.what[:6]: item.size or 0 for item in answers(settings, grid.nodes[sites.FIRST], 3)}
    trained = lines["for the server after one round: what clients have trained"]
    assert trained == pytest.approx(page["The up"] + page["Number"], abs=60)  # digits, digests
    assert lines["for the server after 2 rounds: scores of the model"] > page["Scores"] > 0


def test_what_a_site_says_of_itself_is_named(hospitals: Path) -> None:
    settings = load(hospitals / "federation" / "experiment.toml")
    node, _ = example_node(settings, str(hospitals.parent / "made_up.csv"), 3)
    assert node is not None
    (said,) = [item for item in answers(settings, node, 3) if "description" in item.what]
    described = str(node.describe()["header"]["values"])  # type: ignore[index]
    assert said.size == len(described)
    for words in ("names of the classes", "table's columns", "number of examples"):
        assert words in said.what
    assert json.loads(described)["columns"] == ["a", "b"]
    sums = load(HOSPITALS, ["data.normalize=standardize"])
    assert "mean and the sum of squared deviations" in answers(sums, None, 3)[0].what


# --- pages ----------------------------------------------------------------------------------------


@each("name", ["node", "server"])
def test_a_page_needs_nothing_else_and_has_the_federations_values(
    name: str, hospitals: Path
) -> None:
    found = Text(page(hospitals, name))
    assert found.loads == []
    assert "url(" not in page(hospitals, name)
    settings = load(hospitals / "federation" / "experiment.toml")
    node, _ = example_node(settings, str(hospitals.parent / "made_up.csv"), 3)
    for item in (*answers(settings, node, 3), *requests(settings, node, 3)):
        assert " ".join(item.what.split()) in found.text
        assert item.size is not None or "Statistics" in item.what
        assert (f"{item.size:,} byte" if item.size else "not counted") in found.text
    for words in (
        *("fl.north.example", "TCP 8443", CONTACT, "scaffold", "5 rounds", "/var/lib/fedkeel"),
        *(__version__, ".".join(version("flwr").split(".")[:2]), "60 %", "systemctl stop"),
        "Secure sums are off",
    ):
        assert words in found.text, words
    assert "superlink.example.org" not in found.text
    assert f'pip install "./fedkeel-{__version__}-py3-none-any.whl[flower]"' in found.text
    assert "fedkeel[flower]==" not in found.text  # no package index has it


def sums(text: str) -> dict[str, int]:
    """The sums of the first table of messages, by when they are sent."""
    found = re.findall(r"together (each round[a-z ]*?) (?:at most )?([\d,]+) bytes", text)
    return {when.strip(): int(size.replace(",", "")) for when, size in reversed(found)}


@each("every", [1, 5])
def test_the_sum_of_a_round_has_its_scores(every: int, hospitals: Path, tmp_path: Path) -> None:
    """The scores can be larger than all else that a round sends."""
    settings = load(hospitals / "federation" / "experiment.toml", [f"evaluation.every={every}"])
    node, _ = example_node(settings, str(hospitals.parent / "made_up.csv"), 3)
    app = tmp_path / str(every)
    write_handout(settings, app, Places(), 3, node)
    sent = answers(settings, node, 3)
    training = sum(item.size or 0 for item in sent if item.in_round)
    scores = sum(item.size or 0 for item in sent if item.what.startswith("Scores"))
    assert scores > 0
    together = {"each round": training + scores}
    if every > 1:
        together = {
            "each round without scores": training,
            "each round with scores": training + scores,
        }
    text = Text(page(app, "node")).text
    assert sums(text) == together
    assert text.count("at most") == 3  # the scores, the pictures, and the sum


def test_the_page_of_a_node_says_what_the_node_needs(hospitals: Path, tmp_path: Path) -> None:
    text = Text(page(hospitals, "node")).text
    for words in (
        "leave connections within this machine (127.0.0.1, the third line) allowed",
        "hides the update of each single site. The sum still tells something of the examples",
        "pip install torch --index-url https://download.pytorch.org/whl/cpu",
        "one processor core is enough; about 1 GB of disk",
        "several copies of the model of ",
    ):
        assert words in text, words
    assert "prevents that" not in text
    assert "download.pytorch.org/whl/cpu" in Text(page(hospitals, "server")).text
    assert "download.pytorch.org/whl/cpu" in (hospitals / "for-it" / "Dockerfile").read_text()
    app = tmp_path / "app"
    words = ["-s", "flower.secure_aggregation=true"]
    done = call("flower", "export", HOSPITALS, "--out", app, *words)
    assert done.code == 0, done.err
    for name in ("node", "server"):
        text = Text(page(app, name)).text
        assert "The sum still tells something of the examples behind it" in text


def test_a_page_without_values_has_lines_to_fill_in(tmp_path: Path) -> None:
    words = ["-s", "flower.secure_aggregation=true", "-s", "flower.secure_minimum=3"]
    done = call("flower", "export", HOSPITALS, "--out", tmp_path / "app", *words)
    assert done.code == 0, done.err
    text = Text(page(tmp_path / "app", "node")).text
    for expected in (
        "name, telephone, e-mail",
        "superlink.example.org stands for",
        "only the sites have data",
        "not counted",
        "the server sees the sum of 3 nodes or more",
        "The masked sum of the clients of this node",
    ):
        assert expected in text, expected
    assert "The update: " not in text


def test_values_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = experiment(tmp_path)
    words = ["flower", "export", file, "--out", tmp_path / "app"]
    for address in ("https://fl.example:8000", "fl.example", "fl.example:0", "fl.example:99999"):
        done = call(*words, "--superlink", address)
        assert done.code == 2
        assert "is not a host and a port" in done.err
    done = call(*words, "--data", tmp_path / "toy.npz")
    assert done.code == 2
    assert "--data goes with data.source = 'nodes'" in done.err
    assert not (tmp_path / "app").exists()
    with pytest.raises(ConfigError, match="could misread"):
        Places(state="/var/lib/two words")


def test_an_experiment_without_its_data_is_exported_all_the_same(tmp_path: Path) -> None:
    """The machine of whoever exports need not have them."""
    file = experiment(tmp_path)
    (tmp_path / "toy.npz").unlink()
    done = call("flower", "export", file, "--out", tmp_path / "app")
    assert done.code == 0, done.err
    assert "cannot be read here" in Text(page(tmp_path / "app", "node")).text


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize(("name", "width"), [("node", 420), ("server", 1400)])
def test_a_page_can_be_read_by_all(hospitals: Path, tmp_path: Path, name: str, width: int) -> None:
    seen = look_at(page(hospitals, name), tmp_path, width=width, dark=width == 420)
    assert seen.console == []
    assert seen.needed <= seen.width == width
    assert (seen.violations, seen.bare) == ([], 0)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("name", ["node", "server"])
def test_a_page_is_printed_on_both_sides_of_one_sheet(
    hospitals: Path, tmp_path: Path, name: str
) -> None:
    pdf = printed(hospitals / "for-it" / f"{name}.html", tmp_path)
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf)) <= 2
    assert b"/MediaBox [0 0 594" in pdf or b"/MediaBox [0 0 595" in pdf  # A4


def printed(file: Path, folder: Path) -> bytes:
    """A page as Chromium prints it."""
    out = folder / "page.pdf"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    subprocess.run(
        [str(BROWSER), *options, f"--user-data-dir={folder}", f"--print-to-pdf={out}", str(file)],
        check=True,
        capture_output=True,
        timeout=240,
    )
    return out.read_bytes()


# --- units ----------------------------------------------------------------------------------------


def written(folder: Path, settings: Experiment, places: Places) -> Path:
    """The folder of what is written for administrators, without counted bytes."""
    export(settings, folder / "app", places)
    write_handout(settings, folder / "app", places, node_count(settings), None)
    return folder / "app" / "for-it"


@each("name", ["node", "superlink"])
def test_a_unit_may_write_to_one_folder_and_has_no_rights(name: str, hospitals: Path) -> None:
    unit = Unit.read(hospitals / "for-it" / f"fedkeel-{name}.service")
    for key, value in (
        *(("User", "fedkeel"), ("NoNewPrivileges", "yes"), ("ProtectSystem", "strict")),
        *(("ProtectHome", "yes"), ("PrivateTmp", "yes"), ("CapabilityBoundingSet", "")),
        *(("ReadWritePaths", "/var/lib/fedkeel"), ("Restart", "always"), ("UMask", "0077")),
    ):
        assert unit.only(key) == value, key
    assert unit.only("WantedBy", "Install") == "multi-user.target"
    state = re.findall(r'(?:state="|--database )([^" ]+)', unit.only("ExecStart"))
    home = [unit.environment[key] for key in ("HOME", "FLWR_HOME")]
    for path in (*state, *home, unit.only("WorkingDirectory")):
        assert f"{path}/".startswith("/var/lib/fedkeel/"), path
    assert state
    assert unit.environment["FLWR_TELEMETRY_ENABLED"] == "0"


def test_flower_knows_the_options_of_the_units(hospitals: Path) -> None:
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    folder = hospitals / "for-it"
    node = Unit.read(folder / "fedkeel-node.service").command(NUMBER="2", OPTIONS="")
    assert node[:3] == ["/opt/fedkeel/bin/fedkeel", "flower", "node"]
    found = _parse_args_run_supernode().parse_args(node[3:])
    assert found.superlink == "fl.north.example:8443"
    assert found.auth_supernode_private_key == "/etc/fedkeel/node-2"
    assert found.node_config.startswith("partition-id=2 num-partitions=3 state=")
    link = Unit.read(folder / "fedkeel-superlink.service").command()
    options = _parse_args_run_superlink().parse_args(link[1:])
    assert (options.host, options.port) == ("127.0.0.1", 8001)
    assert options.enable_supernode_auth


@pytest.mark.skipif(ANALYZE is None, reason="there is no systemd on this machine")
def test_systemd_finds_no_fault_in_the_units(toy: Path, tmp_path: Path) -> None:
    programs = str(Path(sys.executable).parent)  # those that a unit starts have to be there
    folder = written(tmp_path, load(toy), Places(programs=programs))
    for name in ("fedkeel-node.service", "fedkeel-superlink.service"):
        for words in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=35"]):
            done = subprocess.run(
                [str(ANALYZE), *words, str(folder / name)],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "Unknown" not in done.stderr, done.stderr


# --- the container --------------------------------------------------------------------------------

INSTRUCTIONS = {"FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a container file; comments are left out, long lines are joined."""
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def entry_point(file: Path) -> tuple[list[str], dict[str, str]]:
    """The words that a container starts, and its variables."""
    found = instructions(file)
    (entry,) = [text for word, text in found if word == "ENTRYPOINT"]
    variables = {
        name: value.strip('"')
        for word, text in found
        if word == "ENV"
        for name, value in re.findall(r'(\w+)=("[^"]*"|\S*)', text)
    }
    return json.loads(entry), variables


def test_the_container_file_holds_together(hospitals: Path) -> None:
    """No container is built here: the file is read, and its entry point is started below."""
    file = hospitals / "for-it" / "Dockerfile"
    found = instructions(file)
    names = [name for name, _ in found]
    assert set(names) == INSTRUCTIONS
    assert names[0] == "FROM"
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert ("USER", "fedkeel") in found
    runs = " ".join(text for name, text in found if name == "RUN")
    wheel = f"fedkeel-{__version__}-py3-none-any.whl"
    assert ("COPY", f"{wheel} /tmp/") in found
    assert f'"/tmp/{wheel}[flower]"' in runs
    assert "useradd --system --uid 1000" in runs
    words, variables = entry_point(file)
    assert words[:2] == ["/bin/sh", "-c"]
    assert set(re.findall(r"\$(\w+)", words[2])) <= set(variables)
    comments = [line for line in file.read_text("utf-8").splitlines() if line.startswith("#")]
    started = " ".join(line.strip("# \\") for line in comments)
    for option in ("--read-only", "--cap-drop ALL", "no-new-privileges", "/etc/fedkeel:ro"):
        assert option in started


@pytest.mark.processes
def test_what_the_unit_and_the_container_start_joins_a_federation(
    toy: Path, tmp_path: Path, patience: float
) -> None:
    """Node 0 by the unit and node 1 by the entry point, as they stand there: with TLS and keys.

    Node 1 reaches the server through a web proxy, as the page says.
    """
    folder = tmp_path / "federation"
    keys.make(folder / "keys", ["127.0.0.1", "localhost"], 2)
    with (
        FlowerProcesses(folder, [], secure=True) as federation,
        closing(WebProxy()) as proxy,
    ):
        places = Places(
            superlink=f"localhost:{federation.port}",
            programs=str(Path(sys.executable).parent),
            settings=str(folder / "keys"),
            state=str(tmp_path / "state"),
        )
        settings = load(toy, ["partition.clients=2", "cohort.clients=2", "rounds=1"])
        handout = written(tmp_path, settings, places)
        Path(places.state).mkdir()
        unit = Unit.read(handout / "fedkeel-node.service")
        entry, variables = entry_point(handout / "Dockerfile")
        path = f"{places.programs}:{federation.environment['PATH']}"
        for number in range(2):
            federation.flwr(
                "supernode", "register", str(federation.keys / f"node-{number}.pub"), NAME
            )
        own = f"--port {free_port()}"
        federation.start("node-0", unit.command(NUMBER="0", OPTIONS=own), unit.environment)
        own = f"--port {free_port()}"
        mine = {**variables, "PATH": path, "NUMBER": "1", "OPTIONS": own}
        mine |= {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.port}", "NO_PROXY": "127.0.0.1"}
        federation.start("node-1", entry, mine)
        run = federation.submit(tmp_path / "app", {"out": str(tmp_path / "run")})
        assert eventually(lambda: federation.status(run).startswith("finished"), 20 * patience), (
            federation.tail("node-0"),
            federation.tail("node-1"),
        )
        assert federation.status(run) == "finished:completed"
        assert set(proxy.asked) == {f"CONNECT localhost:{federation.port} HTTP/1.1"}
    row = RunFolder(tmp_path / "run").rows()[-1]
    assert (row.round, row.clients, row.faults) == (1, [0, 1], {})
    assert (Path(places.state) / "flwr").is_dir(), "Flower's files are where the unit lets it write"
