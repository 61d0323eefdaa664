"""The files for containers fit each other, the package, and the programs that they start.

No container is built here: options are compared with what the programs accept, and paths with what
the files mount.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedkeel.flower.local.keys import make

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy"


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FILES / "compose.yaml").read_text("utf-8"))["services"]
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Path in the container -> where it comes from."""
    texts = [text.removesuffix(":ro") for text in service.get("volumes", [])]
    return {text.rsplit(":", 1)[1]: text.rsplit(":", 1)[0] for text in texts}


@pytest.mark.parametrize("name", sorted(services()))
def test_what_a_program_reads_is_mounted(name: str) -> None:
    service = services()[name]
    command = " ".join(service["command"])
    read = set(re.findall(r"/(?:keys|data|app)/?[\w.$-]*", command))
    read = {path.replace("$$n", number) for path in read for number in "012"}
    assert read <= set(mounts(service)), name


def test_the_keys_are_those_that_the_command_makes(tmp_path: Path) -> None:
    make(tmp_path / "keys", ["superlink", "127.0.0.1"], 3)
    made = {path.name for path in (tmp_path / "keys").iterdir()}
    wanted = {
        Path(source).name
        for service in services().values()
        for source in mounts(service).values()
        if source.startswith("./keys/")
    }
    assert wanted <= made
    private = [n for n, s in services().items() if "./keys/server.key" in mounts(s).values()]
    assert private == ["superlink"]
    for number in range(3):
        service = services()[f"node-{number}"]
        assert mounts(service)["/keys/node"] == f"./keys/node-{number}"
        assert f"partition-id={number} num-partitions=3" in service["command"][-1]


def test_flower_knows_the_options() -> None:
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    superlink = {option.split("=")[0] for option in services()["superlink"]["command"][1:]}
    assert superlink <= set(_parse_args_run_superlink()._option_string_actions)
    node = {option.split("=")[0] for option in services()["node-0"]["command"][3:]}
    assert node <= set(_parse_args_run_supernode()._option_string_actions)


def test_the_superlink_is_found_by_its_name() -> None:
    config = tomllib.loads((FILES / "flwr.toml").read_text("utf-8"))["superlink"]
    host, port = config[config["default"]]["address"].split(":")
    assert host in services()
    assert f"--port={port}" in services()[host]["command"]
    assert config["default"] in services()["submit"]["command"]


def test_the_image_copies_what_a_build_needs() -> None:
    lines = (FILES / "Dockerfile").read_text("utf-8").splitlines()
    copied = [w for line in lines if line.startswith("COPY ") for w in line.split()[1:-1]]
    files = [name for name in copied if not name.startswith(("--", "/"))]
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= set(files)
    assert all((ROOT / name).exists() for name in files)
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert not set(ignored) & set(files)
