"""Write the pages that follow from the code: methods, settings, run folder, roles, the command.

    python docs/generate.py            # into docs/
    python docs/generate.py --out DIR  # elsewhere

The pages are committed; a test fails where they differ from what the code says. With them it writes
`src/fedkeel/study/footprints.json`, which `fedkeel methods NAME` reads.
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

import click
import typer
from pydantic.fields import FieldInfo

import fedkeel
from fedkeel.base.feature import declarations
from fedkeel.base.settings import Settings
from fedkeel.cli import app
from fedkeel.config.local import Local
from fedkeel.config.search_space import Range, Value
from fedkeel.config.settings import Experiment
from fedkeel.errors import CompositionError, FedkeelError
from fedkeel.features.budget.policy import Policy, StatisticsPolicy
from fedkeel.features.secure.legality import refusal
from fedkeel.method.checks import INTERNAL_MEMBERS
from fedkeel.method.context import ClientInfo, Outcome, Population, Round, RoundCohort, Step
from fedkeel.method.docs.bibliography import reference
from fedkeel.method.docs.docstring import read
from fedkeel.method.docs.page import exceptions, markdown, page
from fedkeel.method.grammar import parse
from fedkeel.method.legality import (
    BREAKS,
    LEGAL,
    REASONS,
    SLOT_CODES,
    TASK_KINDS,
    TWICE,
    WEIGHTS,
    PairVerdict,
    check_optimiser,
    task_kinds,
    verdict,
)
from fedkeel.method.part import Capability, Part, Stage, Traits
from fedkeel.method.parts.index import ALIASES
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import ROLES, SLOTS
from fedkeel.records import folder as run_folder
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.run_record import RunRecord
from fedkeel.solve.span import Span
from fedkeel.study.footprint import FILE, file_text, footprint, footprint_lines
from fedkeel.study.measured_footprint import measure
from fedkeel.task.batch import Batch, Output

HERE = Path(__file__).parent
COMMAND = "python docs/generate.py"
NOTICE = f"<!-- Written by `{COMMAND}` from the code. Do not edit. -->\n\n"

TABLES = (
    *("data", "data.text", "partition", "model", "model.lora", "task", "local"),
    *("local.schedule", "cohort", "evaluation", "stop", "system", "diagnose", "track"),
    *("adversary", "root", "privacy", "engine", "compare", "tune", "flower"),
)
"""Tables of an experiment file, in the order of the page."""

POLICY = """\
# The policy of a site

Every key of the TOML file that `fedkeel flower node --policy` and `fedkeel flower ledger` read.
[A hospital's own policy](../guides/privacy.md#a-hospitals-own-policy) has an example.
"""

SETTINGS = """\
# The experiment file

Every key of the TOML file that `fedkeel run`, `compare`, `tune`, `check`, `data inspect` and
`flower` read.

`-s KEY=VALUE` changes a setting on the command line, by its dotted key: `-s local.lr=0.05
-s partition.alpha=0.5`. `-s local.epochs=unset` removes what the file sets, so that the default
counts. An unknown key is an error that names the nearest known key. `config.toml` in a run folder
is such a file, with every default written out.

These keys are required: `rounds`, `data.source`, `model.name`, `local.lr`, `local.epochs` or
`local.steps`, and what the kind of partition needs. Relative paths, and modules such as `my_net` in
`my_net:Net`, belong to the folder in which `fedkeel` is called, wherever the file is.

A name of code, `my_net:Net`, stands for a class or a function that is *defined* in a module of your
own: in the folder in which `fedkeel` is called, on a path that you have added, or installed in
editable form. What a module only imports has no name in it, and nothing of Python's standard
library has one. Of installed libraries, classes of `torch.nn` and networks of `torchvision.models`
can be named. Another installed package can be named where the environment variable
`FEDKEEL_MODULES` says so, such as `FEDKEEL_MODULES=monai`, and a package's methods where it
[declares them](../guides/write-a-method.md#give-it-a-name). A run folder that you did not make
yourself needs `--trust` before a module that it names is imported: see
[security](../guides/security.md#names-of-code).

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

[task]
metrics = ["accuracy", "macro_f1"]

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

[system]
speed = "lognormal"
sigma = 1.0

[diagnose]
kinds = ["forgetting", "conflict"]
every = 5

[track]
to = ["tensorboard"]

[adversary]
kind = "sign_flip"
share = 0.1

[root]
examples = 100              # at the server, drawn from those of the clients; or file = "root.npz"

[privacy]
epsilon = 8.0
delta = 1e-3

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

A dash as default, and None in the text, mean: not set.
"""

RUN_FOLDER = """\
# The run folder

Every file that a run leaves, and every field in it.

`fedkeel run` and `fk.run(..., out="runs/x")` write one folder for each run:

```text
{files}
```

{after}

`fedkeel compare` writes one such folder for each run, and `comparison.json`, which lists `method`,
`seed` and `folder` of each, and their `engine`. Runs of earlier calls stay in the list when they
have the same settings, version, model and data. `fedkeel tune` does the same with `tune.json`; see
[Tune settings](../guides/tune.md#stop-and-resume).

## Reading it

`rounds.jsonl` has one JSON object a line, [described below](#a-row-of-roundsjsonl). With pandas,
which fedkeel does not need and does not install:

```python
import json
from pathlib import Path

import pandas as pd

lines = Path("runs/x/rounds.jsonl").read_text().splitlines()
rows = pd.json_normalize([json.loads(line) for line in lines])
print(rows[["round", "test.accuracy", "train_loss", "bytes_up.model"]])
```

Nested objects become columns with dots: `test.accuracy`, `seconds.evaluation`. Where a round was
not evaluated these are NaN. All runs of a comparison in one table:

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
print(rows.groupby(["method", "round"])["test.accuracy"].agg(["mean", "std"]))
```

In Python the rows are `result.rows`, and what stands in `run.json` is `result.record`.

## The trained models

A finished run leaves two models, each as the state dict of the module, with all parameters, frozen
ones too, and all buffers:

- `model.safetensors`: the global model after the last round. `result.state_dict()` is the same.
- `model-best.safetensors`: the global model of the best evaluated round. The score is that on
  clients' held-out examples where they are evaluated during the run (`partition.holdout` and
  `evaluation.clients_every`), else that on the test set. `run.json` says which, under
  `best_model`.

[Your own data and model](../getting-started/own-data.md#use-the-trained-model) shows how to load
one.

Where each client keeps parameters, or statistics of batch normalisation, of its own, the server's
model is not whole: neither file is written, and `result.state_dict()` says so. `run.json` names
what clients keep, under `client_parameters`. The run then leaves the models of the clients, as do
methods with a second or a fine-tuned model (`ditto`, `finetune`):

- `models/CLIENT.safetensors`: a client's own model after the last round, with which it is scored.
  `result.client_model("CLIENT")` is the same, and `fedkeel predict RUN DATA --client CLIENT` uses
  it. A client that has never taken part has none where its own parameters would be untrained. All
  models are kept where they take 256 MB at most together; `engine.client_models` changes that. A
  name that cannot be a file's on every system is written as in a URL: `a/b` is
  `models/a%2Fb.safetensors`. In a federation of nodes these models stay on the nodes.

## The checkpoint

A checkpoint has what a run needs to continue with the same bits. It is saved when
`engine.checkpoint_seconds` have passed since the last one, and at the end. The older one is removed
when the new one is complete. `state.json` has the completed rounds, the run's key, the SHA-256 of
`arrays.safetensors` and of the rows so far, and one of itself.
`arrays.safetensors` has, by path:

- `server/params/NAME`: the trained parameters of the global model. `server/buffers/NAME`: its
  buffers, where they are averaged.
- `server/memory/PART/...`: what a part remembers at the server, such as momentum.
- `clients/index`: the clients that have taken part, and `clients/state/PART/...`: their client
  state, one row for each, in that order. Where client state is on disk, the rows are in
  `state/clients.bin`, and `clients/checksum` has a checksum of each.
- `table/...`: what the server keeps for each client (FedVARP, MIFA), in the same form.

A checkpoint is not a model file: it has no frozen parameters, and its names may change between
versions.

A run goes on only from files that are as they were written. Where one has changed it says which,
and stops; where an older whole checkpoint is there, it goes on from that and says so. For a
finished run `run.json` has the SHA-256 of `rounds.jsonl` and of the models, under `digests`, as
`sha256sum` prints them, and `fedkeel report` says which of them do not match. Folders that earlier
versions wrote have no digests; they are read without this check.

"""

ROLE_PAGE = """\
# Roles and contexts

Every role that a part can play, what a part may declare, and what it sees.
[Write a method](../guides/write-a-method.md) is the way in.

## Roles

In the order in which they act. At most one part of a method plays a role marked with 1. A role's
class variables have to be set.
"""

TRAITS = """\
What engines and the server's round have to know of a part beyond its roles. A part states only
those that differ: `traits = Traits(needs_only_sum=True)`.
"""

TITLES = {
    WEIGHTS: "They weight clients differently",
    TWICE: "They share a part",
    BREAKS: "One breaks what the other needs",
    **{code: f"Both play the role '{ROLES[slot]}'" for slot, code in SLOT_CODES.items()},
}
"""Heading of each reason."""

BESIDE_ADAM = """\
A method that divides by the length of the local path needs a path that is a weighted sum of
gradients. With `local.optimiser = "adam"` or `"adamw"`, and with momentum that `local.keep_state`
keeps from round to round, it is not such a sum. These are refused then:"""

SECURE_SUMS = """\
With `flower.secure_aggregation = true` the server of a federation sees only sums over the nodes;
see [the guide](../guides/flower.md#secure-aggregation). A combination is refused where one of its
methods is."""

COMMAND_PAGE = """\
# The command

Every sub-command with its options. Results go to standard output, everything else to standard
error. The exit code is 0 for success, 1 where training could not continue, 2 for a mistake in the
call or its files, 75 where the time of `reproduce --seconds` was up before the end, and 130
after an interrupt that ended cleanly.
"""


def pages() -> dict[str, str]:
    """Return every generated page by its path below docs/."""
    out = {f"methods/{name}.md": method(name) for name in REGISTRY}
    out["methods/index.md"] = table()
    out["methods/legality.md"] = legality()
    out["reference/roles.md"] = roles()
    out["reference/configuration.md"] = settings()
    out["reference/policy.md"] = policy()
    out["reference/run-folder.md"] = folder()
    out["reference/command.md"] = command()
    out["reference/modules.md"] = modules()
    return {path: NOTICE + text for path, text in out.items()}


def method(name: str) -> str:
    """Return the page of a method; it names no other method, so a new one does not change it.

    Raises:
        CompositionError: the docstring of a part is not complete.
    """
    for part in parse(name).parts:
        read(type(part))
    blocks = [*page(name, footprint_lines(name)), *exceptions(name)]
    return f"{markdown(blocks)}\n[All refused pairs by name](legality.md#by-method).\n"


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
            needs, where = found.estimate, found.setting
            kept = [count / found.model_bytes for count in (needs.client_state, found.server_bytes)]
            cells += [f"{one:.2f}" for one in (found.down, found.up)]
            cells += [f"{one:.2f}" if one else "" for one in kept]
            cells.append(f"{found.gradients:.2f}")
        lines.append(_row(cells))
    return "\n".join(
        [
            "# Methods",
            "",
            "Every method by name, with what it costs.",
            "",
            "*Down* and *up*: models sent to and from a client in a round. *Client* and *server*: "
            "models kept from round to round by each client, and by the server. *Cost*: "
            "multiplications of a client for each example; FedAvg's gradient is 1. With small "
            f"models, work on parameters weighs more. Measured on {where}.",
            "",
            "Methods are combined with `+`; these [exceptions](legality.md) are refused.",
            "",
            *lines,
            "",
        ]
    )


def legality() -> str:
    """Return the pairs that are refused, by reason."""
    names = list(REGISTRY)
    verdicts = {(a, b): verdict(a, b) for a in names for b in names if a != b}
    pairs = len(verdicts) // 2
    refused = sum(not one.legal for one in verdicts.values()) // 2
    out = [
        "# Which methods can be combined",
        "",
        f"{pairs - refused} of {pairs} pairs can be combined. This page lists the others, with the "
        "reason.",
        "",
        "The check needs no data. Every reason lies between two methods, so any number of methods "
        "can be combined where every two of them can.",
        "",
        "## By method",
        "",
        _row(["method", "cannot be combined with"]),
        _row(["---"] * 2),
    ]
    for a in names:
        others = [f"`{b}`" for b in names if a != b and not verdicts[a, b].legal]
        if others:
            out.append(_row([f"[`{a}`]({a}.md)", ", ".join(others)]))
    for code, why in REASONS.items():
        if code != LEGAL and _used(verdicts, code):
            out += ["", f"## {TITLES[code]}", "", f"{why[0].upper()}{why[1:]}", ""]
            out += _listed(names, verdicts, code)
    out += ["", "## On which tasks", "", *_task_table(names)]

    out += ["", "## With secure aggregation", "", SECURE_SUMS, "", *_sums_alone(names)]
    out += ["", "## Local optimisers", "", BESIDE_ADAM, ""]
    out += [f"- `{name}`: {do}" for name in names if (do := _remedy_beside_adam(name))]
    return "\n".join([*out, ""])


def _task_table(names: list[str]) -> list[str]:
    """Return the table of methods and the kinds of tasks that they accept."""
    everywhere = [name for name in names if len(task_kinds(name)) == len(TASK_KINDS)]
    lines = [
        "The names of methods that run on every kind of task stand under the table; a model needs "
        "named layers for some of them (see each method's page). Combinations accept what all of "
        "their methods accept. `check_method` trains every method on classification, regression, "
        "segmentation and tokens, where it accepts them.",
        "",
        f"| method | {' | '.join(TASK_KINDS)} |",
        f"| --- |{' --- |' * len(TASK_KINDS)}",
    ]
    for name in names:
        if name not in everywhere:
            accepted = task_kinds(name)
            marks = ["yes" if kind in accepted else "no" for kind in TASK_KINDS]
            lines.append(f"| `{name}` | {' | '.join(marks)} |")
    return [*lines, "", f"On every kind of task: {', '.join(f'`{name}`' for name in everywhere)}."]


def _sums_alone(names: list[str]) -> list[str]:
    """Return which methods are refused under secure aggregation, and those that are not."""
    found = {name: refusal(parse(name)) for name in names}
    allowed = ", ".join(f"`{name}`" for name, reason in found.items() if reason is None)
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.items():
        if reason is not None:
            part = "" if reason[0] == name else f" (`{reason[0]}`)"
            by_reason.setdefault(reason[1], []).append(f"`{name}`{part}")
    refused = [f"- It {reason}: {', '.join(who)}." for reason, who in by_reason.items()]
    return [f"Allowed: {allowed}.", "", "Refused, with the reason:", "", *refused]


def _remedy_beside_adam(name: str) -> str:
    """Return what to do where a method cannot be run beside Adam, "" where it can."""
    try:
        check_optimiser(parse(name), Local(lr=1.0, epochs=1, optimiser="adam"))
    except CompositionError as error:
        return error.do or ""
    return ""


def _used(found: dict[tuple[str, str], PairVerdict], code: str) -> bool:
    return any(one.code == code for one in found.values())


def _listed(names: list[str], found: dict[tuple[str, str], PairVerdict], code: str) -> list[str]:
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


def policy() -> str:
    """Return the reference of a site's own policy."""
    out = [POLICY, *Said.by(Policy).about, *_keys("", Policy)]
    out += ["", "## `[statistics]`", "", *Said.by(StatisticsPolicy).about]
    return "\n".join([*out, *_keys("statistics", StatisticsPolicy), ""])


def _tables(kind: type[Settings], prefix: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """Yield the dotted path and the class of every table below a table."""
    for name, field in kind.model_fields.items():
        below = _settings(field.annotation)
        if below is not None:
            yield prefix + name, below
            yield from _tables(below, f"{prefix}{name}.")


def _settings(kind: object) -> type[Settings] | None:
    """Return the class of a table, None of a value; a table that may be absent is one, too."""
    kinds = [item for item in get_args(kind) if item is not types.NoneType] or [kind]
    table = kinds[0] if len(kinds) == 1 else None
    return table if isinstance(table, type) and issubclass(table, Settings) else None


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


def roles() -> str:
    """Return the page of roles: every role, and what a part sees."""
    out = [ROLE_PAGE]
    out += [_row(["role", "to set", "methods", "what it does"]), _row(["---"] * 4)]
    for kind in ROLES:
        stated = [f"`{name}`" for name in inspect.get_annotations(kind) if name not in vars(kind)]
        calls = [
            f"`{name}({', '.join(list(inspect.signature(value).parameters)[1:])})`"
            for name, value in vars(kind).items()
            if getattr(value, "__isabstractmethod__", False) and inspect.isfunction(value)
        ]
        calls += [f"`{name}`, a property" for name, v in vars(kind).items() if _is_abstract(v)]
        about = _plain(" ".join(inspect.cleandoc(kind.__doc__ or "").split()))
        needs = ", ".join(sorted(f"`{need.name}`" for need in kind.needs))
        about += f" It needs {needs}." if needs else ""
        one = " 1" if kind in SLOTS else ""
        out.append(_row([f"`{kind.__name__}`{one}", ", ".join(stated), ", ".join(calls), about]))
    out += ["", "## What a part may declare", "", "Class variables with a default.", ""]
    out += [_row(["of", "name", "default", "meaning"]), _row(["---"] * 4)]
    for kind in (Part, *ROLES):
        for name, meaning in _variables(kind).items():
            if name in vars(kind):
                value = _DEFAULTS.get(vars(kind)[name], vars(kind)[name])
                out.append(_row([f"`{kind.__name__}`", f"`{name}`", f"`{value}`", meaning]))
    out += ["", "## Traits", "", TRAITS]
    out += [_row(["name", "default", "meaning"]), _row(["---"] * 3)]
    said = _args(inspect.cleandoc(Traits.__doc__ or ""))
    out += [_row([f"`{f.name}`", f"`{f.default}`", _plain(said[f.name])]) for f in fields(Traits)]
    out += [
        "",
        "## Capabilities",
        "",
        "What a part may need: `needs = frozenset({Capability.HEAD})`.",
        "",
    ]
    out += [_row(["capability", "what it is"]), _row(["---"] * 2)]
    out += [_row([f"`{one.name}`", one.value]) for one in Capability]
    out += ["", "## What a part sees", ""]
    for seen in (Step, Batch, Output, Round, ClientInfo, RoundCohort, Span, Outcome, Population):
        doc = inspect.cleandoc(seen.__doc__ or "")
        out += [f"### `{seen.__name__}`", "", _plain(doc.partition("\n")[0]), ""]
        out += [_row(["", "meaning"]), _row(["---"] * 2)]
        for name, meaning in _args(doc).items():
            if name not in INTERNAL_MEMBERS:
                out.append(_row([f"`{name}`", _plain(meaning)]))
        for name, value in vars(seen).items():
            if isinstance(value, property) and not name.startswith("_"):
                out.append(_row([f"`{name}`", _plain(inspect.cleandoc(value.__doc__ or ""))]))
            if inspect.isfunction(value) and not name.startswith("_") and name != "view":
                given = ", ".join(list(inspect.signature(value).parameters)[1:])
                said = inspect.cleandoc(value.__doc__ or "").partition("\n")[0]
                out.append(_row([f"`{name}({given})`", _plain(said)]))
        out.append("")
    return "\n".join(out)


_DEFAULTS = {frozenset(): "frozenset()", Traits(): "Traits()", Stage.CORRECT: "Stage.CORRECT"}


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


def modules() -> str:
    """Return the page of modules: each with the first line of its docstring."""
    source = Path(fedkeel.__file__).parent
    out = ["# Every module", "", "Each module in one line, room by room."]
    for room in sorted(path for path in source.rglob("__init__.py")):
        files = [file for file in sorted(room.parent.glob("*.py")) if file.name != "__main__.py"]
        name = room.parent.relative_to(source.parent)
        out += ["", f"## `{name}`", "", _row(["module", "what it holds"]), _row(["---"] * 2)]
        for file in sorted(files, key=lambda file: (file != room, file.name)):
            doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            title = "the room" if file == room else f"`{file.name}`"
            out.append(_row([title, _plain(doc.partition("\n\n")[0].replace("\n", " "))]))
    return "\n".join([*out, ""])


def command() -> str:
    """Return the page of the command: every sub-command, its arguments and options."""
    out = [COMMAND_PAGE]
    for path, sub in _commands(typer.main.get_command(app), "fedkeel"):
        out += [f"## `{path}`", "", _plain(inspect.cleandoc(sub.help or "")), ""]
        rows = []
        for parameter in sub.get_params(click.Context(sub)):
            if "--help" in parameter.opts:
                continue
            record = parameter.to_info_dict()
            names = ", ".join(f"`{name}`" for name in [*record["opts"], *record["secondary_opts"]])
            if record["param_type_name"] == "argument":
                names = f"`{parameter.make_metavar(click.Context(sub))}`"
            rows.append(_row([names, _plain(" ".join((record.get("help") or "").split()))]))
        if rows:
            out += [_row(["argument or option", "meaning"]), _row(["---"] * 2), *rows, ""]
    return "\n".join(out)


def _commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command that does something, with its full name."""
    for name, sub in getattr(group, "commands", {}).items():
        if getattr(sub, "commands", None):
            yield from _commands(sub, f"{path} {name}")
        else:
            yield f"{path} {name}", sub


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
    return "\n".join([*out, *_features()])


def _features() -> list[str]:
    """Return what features write into run.json and into a row."""
    out = [
        "## What features add",
        "",
        "A run that uses a feature has these keys beside the others.",
    ]
    for table, kind in declarations().items():
        if not (kind.figures or kind.entries or kind.record_class):
            continue
        out += ["", f"### `{table}`", "", _row(["key", "where", "meaning"]), _row(["---"] * 3)]
        for added in (*kind.figures, *kind.entries):
            out.append(_row([f"`{added.key}`", "`rounds.jsonl`", added.description]))
        if kind.record_meaning:
            out.append(_row([f"`{table}`", "`run.json`", kind.record_meaning]))
        elif kind.record_class is not None:
            for name, meaning in Said.by(kind.record_class).args.items():
                out.append(_row([f"`{table}.{name}`", "`run.json`", meaning]))
    return [*out, ""]


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
    text = text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")
    return text.replace("][", "]&#91;")  # [C][Y] are sizes, not a link


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def footprints() -> str:
    """Return the text of footprints.json: what listed methods send, keep and multiply."""
    return file_text({name: measure(name) for name in REGISTRY})


def write(folder: Path) -> list[Path]:
    """Write the pages into a folder, and remove pages of methods that are no more."""
    texts, written = pages(), []  # before anything is removed
    shutil.rmtree(folder / "methods", ignore_errors=True)
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR")
    folder = parser.parse_args().out
    if folder == HERE:
        FILE.write_text(footprints(), encoding="utf-8")  # before the pages, which show it
    print(f"{len(write(folder))} pages in {folder}")


if __name__ == "__main__":
    main()
