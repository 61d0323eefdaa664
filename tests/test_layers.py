"""Imports point one way: the test parses them, and fails on an arrow that runs back.

    config -> data -> task -> method -> engine -> runner -> features -> study -> reproduce, cli

`solve` is pure mathematics, used by method; `report` reads records and knows no engine. `base`,
`errors`, `tree`, `version` and `records` are leaves that anybody may use.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from fedkeel.base.feature import declarations

SOURCE = Path(__file__).parents[1] / "src" / "fedkeel"

LEAVES = frozenset({"base", "errors", "records", "tree", "version"})
DOMAIN = LEAVES | {"config", "data", "task", "method"}

ALLOWED: dict[str, frozenset[str]] = {
    "base": frozenset({"errors"}),  # it loads features by their names
    "errors": frozenset(),
    "version": frozenset(),
    "tree": frozenset({"base"}),  # torch, when it is used
    "config": frozenset({"base", "errors"}),
    "records": frozenset({"base", "config", "errors"}),
    "report": frozenset({"base", "records", "errors"}),
    "data": LEAVES | {"config"},
    "task": LEAVES | {"config", "data"},
    "solve": LEAVES,
    "method": LEAVES | {"config", "data", "task", "solve"},
    "engine": DOMAIN,
    "runner": DOMAIN | {"engine", "report"},
    "features": DOMAIN | {"solve", "engine", "report", "runner"},  # that load it by its name only
    "study": DOMAIN | {"engine", "features", "runner", "report"},
    "flower": DOMAIN | {"engine", "features", "runner", "report"},
    "conformance": frozenset({"study"}),  # the public name of `study.conformance`
    "reproduce": DOMAIN | {"engine", "features", "runner", "study", "report"},
}
"""Room -> the rooms it may import besides itself."""
ALLOWED["cli"] = LEAVES | frozenset(ALLOWED) - {"conformance"}
ALLOWED["__init__"] = ALLOWED["cli"]  # the public names
ALLOWED["__main__"] = frozenset({"cli"})  # python -m fedkeel

Arrow = tuple[str, str, str]
"""(module and line, room that imports, room that is imported)"""


def room(module: str) -> str:
    """The room of a module of the package, by its full name."""
    return module.split(".")[1] if "." in module else "__init__"


def arrows(text: str, module: str, package: bool = False) -> list[Arrow]:
    """Every import of a module that stays within the package, also for types and in functions."""
    found: list[Arrow] = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = imported(node, module, package)
        for name in names:
            if name.split(".")[0] == "fedkeel":
                found.append((f"{module}:{node.lineno}", room(module), room(name)))
    return found


def imported(node: ast.ImportFrom, module: str, package: bool) -> list[str]:
    """The modules that ``from ... import ...`` names; of a bare package, its sub-modules."""
    base = node.module or ""
    if node.level:
        parents = module.split(".")[: len(module.split(".")) - node.level + package]
        base = ".".join([*parents, *([node.module] if node.module else [])])
    if base != "fedkeel":
        return [base]
    return [f"fedkeel.{alias.name}" for alias in node.names]


def every() -> list[Arrow]:
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        module = ".".join(p for p in parts if p != "__init__")
        found += arrows(file.read_text(encoding="utf-8"), module, file.name == "__init__.py")
    return found


def wrong(found: list[Arrow]) -> list[str]:
    """The arrows that run back."""
    return [
        f"{at}: {source} imports {target}"
        for at, source, target in found
        if source != target and target not in ALLOWED.get(source, frozenset())
    ]


def test_no_arrow_runs_back() -> None:
    assert wrong(every()) == []


def test_there_are_few_rooms() -> None:
    assert len([p for p in SOURCE.iterdir() if (p / "__init__.py").exists()]) <= 15


def test_every_room_is_known() -> None:
    rooms = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms == set(ALLOWED)


def test_the_test_sees_the_imports() -> None:
    """A parser that saw nothing would find nothing wrong."""
    found = {(source, target) for _, source, target in every()}
    assert {("engine", "method"), ("cli", "runner"), ("method", "tree")} <= found
    assert not any(target == "cli" for source, target in found if source not in ("cli", "__main__"))


@pytest.mark.parametrize(
    "line",
    [
        "from fedkeel.cli import main",
        "import fedkeel.cli.common",
        "from fedkeel import cli",
        "from ..cli import main",
        "from .. import cli",
        "if TYPE_CHECKING:\n    from fedkeel.cli import main",
        "def later() -> None:\n    from fedkeel.cli import main",
    ],
)
def test_an_arrow_that_runs_back_is_found(line: str) -> None:
    assert wrong(arrows(line, "fedkeel.engine.local"))


def module_name(file: Path) -> str:
    """The full name of a module of the package."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def module_graph() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports when it is imported itself."""
    files = {module_name(file): file for file in SOURCE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        names: set[str] = set()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of_name = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (of_name & files.keys()) or {str(node.module)}
        graph[module] = (names & files.keys()) - {module}
    return graph


def reachable(graph: dict[str, set[str]], module: str) -> set[str]:
    """The modules that a module imports, and those that these import, and so on."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_no_import_is_for_types_only() -> None:
    """Only the public names are imported for type checkers and loaded when they are used.

    So are torch, and the network beside a part's declaration, which is read without torch. Settings
    and records of features are attributes that a checker is not to know.
    """
    of_features = ("config/__init__.py", "config/settings.py", "records/rows.py")
    without_torch = ("base/lazy.py", "method/context.py", "task/__init__.py")
    known = ("__init__.py", *of_features, "records/run_record.py", *without_torch)
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).as_posix() not in known:
            assert "TYPE_CHECKING" not in file.read_text(encoding="utf-8"), file


def test_no_modules_import_each_other() -> None:
    graph = module_graph()
    assert "fedkeel.method.context" in graph["fedkeel.method.roles"]  # it sees the imports
    assert [module for module in graph if module in reachable(graph, module)] == []


def test_the_reference_path_knows_no_trick() -> None:
    """Only the store keeps its table of slots in memory that processes may share."""
    graph = module_graph()
    path = {"fedkeel.engine.sequential", *reachable(graph, "fedkeel.engine.sequential")}
    tricks = ("vectorized", "compiler", "low_rank", "padding", "reply_rows", "round_buffers")
    assert not {module for module in path if any(trick in module for trick in tricks)}
    users = {module for module in path if "fedkeel.engine.buffers" in graph[module]}
    assert users <= {"fedkeel.engine.store.base"}


def imports_of(folder: str) -> set[str]:
    """The modules of the package that the modules of a folder import, also in functions."""
    names: set[str] = set()
    for file in (SOURCE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, file
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(("folder", "other"), [("server", "node"), ("node", "server")])
def test_the_ends_of_a_federation_are_apart(folder: str, other: str) -> None:
    """Server and node share only the protocol."""
    names = imports_of(f"flower/{folder}")
    assert any(name.startswith("fedkeel.flower.protocol.") for name in names)
    for end in (other, "local"):
        assert not [name for name in names if name.startswith(f"fedkeel.flower.{end}")]


def test_the_apps_of_a_federation_import_each_end_when_it_is_made() -> None:
    """A node's process does not import the server, nor the server a node."""
    tree = ast.parse((SOURCE / "flower" / "apps.py").read_text(encoding="utf-8"))
    names = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if str(name).startswith("fedkeel.flower")]


PACKAGE_OF = {
    "Crypto": "pycryptodome",
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "sklearn": "scikit-learn",
}
"""Name that is imported -> name that is installed, where they differ."""

WITHIN = {"markupsafe": "jinja2", "pydantic_core": "pydantic"}
"""Package -> the one that is declared and is nothing without it."""


def declared() -> set[str]:
    """The packages that pyproject.toml asks for, with every extra that users have."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = (
        "ray",
        "tune",
        "metrics",
        "flower",
        "figures",
        "privacy",
        "mlflow",
        "wandb",
        "hf",
        "onnx",
    )
    wanted = [*project["dependencies"], *(one for extra in used for one in extras[extra])]
    return {re.split(r"[<>=]", one)[0].replace("-", "_") for one in wanted}


def foreign(text: str) -> set[str]:
    """The packages that a module imports and that are neither Python's nor ours."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).split(".")[0])
    return found - sys.stdlib_module_names - {"fedkeel"}


def test_what_is_imported_is_asked_for() -> None:
    """What another package happens to bring may be gone with its next version, as click went."""
    used = set().union(*(foreign(f.read_text(encoding="utf-8")) for f in SOURCE.rglob("*.py")))
    packages = {WITHIN.get(name, PACKAGE_OF.get(name, name)) for name in used}
    assert {"torch", "flwr", "optuna", "typer"} <= packages
    assert {name.replace("-", "_") for name in packages} <= declared()


def importers(package: str) -> set[str]:
    """The modules outside of a package that import from it."""
    pattern = re.compile(rf"(from|import) {re.escape(package)}\b")
    texts = {
        ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts): file.read_text("utf-8")
        for file in SOURCE.rglob("*.py")
    }
    outside = {module: text for module, text in texts.items() if not module.startswith(package)}
    return {module for module, text in outside.items() if pattern.search(text)}


def test_only_the_vectorized_engine_imports_the_compiler() -> None:
    found = importers("fedkeel.engine.compiler")
    assert found
    assert all(module.startswith("fedkeel.engine.vectorized.") for module in found)


def test_the_reference_path_does_not_import_the_vectorized_engine() -> None:
    plain = {"base", "local", "sequential", "workers", "reply_rows", "round_buffers", "prepared"}
    found = importers("fedkeel.engine.vectorized")
    assert found
    assert not found & {f"fedkeel.engine.{name}" for name in plain}
    others = ("fedkeel.engine.store", "fedkeel.engine.compiler")
    assert not any(module.startswith(others) for module in found)


PATH_OF_A_ROUND = (
    "runner/loop.py",
    "runner/training.py",
    "engine/sequential.py",
    "engine/local.py",
    "method/local_loop.py",
    "method/local_optimiser.py",
    "method/server_round.py",
)
"""The files in which one reads how a round runs: all that it passes, from the message on."""


def lines_of(module: str) -> int:
    """The number of lines of a module."""
    file = SOURCE.parent / module.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return len(file.read_text("utf-8").splitlines())


def test_the_path_of_a_round_is_short() -> None:
    lines = [len((SOURCE / file).read_text("utf-8").splitlines()) for file in PATH_OF_A_ROUND]
    # 35 say which of several models a client receives, 30 train on public inputs first
    assert sum(lines) <= 1600
    page = (SOURCE.parents[1] / "docs" / "concepts" / "round.md").read_text("utf-8")
    assert all(f"`{file}`" in page for file in PATH_OF_A_ROUND)


def test_the_core_is_small() -> None:
    """Methods without their parts and pages, the reference engine with what it imports, a run.

    Some 230 lines of it are for clients with different networks, of which a store for each is half,
    and 120 for public inputs, which the loop, the contexts and a role know.
    """
    graph = module_graph()
    core = {"fedkeel.engine.sequential", *reachable(graph, "fedkeel.engine.sequential")}
    core = {module for module in core if module.startswith("fedkeel.engine")}
    core |= {m for m in graph if m.startswith(("fedkeel.method", "fedkeel.runner"))}
    aside = ("fedkeel.method.parts", "fedkeel.method.docs")
    assert sum(lines_of(m) for m in core if not m.startswith(aside)) < 12_600


def test_preparing_a_run_is_short() -> None:
    assert lines_of("fedkeel.runner.prepare") < 200


def test_the_core_names_no_feature() -> None:
    """Features are found in a list: what makes, follows, records and shows a run knows none."""
    rooms = ("config", "engine", "method", "records", "report", "runner", "task")
    for room_name in rooms:
        assert "fedkeel.features" not in {
            ".".join(name.split(".")[:2]) for name in imports_of(room_name)
        }
    of_budget = {"config.Privacy", "privacy_of", "account_of", "PrivacyBudget"}
    of_selection = {"SelectionByLosses", "SelectorByLosses", "local_losses"}
    of_stop = {"settings.stop", "config.Stop", "EarlyStopping", "BestModelKeeper"}
    of_baselines = {"CENTRALISED", "ClientModels", "pooled_work", "in_one_place"}
    of_track = {"settings.track", "config.Track", "Tracking"}
    of_attackers = {"attack", "Attack", "adversar", "Adversar", "poisoned"}
    of_personal = {"with_personal_scores", "with_client_scores", "score_columns"}
    of_time = {"virtual", "settings.system", "config.System", "Trainings", "Arrivals"}
    of_sums = {"flower.secure_", "secure_sums", "SecureSum"}
    used = of_budget | of_selection | of_stop | of_baselines | of_track | of_attackers | of_personal
    of_diagnose = {"settings.diagnose", "config.Diagnose", "Observer", "RoundDiagnostics"}
    used |= of_sums | of_time | of_diagnose
    for room_name in rooms:
        for file in (SOURCE / room_name).rglob("*.py"):
            is_core = not {"parts", "docs", "models"} & {*file.parts}
            if is_core and "audit" not in file.name:  # `fk.audit` calls its trials attacks, too
                assert not {word for word in used if word in file.read_text("utf-8")}, file
                is_method = room_name == "method"  # a part is told how old the updates are
                assert is_method or "staleness" not in file.read_text("utf-8"), file


def test_features_import_only_what_they_need() -> None:
    """One feature imports another only where its declaration says so."""
    folder_of = {kind.__module__.split(".")[2]: kind for kind in declarations().values()}
    for folder, kind in folder_of.items():
        others = {
            name.split(".")[2]
            for name in imports_of(f"features/{folder}")
            if name.startswith("fedkeel.features.")
        }
        tables = {folder_of[other].table for other in others - {folder}}
        assert tables == set(kind.needs), folder
