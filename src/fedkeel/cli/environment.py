"""What a bug report has to say of a machine: versions, processor, GPU, settings by environment."""

from __future__ import annotations

import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

import typer

from fedkeel.version import __version__

_VARIABLES = re.compile(r"FEDKEEL_|FLWR_|OMP_|MKL_|OPENBLAS_|CUDA_VISIBLE|PYTORCH_|TORCH")
"""Names of environment variables that change what a run does."""


def version_text() -> str:
    """Return the version, and behind it what it runs on; nothing slow is imported.

    >>> version_text().splitlines()[0] == __version__
    True
    """
    facts = [f"python {platform.python_version()}", f"torch {_version('torch')}", _system()]
    if commit := _commit():
        facts.append(f"commit {commit}")
    return f"{__version__}\n{', '.join(facts)}"


def _print(value: bool) -> None:
    if value:
        print(environment_text())
        raise typer.Exit


ENVIRONMENT = typer.Option(
    False,
    "--environment",
    callback=_print,
    is_eager=True,
    help="Print what a bug report has to say of this machine, and end.",
)


def environment_text() -> str:
    """Return versions, processor, GPU and settings by environment, one fact a line.

    Paths below the home folder begin with ``~``: a report can be published as it is.
    """
    import torch

    from fedkeel.base.memory import format_bytes, free_memory
    from fedkeel.runner.manifest import environment

    facts = environment()
    free, commit, gpus = free_memory(), _commit(), range(torch.cuda.device_count())
    lines = {
        "fedkeel": f"{__version__} commit {commit}" if commit else __version__,
        "installed": _without_home(str(Path(__file__).parents[1])),
        "python": f"{facts.python} {platform.python_implementation()}",
        "system": f"{_system()}, {platform.platform()}",
        "processor": f"{facts.processor}, {facts.cores} cores for this process",
        "memory": "unknown" if free is None else f"{format_bytes(free)} free",
        "gpu": ", ".join(map(torch.cuda.get_device_name, gpus)) or "none for torch",
        "threads": str(torch.get_num_threads()),
    }
    packages = {name: _version(name) for name in _packages()}
    variables = {
        name: _without_home(value)
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name) and not re.search(r"KEY|TOKEN|SECRET|PASSWORD", name)
    }
    return "\n".join(
        f"{name:<20} {value}"
        for facts_of_kind in (lines, packages, variables)
        for name, value in facts_of_kind.items()
    )


def _packages() -> list[str]:
    """Return the names of all packages that fedkeel, or an extra of it, asks for."""
    try:
        texts = requires("fedkeel") or []
    except PackageNotFoundError:  # a checkout that is not installed
        texts = ["torch", "numpy"]
    names = [match[0] for text in texts if (match := re.match(r"[\w.-]+", text))]
    return sorted({name.lower() for name in names} - {"fedkeel"})


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _system() -> str:
    return f"{platform.system()} {platform.machine()}"


def _without_home(text: str) -> str:
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _commit() -> str:
    """Return the commit of a checkout, or of a package installed from a repository; "" else."""
    root = Path(__file__).parents[3]
    try:
        head = (root / ".git" / "HEAD").read_text(encoding="utf-8").strip()
        if head.startswith("ref: "):
            head = (root / ".git" / head.removeprefix("ref: ")).read_text(encoding="utf-8").strip()
        return head[:8]
    except OSError:
        pass
    try:
        source = json.loads(distribution("fedkeel").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    return str(source.get("vcs_info", {}).get("commit_id", ""))[:8]
