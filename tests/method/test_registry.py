"""The registry: every entry composes, and of every pair it is decided whether it does."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from itertools import combinations

import pytest

from each import each
from fedkeel.errors import CompositionError
from fedkeel.method.grammar import parse
from fedkeel.method.part import Part, Traits
from fedkeel.method.parts.index import ALIASES, METHODS
from fedkeel.method.parts.server import Addition, WeightedMean
from fedkeel.method.registry import REGISTRY, find_recipe
from fedkeel.method.roles import ROLES
from harness import EVERYTHING

SLOT, BROKEN, TWICE, WEIGHTS = "slot", "breaks", "twice", "weights"

MOST_ATTRIBUTES = 3
"""Class attributes of a part beside its name, its paper and its hyper-parameters."""

# in the order of the registry
GRADIENT = (
    "minibatch_sgd",
    "fedreg",
    "fedsam",
    "dpsgd",
    "fedsol",
    "fedlesam",
    "fedspeed",
    "fedsmoo",
    "fedgamma",
    "mofedsam",
    "pfedme",
    "perfedavg",
)
SERVER = (
    *("momentum", "addition", "gradma", "fedadam", "fedyogi", "fedadagrad", "fedams"),
    *("feddyn", "fedcm", "fedacg", "domo", "fedsmoo", "mofedsam", "flora", "fedasync", "ifca"),
    "fedamp",
)
REDUCE = (
    *("median", "trimmed_mean", "krum", "multikrum", "bulyan", "geomedian", "cclip", "fltrust"),
    *("fedvarp", "mifa", "dpclient", "dpquantile", "dpftrl", "feddisco"),
    *("fedau", "fedawa", "qfedavg", "term", "afl", "flora", "fedbuff"),
)
CODEC = ("topk", "quantise", "ffalora", "flora")
WORK = ("fedsgd", "scaffnew", "fedswa", "fedmoswa")
OPTIMISER = ("fedadamw", "fedmuon", "fedlada")
CRITERION = ("fedlc", "fedrod")
PHASES = ("fedrep", "fedbabu", "ffalora", "rolora", "flora")
MODEL = ("fedrod", "ditto", "apfl", "pfedme")
TUNING = ("fedbabu", "perfedavg", "finetune")
START = ("fedala", "fedinit")
POLICY = ("fedbuff", "fedasync")
SLOTS = (
    *(GRADIENT, SERVER, REDUCE, CODEC, WORK, OPTIMISER, CRITERION, PHASES, MODEL, TUNING, START),
    POLICY,
)
PATH = ("minibatch_sgd", "scaffold", "fednova", "fedcm", "fedgamma", "mofedsam", "scaffnew")
BESIDE_FEDPROTO = (
    *("fedavg", "fedsgd", "fedlc", "fedntd", "feddecorr", "fedrcl", "fedmlb", "feduv", "knnper"),
    *("finetune", "rolora"),
)
KEEP = (
    *("scaffold", "gradma", "feddyn", "topk", "moon", "fedcurv", "fedlesam", "fedspeed"),
    *("fedsmoo", "fedtrip", "fedgamma", "fedper", "fedrep", "lgfedavg", "fedbn", "fedbabu"),
    *("fedrod", "ditto", "apfl", "pfedme", "fedala", "fedinit", "fedsalora", "scaffnew"),
    *("fedmuon", "fedmoswa"),
)
"""Methods whose clients keep something from round to round."""
SINGLE = ("fedgc", "gradma", "fedgh", "normbound", "nnm", "bucketing")
NO_PATH = ("pfedme", "perfedavg", "fedala", "fedinit")
ROBUST = ("krum", "multikrum", "bulyan", "cclip", "fltrust", "nnm", "bucketing")
NOISY = ("dpclient", "dpquantile", "dpftrl")
FRESH = (
    *("fedgc", "fedgh", "gradma", "feddyn", "fedcm", "normbound", "nnm", "bucketing", "fedacg"),
    *("domo", "mime", "mimelite", "fedcurv", "fedexp", "fedspeed", "fedsmoo", "fedtrip"),
    *("mofedsam", "fedproto", "scaffnew", "fedadamw", "fedmuon", "fedswa", "fedmoswa", "rolora"),
    *("fedlada", "fedmd"),
)
OF_ALL = (
    *("scaffold", "fednova", "fedgc", "gcfed", "globalgc", "fedgh", "median", "trimmed_mean"),
    *("krum", "multikrum", "bulyan", "geomedian", "cclip", "normbound", "nnm", "bucketing"),
    *("fedvarp", "mifa", "mime", "mimelite", "dpclient", "dpquantile", "fedcurv", "fedexp"),
    *("fedtrip", "fedgamma", "feddisco", "scaffnew", "fedau", "fedawa", "qfedavg", "term", "afl"),
    *("fedadamw", "fedmuon", "fedswa", "fedmoswa", "fedlada", "fedbuff", "fltrust", "dpftrl"),
)
BY_CLIENT = (
    *("fedsmoo", "fedvarp", "mifa", "feddisco", "fedau", "fedawa", "qfedavg", "term", "afl"),
    "flora",
)

ILLEGAL = {
    # both say where the gradient is taken, both apply the aggregate, both make one update of many,
    # both encode the update, both fix the local work, both replace the loss, both divide training
    # into phases, both train a second model, both train once more before an evaluation,
    # both say where a client begins
    **{pair: SLOT for slot in SLOTS for pair in combinations(slot, 2)},
    # one divides by the length of a path that the other does not make of gradients
    ("minibatch_sgd", "scaffold"): BROKEN,
    # and FedNova divides updates that Minibatch SGD has divided already
    ("minibatch_sgd", "fednova"): BROKEN,
    ("scaffold", "fedreg"): BROKEN,
    ("fednova", "fedreg"): BROKEN,
    ("minibatch_sgd", "fedcm"): BROKEN,
    ("fedreg", "fedcm"): BROKEN,
    ("minibatch_sgd", "scaffnew"): BROKEN,
    ("fedreg", "scaffnew"): BROKEN,
    ("minibatch_sgd", "fedmoswa"): BROKEN,
    ("fedreg", "fedmoswa"): BROKEN,
    ("fedadamw", "fedmoswa"): BROKEN,
    ("fedmuon", "fedmoswa"): BROKEN,
    ("fedmoswa", "fedlada"): BROKEN,
    # and these bring a local optimiser whose path is not a sum of gradients
    **{(path, own): BROKEN for path in PATH for own in OPTIMISER},
    # here local training begins elsewhere, or descends on another function
    **{
        (path, other): BROKEN
        for path in ("scaffold", "fednova", "fedcm")
        for other in ("pfedme", "perfedavg")
    },
    **{(path, start): BROKEN for path in PATH if path != "scaffnew" for start in START},
    **{(other, path): BROKEN for other in NO_PATH for path in ("scaffnew", "fedmoswa")},
    # FedDyn adds up how far clients have moved, of updates that are divided by their steps
    ("minibatch_sgd", "feddyn"): BROKEN,
    ("fednova", "feddyn"): BROKEN,
    ("minibatch_sgd", "flora"): BROKEN,
    ("fednova", "flora"): BROKEN,
    ("fednova", "fedsmoo"): BROKEN,
    # FedExP compares the lengths of updates with that of their mean
    ("minibatch_sgd", "fedexp"): BROKEN,
    ("fednova", "fedexp"): BROKEN,
    # FedSpeed sends more than clients have moved
    ("fednova", "fedspeed"): BROKEN,
    ("feddyn", "fedspeed"): BROKEN,
    ("fedexp", "fedspeed"): BROKEN,
    ("fedspeed", "flora"): BROKEN,
    # one looks at single examples, the other at all of a batch together
    ("dpsgd", "feddecorr"): BROKEN,
    ("dpsgd", "fedrcl"): BROKEN,
    ("dpsgd", "feduv"): BROKEN,
    ("feddecorr", "perfedavg"): BROKEN,  # which divides each mini-batch
    ("fedrcl", "perfedavg"): BROKEN,
    ("feduv", "perfedavg"): BROKEN,
    # one needs single updates, of which the other keeps no more than a noisy sum
    **{(other, noisy): BROKEN for other in SINGLE for noisy in NOISY},
    # one weights what single clients send, and beside a noisy sum nobody has a weight
    **{
        pair: BROKEN
        for pair in combinations(REGISTRY, 2)
        for own in ("fednova", "fedcm", "mofedsam", "mimelite")
        if own in pair and not set(pair).isdisjoint(NOISY)
    },
    # the same part in both
    ("gcfed", "localgc"): TWICE,
    ("gcfed", "globalgc"): TWICE,
    ("scaffold", "fedgamma"): TWICE,
    ("fedsam", "fedgamma"): TWICE,
    ("fedsam", "mofedsam"): TWICE,
    ("fedcm", "mofedsam"): TWICE,
    ("fedgamma", "mofedsam"): TWICE,
    ("fedswa", "fedmoswa"): TWICE,
    # FedGC counts what was processed, the others count heads: the run has to choose
    ("scaffold", "fedgc"): WEIGHTS,
    ("fedgc", "fedgh"): WEIGHTS,
    ("fedgc", "gradma"): WEIGHTS,
    ("fedgc", "fedreg"): WEIGHTS,
    ("fedgc", "feddyn"): WEIGHTS,
    ("fedgc", "fedcm"): WEIGHTS,
    ("fedgc", "median"): WEIGHTS,
    ("fedgc", "trimmed_mean"): WEIGHTS,
    ("fedgc", "fedacg"): WEIGHTS,
    ("fedgc", "fedvarp"): WEIGHTS,
    ("fedgc", "mifa"): WEIGHTS,
    ("fedgc", "mime"): WEIGHTS,
    ("fedgc", "mimelite"): WEIGHTS,
    ("fedgc", "fedexp"): WEIGHTS,
    ("fedgc", "fedspeed"): WEIGHTS,
    ("fedgc", "fedsmoo"): WEIGHTS,
    ("fedgc", "fedgamma"): WEIGHTS,
    ("fedgc", "mofedsam"): WEIGHTS,
    ("fedgc", "scaffnew"): WEIGHTS,
    ("fedgc", "fedau"): WEIGHTS,
    ("fedgc", "fedmoswa"): WEIGHTS,
    **{("fedgc", own): WEIGHTS for own in OPTIMISER},
    # FedProto and FedMD share no parameters, and these act on those that are shared, or keep some
    **{
        pair: BROKEN
        for pair in combinations(REGISTRY, 2)
        for own in ("fedproto", "fedmd")
        if own in pair and not set(pair) - {own} <= set(BESIDE_FEDPROTO)
    },
    **{("fedgc", robust): WEIGHTS for robust in ROBUST},
    # buckets are updates of nobody in particular
    **{(each, "bucketing"): BROKEN for each in ("gradma", "feddyn")},
    **{("bucketing", each): BROKEN for each in BY_CLIENT},
    # updates of a server that does not wait begin at different models, and are mixed in whole
    **{(each, "fedbuff"): BROKEN for each in FRESH},
    **{(each, "fedasync"): BROKEN for each in (*FRESH, *REDUCE[:-1]) if each not in SERVER},
    **{(each, "fedasync"): BROKEN for each in ("minibatch_sgd", "fednova")},
    # a server of several models has no update of all clients, and no model that all receive
    **{(each, several): BROKEN for each in OF_ALL for several in ("ifca", "fedamp")},
    **{(start, "fedamp"): SLOT for start in START},
    ("minibatch_sgd", "fedamp"): BROKEN,
    # FLTrust trains at the server as a client that keeps nothing
    **{
        pair: BROKEN
        for pair in combinations(REGISTRY, 2)
        if "fltrust" in pair and not set(pair).isdisjoint(KEEP)
    },
    # steps on public inputs are in no phase
    **{(each, "fedmd"): BROKEN for each in ("fedrep", "fedbabu")},
    ("fedmd", "rolora"): BROKEN,
}
"""Every illegal pair of entries, in the order of the registry, and why."""

SAYS = {SLOT: "which takes one.", BROKEN: "breaks.", TWICE: "twice.", WEIGHTS: "differently."}
PAIRS = list(combinations(REGISTRY, 2))


def refusal(expression: str, weights: str | None = None) -> CompositionError | None:
    try:
        parse(expression, EVERYTHING, weights)
    except CompositionError as error:
        return error
    return None


@each("one", REGISTRY)
def test_every_pair_is_legal_or_says_why_not(one: str) -> None:
    for other in list(REGISTRY)[list(REGISTRY).index(one) + 1 :]:
        check_pair(one, other)


def check_pair(one: str, other: str) -> None:
    """A legal pair composes in both orders; another one is refused in both, for its reason."""
    why = ILLEGAL.get((one, other))
    for expression in (f"{one}+{other}", f"{other}+{one}"):
        error = refusal(expression)
        if why is None:
            assert error is None, (one, other)
            continue
        assert error is not None
        assert SAYS[why] in error.what
        assert len(str(error).splitlines()) <= 4
        for entry in (one, other):
            names = [part.name for part in parse(entry).parts]
            assert any(name in str(error) for name in names)


@each(("pair", "why"), ILLEGAL.items())
def test_only_a_choice_of_weights_helps_where_papers_disagree(
    pair: tuple[str, str], why: str
) -> None:
    for weights in ("examples", "processed", "uniform"):
        assert (refusal("+".join(pair), weights) is None) == (why == WEIGHTS)


def test_the_table_names_entries() -> None:
    assert set(ILLEGAL) <= set(PAIRS)


@each("entry", REGISTRY)
def test_every_entry_composes_of_its_parts(entry: str) -> None:
    recipe, plan = REGISTRY[entry], parse(entry, EVERYTHING)
    assert [part.name for part in plan.parts] == list(METHODS[entry].parts)  # listed unimported
    assert [type(part) for part in plan.parts] == list(recipe.parts.values())
    for part in plan.parts:  # of the same paper, or another method
        assert part.paper == (METHODS[part.name].paper if part.name in METHODS else recipe.paper)
    for short, part in zip(recipe.parts, plan.parts, strict=True):
        given = recipe.defaults.get(short, {})
        assert set(given) <= {f.name for f in fields(part)}
        for f in fields(part):
            assert getattr(part, f.name) == given.get(f.name, f.default)
        if short:
            assert parse(f"{entry}.{short}").parts == (part,)


@each("entry", REGISTRY)
def test_every_entry_is_named_and_described_in_a_line(entry: str) -> None:
    recipe = REGISTRY[entry]
    assert entry.isidentifier()
    assert entry == entry.lower()
    assert recipe.title
    assert "\n" not in recipe.title
    assert not recipe.title.endswith(".")


def kinds() -> set[type[Part]]:
    return {kind for recipe in REGISTRY.values() for kind in recipe.parts.values()}


def test_a_part_can_be_found_by_its_name() -> None:
    """What a record or a canonical expression calls a part is what the grammar reads."""
    names = [kind.name for kind in kinds()]
    assert len(set(names)) == len(names)
    for kind in kinds():
        assert [type(part) for part in parse(kind.name).parts] == [kind]


@each("kind", sorted(kinds(), key=lambda k: k.name))
def test_parts_are_frozen_values(kind: type[Part]) -> None:
    assert kind() == kind()
    assert hash(kind()) == hash(kind())
    for f in fields(kind):
        with pytest.raises(AttributeError):
            setattr(kind(), f.name, 1)
    assert any(issubclass(kind, role) for role in ROLES)


def test_aliases_are_other_names_of_entries() -> None:
    for alias, name in ALIASES.items():
        assert alias not in REGISTRY
        assert find_recipe(alias) is REGISTRY[name]
    assert find_recipe("nothing") is None


# --- what a part says of itself ----------------------------------------------------------------


def parts_of_the_registry() -> list[type[Part]]:
    """Every class of parts, with those from which they are derived."""
    kinds = {
        kind for entry in REGISTRY for part in parse(entry).parts for kind in type(part).__mro__
    }
    kinds |= {WeightedMean, Addition}
    return sorted(
        (kind for kind in kinds if kind.__module__.startswith("fedkeel.method.parts.")),
        key=lambda kind: kind.__name__,
    )


@pytest.mark.parametrize("kind", parts_of_the_registry())
def test_a_part_begins_with_its_algorithm(kind: type[Part]) -> None:
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    first = next((i for i, one in enumerate(body.body) if isinstance(one, ast.FunctionDef)), None)
    targets = [
        target
        for one in body.body
        if isinstance(one, ast.Assign | ast.AnnAssign)
        for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
    ]
    known = {"name", "paper", *(field.name for field in fields(kind))}
    attributes = [target.id for target in targets if isinstance(target, ast.Name)]
    assert len([name for name in attributes if name not in known]) <= MOST_ATTRIBUTES
    later = [one for one in body.body[first or 0 :] if isinstance(one, ast.Assign | ast.AnnAssign)]
    assert first is None or not later, "attributes stand before the first method"


@pytest.mark.parametrize("kind", parts_of_the_registry())
def test_what_follows_from_roles_and_traits_is_not_said_again(kind: type[Part]) -> None:
    said = vars(kind).get("traits")
    if isinstance(said, Traits):
        assert said != next(
            vars(base)["traits"] for base in kind.__mro__[1:] if "traits" in vars(base)
        )
    assert not {field.name for field in fields(Traits)} & set(vars(kind))
