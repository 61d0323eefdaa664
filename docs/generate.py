"""Write the pages that follow from the code: methods, legality matrix, settings, run folder.

    python docs/generate.py            # into docs/
    python docs/generate.py --out DIR  # elsewhere

The pages are committed; a test fails where they are not what the code says.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import shutil
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from fedkeel.config.base import Settings
from fedkeel.config.search_space import Range, Value
from fedkeel.config.settings import Experiment
from fedkeel.errors import FedkeelError
from fedkeel.method.context import ClientInfo, Cohort, Outcome, Population, Round, Step
from fedkeel.method.docs.bibliography import reference
from fedkeel.method.docs.page import markdown, page
from fedkeel.method.legality import BREAKS, LEGAL, REASONS, Verdict, verdict
from fedkeel.method.registry import ALIASES, REGISTRY
from fedkeel.method.roles import ROLES, SLOTS, Capability, Part
from fedkeel.records import folder as run_folder
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.run_record import RunRecord
from fedkeel.solve.span import Span
from fedkeel.study.footprint import footprint, told
from fedkeel.task.network import Batch, Output

COMMAND = "python docs/generate.py"
NOTICE = f"<!-- Written by `{COMMAND}` from the code. Do not edit. -->\n\n"

TABLES = (
    *("data", "partition", "model", "local", "local.schedule", "cohort", "evaluation", "stop"),
    *("engine", "compare", "tune", "flower"),
)
"""Tables of an experiment file, in the order of the page."""

SETTINGS = """\
# The experiment file

What `fedkeel run`, `compare`, `tune`, `check`, `data inspect` and `flower` read. They take
changes with `-s KEY=VALUE`, by dotted key: `-s local.lr=0.05 -s partition.alpha=0.5`. `unset`
takes away what the file sets, so that its default counts: `-s local.epochs=unset -s local.steps=9`.
An unknown key is an error that names the nearest known one. `config.toml` in a run folder is such
a file, with every default written out.

Only `rounds`, `data.source`, `model.name`, `local.lr`, `local.epochs` or `local.steps`, and what
the kind of partition asks for are needed. Relative paths, and modules such as `my_net` in
`my_net:Net`, are looked for in the folder in which `fedkeel` is called, wherever the file is.

```toml
name = "example"
method = "fedavg"                 # for `run`; `compare` and `tune` take [compare] methods
rounds = 20
seed = 0

[data]
source = "digits"                 # or a file or folder of your own: "hospital.csv"
normalize = "standardize"

[partition]
kind = "dirichlet"
clients = 20
alpha = 0.1

[model]
name = "mlp"                      # or a class of your own: "my_net:Net"
args = { hidden = [64] }

[local]
lr = 0.1
epochs = 2
batch_size = 20

[local.schedule]
kind = "cosine"
final = 0.1

[cohort]
clients = 5
dropout = 0.1

[evaluation]
every = 2
target = 0.8

[stop]
patience = 15

[engine]
kind = "sequential"

[compare]
methods = ["fedavg", "momentum", "fedgh+gradma.s"]
seeds = 2

[tune]
metric = "last_mean"

[tune.space]
"local.lr" = [0.03, 0.1, 0.3]

[tune.method.momentum]
beta = [0.5, 0.9]

[flower]
deadline_seconds = 120
```

A dash as default, and None in the text, mean that the key is not set.
"""

RUN_FOLDER = """\
# The run folder

`fedkeel run` and `fk.run(..., out="runs/x")` write one folder for each run:

```text
{files}
```

{after}

`fedkeel compare` writes such a folder for each run into its own, and `comparison.json`, which
lists them: `method`, `seed` and `folder` of each. Runs of earlier calls stay listed where they have
the same settings, the same version, and by `run.json` the same model and data; others keep their
folder and are in no table. `fedkeel tune` does so with `tune.json`,
see [its page](tune.md#stopping-and-going-on).

## Reading it

`rounds.jsonl` has one JSON object a line, [described below](#a-row-of-roundsjsonl). With pandas,
which fedkeel does not need and does not install:

```python
import json
from pathlib import Path

import pandas as pd

lines = Path("runs/x/rounds.jsonl").read_text().splitlines()
rows = pd.json_normalize([json.loads(line) for line in lines])
print(rows[["round", "test.top1", "train_loss", "bytes_up.model"]])
```

Nested objects become columns with dots: `test.top1`, `seconds.evaluation`. Where a round was not
evaluated these are NaN. All runs of a comparison in one table:

```python
import json
from pathlib import Path

import pandas as pd

folder = Path("runs/digits")
tables = []
for run in json.loads((folder / "comparison.json").read_text())["runs"]:
    lines = (folder / run["folder"] / "rounds.jsonl").read_text().splitlines()
    table = pd.json_normalize([json.loads(line) for line in lines])
    tables.append(table.assign(method=run["method"], seed=run["seed"]))
rows = pd.concat(tables, ignore_index=True)
print(rows.groupby(["method", "round"])["test.top1"].agg(["mean", "std"]))
```

In Python the rows are `result.rows`, and what stands in `run.json` is `result.record`.

## The trained model

A finished run leaves `model.safetensors`: the global model after the last round, as the state
dict of the module, with all parameters, frozen ones too, and all buffers. In Python
`result.state_dict()` is the same. How to load it, and what new data need:
[README](../README.md#the-trained-model). Where clients keep their buffers (`model.buffers =
"local"`) those in the file are the initial ones, see [batch
normalisation](choosing.md#batch-normalisation).

## The checkpoint

What a run needs to go on with the same bits. It is saved when `engine.checkpoint_seconds` have
passed since the last save, and at the end; an older one is removed when the new one is complete.
`state.json` has the rounds completed and the run's key. `arrays.safetensors` has, by path:

- `server/params/NAME`: the parameters of the global model that are trained.
  `server/buffers/NAME`: its buffers, where they are averaged.
- `server/memory/PART/...`: what a part of the method remembers at the server, such as momentum.
- `clients/index`: the clients that have taken part, and `clients/state/PART/...`: what they keep,
  one row for each, in that order. With client state on disk the rows are in `state/clients.bin`
  instead.
- `table/...`: what the server keeps for each client (FedVARP, MIFA), in the same form.

It is no model file: frozen parameters are not in it, and its names may change between versions.

"""

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_method.py"
"""What the page of methods of one's own shows."""

OWN = """\
# A method of your own

A method is made of *parts*. A part is a frozen dataclass of hyper-parameters that plays one role or
several: classes with one method each, or two where something has to begin and go on. It lives in a
file of yours, and an expression names it by import path: `my_method:Slow` is the class `Slow` in
`my_method.py` in the folder in which `fedkeel` is called. It is combined with all others, as in
`fedprox+my_method:Slow(rate=0.3)`, and runs in every engine and in a Flower federation.

[own_method.py](../examples/own_method.py) works at the server. The one below works at the clients,
each of which remembers something ([my_method.py](../examples/my_method.py)):

```python
{example}```

    fedkeel methods my_method:Slow --check
    fedkeel compare experiment.toml --methods "fedavg, my_method:Slow, my_method:Slow+momentum"

`--check` takes seconds, and finds what is hard to see in results: that engines disagree, that a run
does not go on after a kill with the same bits, that something is changed in place. To search its
hyper-parameters write `[tune.method."my_method:Slow"]`, see [tune](tune.md).

## What a part has to keep

- A `Tree` is a dict of tensors by the names of the parameters, a `State` one that may hold others.
  What a part makes of the parameters has all their names, shapes and types.
- `delta` is always end - start, `grads` always d loss / d params: no other sign convention.
- Client roles are written for one client and have no branch on data: no `if` on a tensor, no
  `.item()`; `torch.where`, `clamp` and the like in their place. With one the part still runs,
  client after client, and `run.json` says why it is slower. Server roles see a leading axis K.
- Where clients train side by side and their batches differ in size, shorter ones are filled up with
  examples of weight 0. A part that looks at a batch as a whole, as by `len(step.batch.y)`, a mean
  of its inputs or one loss for all, is found out and sees none, which is slower. One that weighs by
  `step.batch.real(dtype)`, [B], or returns a value for each example, bears them.
- Nothing is changed in place but a server part's own memory, and a part keeps nothing itself: what
  lasts is in a state. Random numbers of a step are `step.noise`, those of the server come from
  `cohort.rng()`: others are not the same in every engine.
- A hyper-parameter is a field, with its range where it is declared by `param`. Its default counts
  where the expression does not name it.
- `needs`, a set of [capabilities](#what-a-part-may-need), names what the part asks of model, engine
  and other parts. What cannot be had is refused before anything runs.

## Roles

In the order in which they act, what a state begins with left aside; `fedkeel methods EXPR` has that
of a method. Those marked with 1 are played by at most one part of a method; what a role wants
stated is a class variable.
"""


def pages() -> dict[str, str]:
    """Return every generated page by its path below docs/."""
    out = {f"methods/{name}.md": markdown(page(name, told(name))) for name in REGISTRY}
    out["methods/README.md"] = table()
    out["legality.md"] = legality()
    out["own-method.md"] = own()
    out["settings.md"] = settings()
    out["run-folder.md"] = folder()
    return {path: NOTICE + text for path, text in out.items()}


def table() -> str:
    """Return the table of all methods."""
    head = ["method", "what it does", "paper", "down", "up", "client", "server", "cost"]
    lines = [_row(head), _row(["---"] * 3 + ["---:"] * 5)]
    where = ""
    for name, recipe in REGISTRY.items():
        also = [f"`{alias}`" for alias, entry in ALIASES.items() if entry == name]
        cells = [", ".join([f"[`{name}`]({name}.md)", *also]), recipe.title]
        cells.append(reference(recipe.paper).replace("|", "\\|"))
        try:
            found = footprint(name)
        except FedkeelError:
            cells += [""] * 5
        else:
            needs, where = found.estimate, found.where
            kept = [count / found.model for count in (needs.client_state, found.server)]
            cells += [f"{one:.2f}" for one in (found.down, found.up)]
            cells += [f"{one:.2f}" if one else "" for one in kept]
            cells.append(f"{found.gradients:.2f}")
        lines.append(_row(cells))
    return "\n".join(
        [
            "# Methods",
            "",
            "*Down* and *up*: models sent to and from a client in a round. *Client* and *server*: "
            "models kept from round to round by each client and for all of them. *Cost*: what a "
            "client multiplies for each example, where FedAvg's gradient is 1; small models make "
            f"what is done with parameters look dear. Measured on {where}.",
            "",
            "Methods are combined with `+`; [legality.md](../legality.md) says which can be.",
            "",
            *lines,
            "",
        ]
    )


def legality() -> str:
    """Return the matrix of all pairs, and what each code means."""
    names = list(REGISTRY)
    found = {(a, b): verdict(a, b) for a in names for b in names if a != b}
    lines = [_row(["", "", *(str(i) for i in range(1, len(names) + 1))])]
    lines.append(_row(["---:", "---", *([":-:"] * len(names))]))
    for i, a in enumerate(names, start=1):
        codes = [found[a, b].code if a != b else "" for b in names]
        cells = [code if code in ("", LEGAL) else f"**{code}**" for code in codes]
        lines.append(_row([str(i), f"`{a}`", *cells]))
    out = [
        "# Which methods can be combined",
        "",
        "Decided before any data is touched. Every reason lies between two methods, so any number "
        "of them can be combined where every two of them can.",
        "",
        *(f"- `{code}`: {why}" for code, why in REASONS.items() if _used(found, code)),
        "",
        *lines,
    ]
    for code, why in REASONS.items():
        if code != LEGAL and _used(found, code):
            out += ["", f"## `{code}`", "", f"{why[0].upper()}{why[1:]}", ""]
            out += _listed(names, found, code)
    return "\n".join([*out, ""])


def _used(found: dict[tuple[str, str], Verdict], code: str) -> bool:
    return any(one.code == code for one in found.values())


def _listed(names: list[str], found: dict[tuple[str, str], Verdict], code: str) -> list[str]:
    """Return the pairs of a code, each pair once; what breaks what is said for each."""
    out = []
    for i, a in enumerate(names, start=1):
        others = [b for b in names[i:] if found[a, b].code == code]
        if code == BREAKS:
            out += [f"- `{a}` with `{b}`: {found[a, b].reason}" for b in others]
        elif others:
            out.append(f"- `{a}` with {', '.join(f'`{b}`' for b in others)}")
    return out


def settings() -> str:
    """Return the reference of the experiment file: each table, each key."""
    tables = dict(_tables(Experiment))
    if set(tables) != set(TABLES):
        raise ValueError(f"TABLES does not name the tables of an experiment: {sorted(tables)}")
    out = [SETTINGS, "## The file itself", ""]
    out += _keys("", Experiment)
    for path in TABLES:
        said = Said.by(tables[path])
        out += ["", f"## `[{path}]`", "", *said.about, *_keys(path, tables[path])]
        if path == "tune":
            out += ["", "### A range", "", *Said.by(Range).about, *_keys("", Range)]
    return "\n".join([*out, ""])


def _tables(kind: type[Settings], prefix: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """Yield the dotted path and the class of every table below a table."""
    for name, field in kind.model_fields.items():
        below = _settings(field.annotation)
        if below is not None:
            yield prefix + name, below
            yield from _tables(below, f"{prefix}{name}.")


def _settings(kind: object) -> type[Settings] | None:
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def _keys(path: str, kind: type[Settings]) -> list[str]:
    """Return the table of the keys of a table; what is a table itself comes last, as a link."""
    meaning = Said.by(kind).args
    lines, below = [_row(["key", "type", "default", "meaning"]), _row(["---"] * 4)], []
    for name, field in kind.model_fields.items():
        if _settings(field.annotation) is None:
            words = ", ".join([_type(field.annotation, "table"), *_limits(field)])
            lines.append(_row([f"`{name}`", words, _default(field), meaning[name]]))
        else:
            at = f"{path}.{name}" if path else name
            link = f"[table](#{at.replace('.', '')})"
            below.append(_row([f"`{name}`", link, "", meaning[name]]))
    return [*lines, *below]


def _limits(field: FieldInfo) -> Iterator[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    for limit in field.metadata:
        for name, sign in signs.items():
            if hasattr(limit, name):
                bound = getattr(limit, name)
                yield f"{sign} {'2^32 - 1' if bound == 2**32 - 1 else f'{bound:g}'}"
        if getattr(limit, "pattern", None):
            yield f"`{limit.pattern}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items())
        return f"`{{ {inside} }}`" if inside else "`{}`"
    return f"`{json.dumps(value)}`"


def _type(kind: Any, table: str, many: bool = False) -> str:  # noqa: ANN401 - any annotation
    """Return a type in words; `table` is what TOML or JSON calls a value by keys."""
    origin, inside = get_origin(kind), get_args(kind)
    plural = "s" if many else ""
    if kind in _WORDS:
        return _WORDS[kind] + ("" if kind is Scores else plural)
    if origin in (Union, types.UnionType):
        words = [_type(one, table, many) for one in inside if one is not type(None)]
        if table == "object" and type(None) in inside:
            words.append(f"null{plural}")
        return " or ".join(words)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(one)}`" for one in inside)
    if origin in (list, tuple):
        count = f"{len(inside)} " if origin is tuple and inside[-1] is not Ellipsis else ""
        return f"list{plural} of {count}{_type(inside[0], table, many=True)}"
    if origin is dict and inside[1] is not Any:
        return f"{table}{plural} of {_type(inside[1], table, many=True)}"
    return table + plural


_WORDS = {
    str: "string",
    int: "integer",
    float: "number",
    int | float: "number",
    bool: "boolean",
    Value: "value",
    Range: "range",
    Scores: "scores",
}


def own() -> str:
    """Return the page of methods of one's own: every role, and what a part sees."""
    out = [OWN.replace("{example}", EXAMPLE.read_text(encoding="utf-8"))]
    out += [_row(["role", "to state", "methods", "what it does"]), _row(["---"] * 4)]
    for kind in ROLES:
        stated = [f"`{name}`" for name in inspect.get_annotations(kind) if name not in vars(kind)]
        calls = [
            f"`{name}({', '.join(list(inspect.signature(value).parameters)[1:])})`"
            for name, value in vars(kind).items()
            if getattr(value, "__isabstractmethod__", False) and inspect.isfunction(value)
        ]
        calls += [f"`{name}`, a property" for name, v in vars(kind).items() if _is_abstract(v)]
        about = _plain(" ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split()))
        one = " 1" if kind in SLOTS else ""
        out.append(_row([f"`{kind.__name__}`{one}", ", ".join(stated), ", ".join(calls), about]))
    out += ["", "## What a part may state", "", "Class variables, which have a default.", ""]
    out += [_row(["of", "name", "default", "meaning"]), _row(["---"] * 4)]
    for kind in (Part, *ROLES):
        for name, meaning in _variables(kind).items():
            if name in vars(kind):
                value = "frozenset()" if vars(kind)[name] == frozenset() else vars(kind)[name]
                out.append(_row([f"`{kind.__name__}`", f"`{name}`", f"`{value}`", meaning]))
    out += ["", "## What a part may need", "", "`needs = frozenset({Capability.HEAD})`, say.", ""]
    out += [_row(["capability", "what it is"]), _row(["---"] * 2)]
    out += [_row([f"`{one.name}`", one.value]) for one in Capability]
    out += ["", "## What a part sees", ""]
    for seen in (Step, Batch, Output, Round, ClientInfo, Cohort, Span, Outcome, Population):
        doc = inspect.cleandoc(seen.__doc__ or "")
        out += [f"### `{seen.__name__}`", "", _plain(doc.partition("\n")[0]), ""]
        out += [_row(["", "meaning"]), _row(["---"] * 2)]
        for name, meaning in _args(doc).items():
            if name not in ("states", "part"):
                out.append(_row([f"`{name}`", _plain(meaning)]))
        for name, value in vars(seen).items():
            if inspect.isfunction(value) and not name.startswith("_") and name != "view":
                given = ", ".join(list(inspect.signature(value).parameters)[1:])
                said = inspect.cleandoc(value.__doc__ or "").partition("\n")[0]
                out.append(_row([f"`{name}({given})`", _plain(said)]))
        out.append("")
    return "\n".join(out)


def _variables(kind: type) -> dict[str, str]:
    """Return the class variables that are followed by what they mean, with that."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        one.target.id: _plain(" ".join(after.value.value.split()))
        for one, after in pairwise(body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def _is_abstract(value: object) -> bool:
    return isinstance(value, property) and getattr(value.fget, "__isabstractmethod__", False)


def folder() -> str:
    """Return the page of the run folder: its files, and the fields of what is in them."""
    files, after = _block(run_folder.__doc__ or "")
    out = [RUN_FOLDER.format(files=files, after=after)]
    for title, kind in (
        ("A row of `rounds.jsonl`", RoundRecord),
        ("Scores", Scores),
        ("`run.json`", RunRecord),
    ):
        said, hints = Said.by(kind), get_type_hints(kind)
        out += [f"## {title}", "", *said.about]
        out += [_row(["field", "type", "meaning"]), _row(["---"] * 3)]
        for name, meaning in said.args.items():
            out.append(_row([f"`{name}`", _type(hints[name], "object"), meaning]))
        out.append("")
    return "\n".join(out)


def _block(text: str) -> tuple[str, str]:
    """Return the indented block of a docstring, and what stands after it."""
    lines = inspect.cleandoc(text).splitlines()
    indented = [i for i, line in enumerate(lines) if line.startswith("    ")]
    block = lines[indented[0] : indented[-1] + 1]
    after = "\n".join(lines[indented[-1] + 1 :]).strip()
    return inspect.cleandoc("\n".join(["", *block])), _plain(after)


class Said(NamedTuple):
    """What the docstring of a class of values says, in Markdown.

    Args:
        about: lines before the keys.
        args: what each field is, in the order of the fields.
    """

    about: list[str]
    args: dict[str, str]

    @classmethod
    def by(cls, kind: type) -> Said:
        """Read a class, with what its bases say of the fields they add.

        Raises:
            ValueError: the docstring explains other fields than there are.
        """
        args: dict[str, str] = {}
        for one in reversed(kind.__mro__):
            if "__annotations__" in vars(one) and one.__doc__:
                args.update(_args(one.__doc__))
        names = list(_names(kind))
        if set(names) - set(args):
            missing = ", ".join(name for name in names if name not in args)
            raise ValueError(f"the docstring of {kind.__name__} does not explain {missing}")
        about = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:")[0].strip()
        return cls([_plain(about), ""], {name: _plain(args[name]) for name in names})


def _names(kind: Any) -> Iterable[str]:  # noqa: ANN401 - settings, or a dataclass
    return kind.model_fields if issubclass(kind, Settings) else [f.name for f in fields(kind)]


def _args(doc: str) -> dict[str, str]:
    out: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(doc).partition("\nArgs:\n")[2].splitlines():
        if not line.startswith("    "):
            break
        found = re.match(r"    (\w+): (.*)$", line)
        if found:
            name = found[1]
            out[name] = found[2]
        else:
            out[name] += f" {line.strip()}"
    return out


def _plain(text: str) -> str:
    """Return a docstring's text as Markdown: marks of code, and no sign of tables or tags."""
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(folder: Path) -> list[Path]:
    """Write the pages into a folder, and remove pages of methods that are no more."""
    shutil.rmtree(folder / "methods", ignore_errors=True)
    written = []
    for path, text in pages().items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    folder = parser.parse_args().out
    print(f"{len(write(folder))} pages in {folder}")


if __name__ == "__main__":
    main()
