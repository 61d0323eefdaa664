"""Build fedkeel as it is released, look into it, install it, and try it.

    python release/check.py                 # sdist, wheel, twine, a bare environment
    python release/check.py --extras all    # and an environment for each extra
    python release/check.py --extras tune,onnx
    python release/check.py --lowest        # with the oldest versions of what it depends on
    python release/check.py --tag v0.2.0    # and the tag is that of the version

`constraints.txt` says which torch is installed, so that all environments share one download.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedkeel"
PINS = ROOT / "constraints.txt"

IN_SDIST = (
    "src/",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "MANIFEST.in",
    "PKG-INFO",
    "setup.cfg",
)
"""What a source distribution may hold: what a wheel is built of, and nothing else."""


def run(*words: str | Path) -> None:
    """Run a program; what fails ends the check."""
    print("+", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True)


def environment(folder: Path, *packages: str, pins: Path = PINS) -> Path:
    """Make an environment that has these packages alone, with these pins; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, f"--constraint={pins}", *packages)
    return python


def project() -> dict[str, Any]:
    """Return what pyproject.toml says of the project."""
    values: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(values["project"])


def lowest_pins(tools: Path, extra: str) -> Path:
    """Return pins of the oldest versions that the base install, or an extra with it, promises.

    Of torch it is the version in constraints.txt. An extra may need a later version of something
    than the base install does.

    Args:
        tools: a Python that has uv.
        extra: its name, or ``base``.
    """
    folder = tools.parents[1]
    torch, pins = folder / "torch.txt", folder / f"lowest-{extra}.txt"
    lines = PINS.read_text(encoding="utf-8").splitlines()
    torch.write_text("\n".join(line for line in lines if line.startswith("torch==")))
    version = f"--python-version={sys.version_info.major}.{sys.version_info.minor}"
    options = ("--quiet", "--resolution=lowest-direct", version, f"--constraint={torch}")
    wanted = () if extra == "base" else (f"--extra={extra}",)
    source, out = ROOT / "pyproject.toml", f"--output-file={pins}"
    run(tools, "-m", "uv", "pip", "compile", *options, *wanted, source, out)
    return pins


def build(python: Path, folder: Path) -> tuple[Path, Path]:
    """Build sdist and wheel, the wheel from the sdist; check both with twine."""
    run(python, "-m", "build", "--outdir", folder / "dist", ROOT)
    (sdist,), (wheel,) = (tuple((folder / "dist").glob(name)) for name in ("*.tar.gz", "*.whl"))
    run(python, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def look_into(sdist: Path, wheel: Path) -> None:
    """Refuse distributions that lack a file of the package, or hold another one."""
    ours = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    if names != ours:
        lacking, more = sorted(ours - names), sorted(names - ours)
        raise SystemExit(f"the wheel lacks {lacking[:5]}, and has {more[:5]} beside the package")
    with tarfile.open(sdist) as archive:
        files = [name.partition("/")[2] for name in archive.getnames() if "/" in name]
    odd = [name for name in files if name != "src" and not name.startswith(IN_SDIST)]
    if odd:
        raise SystemExit(f"the sdist holds {odd[:5]}")
    if lacking := sorted(ours - {name.removeprefix("src/") for name in files}):
        raise SystemExit(f"the sdist lacks {lacking[:5]}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def check_tag(tag: str) -> None:
    """Refuse a tag of another version, or a version that is not to be released."""
    text = (PACKAGE / "version.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.+)"', text)
    if version is None or tag != f"v{version[1]}" or "dev" in version[1]:
        raise SystemExit(f"the tag is {tag}, and version.py has {version and version[1]}")


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", default="", help="names with commas between, or all")
    parser.add_argument("--lowest", action="store_true", help="the oldest promised versions")
    parser.add_argument("--tag", help="the tag that is released")
    parser.add_argument("--out", type=Path, help="folder for the distributions that were checked")
    arguments = parser.parse_args()
    if arguments.tag:
        check_tag(arguments.tag)
    known = [name for name in project()["optional-dependencies"] if name not in ("dev", "docs")]
    names = known if arguments.extras == "all" else arguments.extras.split(",")
    extras = [name for name in names if name]
    if unknown := sorted(set(extras) - set(known)):
        parser.error(f"there is no extra {unknown[0]}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = environment(folder / "tools", "build", "twine", "uv")
        sdist, wheel = build(tools, folder)
        look_into(sdist, wheel)
        for extra in ("base", *extras):
            what = str(wheel) if extra == "base" else f"fedkeel[{extra}] @ {wheel.as_uri()}"
            pins = lowest_pins(tools, extra) if arguments.lowest else PINS
            python = environment(folder / extra, what, pins=pins)
            run(python, "-m", "pip", "check")
            run(python, "-P", Path(__file__).with_name("smoke.py"), extra)
        for file in (sdist, wheel) if arguments.out else ():
            arguments.out.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, arguments.out)
    print("\nthe release can be made")


if __name__ == "__main__":
    main()
