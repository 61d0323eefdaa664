"""The methods: name -> the parts it is made of. Papers are recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedkeel.errors import CompositionError
from fedkeel.method import plugins
from fedkeel.method.part import Part
from fedkeel.method.parts.clip import Clip
from fedkeel.method.parts.compress import Quantise, TopK
from fedkeel.method.parts.domo import DOMO
from fedkeel.method.parts.dpsgd import DPSGD
from fedkeel.method.parts.fedacg import FedACG
from fedkeel.method.parts.fedams import FedAMS
from fedkeel.method.parts.fedavgm import ServerMomentum
from fedkeel.method.parts.fedcm import FedCM
from fedkeel.method.parts.fedcurv import FedCurv
from fedkeel.method.parts.feddecorr import FedDecorr
from fedkeel.method.parts.feddyn import FedDyn
from fedkeel.method.parts.fedgc import CGC, SGC
from fedkeel.method.parts.fedgh import FedGH
from fedkeel.method.parts.fedlc import FedLC
from fedkeel.method.parts.fedmlb import FedMLB
from fedkeel.method.parts.fednova import FedNova
from fedkeel.method.parts.fedntd import FedNTD
from fedkeel.method.parts.fedopt import FedAdagrad, FedAdam, FedYogi
from fedkeel.method.parts.fedprox import FedProx
from fedkeel.method.parts.fedreg import FedReg
from fedkeel.method.parts.fedsam import FedSAM
from fedkeel.method.parts.fedsgd import FedSGD, MinibatchSGD
from fedkeel.method.parts.fedsol import FedSOL
from fedkeel.method.parts.fedvarp import FedVARP
from fedkeel.method.parts.gcfed import GlobalGC, LocalGC
from fedkeel.method.parts.gradma import GradMAS, GradMAW
from fedkeel.method.parts.mifa import MIFA
from fedkeel.method.parts.mime import Mime, MimeLite
from fedkeel.method.parts.moon import Moon
from fedkeel.method.parts.robust import Median, TrimmedMean
from fedkeel.method.parts.scaffold import Scaffold
from fedkeel.method.parts.server import Addition


@dataclass(frozen=True)
class Recipe:
    """A named method.

    Args:
        paper: citation key.
        title: one line.
        parts: short part name -> class; a method of one part calls it "".
        defaults: hyper-parameters that differ from the parts' own defaults, by short part name.
    """

    paper: str
    title: str
    parts: Mapping[str, type[Part]] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


REGISTRY: Mapping[str, Recipe] = {
    "fedavg": Recipe("mcmahan2017", "weighted mean of locally trained models"),
    "fedsgd": Recipe("mcmahan2017", "one full-batch gradient for each round", {"": FedSGD}),
    "minibatch_sgd": Recipe(
        "woodworth2020", "mean of mini-batch gradients at the received model", {"": MinibatchSGD}
    ),
    "fedprox": Recipe("li2020fedprox", "proximal term towards the received model", {"": FedProx}),
    "scaffold": Recipe("karimireddy2020", "control variates against drift", {"": Scaffold}),
    "fednova": Recipe("wang2020fednova", "updates normalised by local work", {"": FedNova}),
    "momentum": Recipe("hsu2019", "momentum at the server (FedAvgM)", {"": ServerMomentum}),
    "addition": Recipe("mcmahan2017", "plain server step with a learning rate", {"": Addition}),
    "fedgc": Recipe(
        "fedgc2023", "gradient constraints at clients and server", {"cgc": CGC, "sgc": SGC}
    ),
    "gcfed": Recipe(
        "gcfed2025",
        "gradient centralisation, local and global",
        {"local": LocalGC, "global": GlobalGC},
    ),
    "localgc": Recipe(
        "gcfed2025",
        "gradient centralisation at clients, all layers",
        {"": LocalGC},
        {"": {"layers": "all"}},
    ),
    "globalgc": Recipe("gcfed2025", "gradient centralisation at the server", {"": GlobalGC}),
    "fedgh": Recipe("fedgh2024", "harmonised client updates", {"": FedGH}),
    "gradma": Recipe(
        "luo2023gradma", "gradient memory at workers and server", {"w": GradMAW, "s": GradMAS}
    ),
    "fedreg": Recipe("xu2022fedreg", "alleviated forgetting with pseudo data", {"": FedReg}),
    "fedadam": Recipe("reddi2021", "Adam at the server", {"": FedAdam}),
    "fedyogi": Recipe("reddi2021", "Yogi at the server", {"": FedYogi}),
    "fedadagrad": Recipe("reddi2021", "Adagrad at the server", {"": FedAdagrad}),
    "fedams": Recipe("wang2022fedams", "AMSGrad at the server", {"": FedAMS}),
    "feddyn": Recipe("acar2021feddyn", "dynamic regularisation of each client", {"": FedDyn}),
    "fedcm": Recipe("xu2021fedcm", "the last global direction in every local step", {"": FedCM}),
    "fedsam": Recipe("qu2022fedsam", "gradients at the worst point nearby", {"": FedSAM}),
    "clip": Recipe("pascanu2013", "local gradients no longer than a bound", {"": Clip}),
    "topk": Recipe("stich2018", "only the largest entries of the update are sent", {"": TopK}),
    "quantise": Recipe("alistarh2017", "updates sent in 8 bits", {"": Quantise}),
    "median": Recipe("yin2018", "coordinate-wise median of the updates", {"": Median}),
    "trimmed_mean": Recipe(
        "yin2018", "coordinate-wise mean without the extremes", {"": TrimmedMean}
    ),
    "fedacg": Recipe("kim2024fedacg", "clients start ahead along the momentum", {"": FedACG}),
    "domo": Recipe("xu2022domo", "server momentum fused into what clients receive", {"": DOMO}),
    "fedvarp": Recipe(
        "jhunjhunwala2022", "absent clients' last updates as control variates", {"": FedVARP}
    ),
    "mifa": Recipe("gu2021mifa", "mean of all clients' last updates", {"": MIFA}),
    "mime": Recipe("karimireddy2021mime", "a fixed server momentum in corrected steps", {"": Mime}),
    "mimelite": Recipe(
        "karimireddy2021mime", "a fixed server momentum in every local step", {"": MimeLite}
    ),
    "dpsgd": Recipe("abadi2016", "clipped example gradients with noise", {"": DPSGD}),
    "fedlc": Recipe("zhang2022fedlc", "scores calibrated by class counts", {"": FedLC}),
    "fedntd": Recipe("lee2022fedntd", "distillation of the not-true classes", {"": FedNTD}),
    "feddecorr": Recipe("shi2023feddecorr", "uncorrelated features", {"": FedDecorr}),
    "moon": Recipe("li2021moon", "features near the received model's", {"": Moon}),
    "fedmlb": Recipe("kim2022fedmlb", "hybrids of local and received blocks", {"": FedMLB}),
    "fedsol": Recipe(
        "lee2024fedsol", "gradients away from the received model's outputs", {"": FedSOL}
    ),
    "fedcurv": Recipe("shoham2019fedcurv", "stiff where it matters to others", {"": FedCurv}),
}
"""Every method by name, in the order in which they are listed."""

ALIASES: Mapping[str, str] = {"fedavgm": "momentum", "sgd": "fedsgd"}
"""Other names of methods."""


def find_recipe(name: str) -> Recipe | None:
    """Return the recipe of a method by name, alias or import path, None where there is none.

    Raises:
        CompositionError: a method of one's own that cannot be found or used, or takes a name that
            is taken.
    """
    if ":" in name:
        return _own(name)
    known, paths = REGISTRY.get(ALIASES.get(name, name)), plugins.installed_methods().get(name, ())
    if len(paths) + (known is not None) > 1:
        raise CompositionError(
            f"Several methods are called '{name}'.",
            got=" and ".join([*(["fedkeel's own"] if known else []), *paths]),
            do=f"write '{paths[0]}' for that one, or uninstall its package",
        )
    return _own(paths[0]) if paths else known


def _own(path: str) -> Recipe:
    kinds = plugins.load_parts(path)
    ours = {kind for recipe in REGISTRY.values() for kind in recipe.parts.values()}
    taken = {*REGISTRY, *ALIASES, *(kind.name for kind in ours)}
    for kind in kinds:
        if kind not in ours and kind.name in taken:
            raise CompositionError(
                f"method {path!r}: {kind.__name__} calls itself '{kind.name}'.",
                why="a method of fedkeel has that name, for its state and its messages",
                do=f"give it a name of its own, e.g. name = 'my_{kind.name.replace('.', '_')}'",
            )
    shorts = [kind.name.rpartition(".")[2] for kind in kinds]
    return Recipe(
        kinds[0].paper,
        (kinds[0].__doc__ or "").strip().splitlines()[0].rstrip("."),
        {"": kinds[0]} if len(kinds) == 1 else dict(zip(shorts, kinds, strict=True)),
    )
