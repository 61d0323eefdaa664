"""Every method by name: its paper, its title and its parts, without importing any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Listed:
    """A method as it is listed.

    Args:
        paper: citation key.
        title: one line.
        parts: name of each part -> its module below `fedkeel.method.parts`, and its class there.
        defaults: hyper-parameters that differ from the parts' own defaults, by the last word of a
            part's name, "" for the part of a method that has one.
    """

    paper: str
    title: str
    parts: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


METHODS: Mapping[str, Listed] = {
    "fedavg": Listed("mcmahan2017", "weighted mean of locally trained models"),
    "fedsgd": Listed(
        "mcmahan2017", "one full-batch gradient for each round", {"fedsgd": "fedsgd:FedSGD"}
    ),
    "minibatch_sgd": Listed(
        "woodworth2020",
        "mean of mini-batch gradients at the received model",
        {"minibatch_sgd": "fedsgd:MinibatchSGD"},
    ),
    "fedprox": Listed(
        "li2020fedprox", "proximal term towards the received model", {"fedprox": "fedprox:FedProx"}
    ),
    "scaffold": Listed(
        "karimireddy2020", "control variates against drift", {"scaffold": "scaffold:Scaffold"}
    ),
    "fednova": Listed(
        "wang2020fednova", "updates normalised by local work", {"fednova": "fednova:FedNova"}
    ),
    "momentum": Listed(
        "hsu2019", "momentum at the server (FedAvgM)", {"momentum": "fedavgm:ServerMomentum"}
    ),
    "addition": Listed(
        "mcmahan2017", "plain server step with a learning rate", {"addition": "server:Addition"}
    ),
    "fedgc": Listed(
        "fedgc2023",
        "gradient constraints at clients and server",
        {"fedgc.cgc": "fedgc:CGC", "fedgc.sgc": "fedgc:SGC"},
    ),
    "gcfed": Listed(
        "gcfed2025",
        "gradient centralisation, local and global",
        {"gcfed.local": "gcfed:LocalGC", "gcfed.global": "gcfed:GlobalGC"},
    ),
    "localgc": Listed(
        "gcfed2025",
        "gradient centralisation at clients, all layers",
        {"gcfed.local": "gcfed:LocalGC"},
        {"": {"layers": "all"}},
    ),
    "globalgc": Listed(
        "gcfed2025", "gradient centralisation at the server", {"gcfed.global": "gcfed:GlobalGC"}
    ),
    "fedgh": Listed("fedgh2024", "harmonised client updates", {"fedgh": "fedgh:FedGH"}),
    "gradma": Listed(
        "luo2023gradma",
        "gradient memory at workers and server",
        {"gradma.w": "gradma:GradMAW", "gradma.s": "gradma:GradMAS"},
    ),
    "fedreg": Listed(
        "xu2022fedreg", "alleviated forgetting with pseudo data", {"fedreg": "fedreg:FedReg"}
    ),
    "fedadam": Listed("reddi2021", "Adam at the server", {"fedadam": "fedopt:FedAdam"}),
    "fedyogi": Listed("reddi2021", "Yogi at the server", {"fedyogi": "fedopt:FedYogi"}),
    "fedadagrad": Listed("reddi2021", "Adagrad at the server", {"fedadagrad": "fedopt:FedAdagrad"}),
    "fedams": Listed("wang2022fedams", "AMSGrad at the server", {"fedams": "fedams:FedAMS"}),
    "feddyn": Listed(
        "acar2021feddyn", "dynamic regularisation of each client", {"feddyn": "feddyn:FedDyn"}
    ),
    "fedcm": Listed(
        "xu2021fedcm", "the last global direction in every local step", {"fedcm": "fedcm:FedCM"}
    ),
    "fedsam": Listed(
        "qu2022fedsam", "gradients at the worst point nearby", {"fedsam": "fedsam:FedSAM"}
    ),
    "clip": Listed("pascanu2013", "local gradients no longer than a bound", {"clip": "clip:Clip"}),
    "topk": Listed(
        "stich2018", "only the largest entries of the update are sent", {"topk": "compress:TopK"}
    ),
    "quantise": Listed("alistarh2017", "updates sent in 8 bits", {"quantise": "compress:Quantise"}),
    "median": Listed(
        "yin2018", "coordinate-wise median of the updates", {"median": "robust:Median"}
    ),
    "trimmed_mean": Listed(
        "yin2018",
        "coordinate-wise mean without the extremes",
        {"trimmed_mean": "robust:TrimmedMean"},
    ),
    "krum": Listed(
        "blanchard2017", "the update that is closest to its nearest others", {"krum": "krum:Krum"}
    ),
    "multikrum": Listed(
        "blanchard2017",
        "mean of the updates that are closest together",
        {"multikrum": "krum:MultiKrum"},
    ),
    "bulyan": Listed(
        "elmhamdi2018",
        "updates chosen by Krum, averaged near their median",
        {"bulyan": "krum:Bulyan"},
    ),
    "geomedian": Listed(
        "pillutla2022",
        "geometric median of the updates",
        {"geomedian": "geomedian:GeometricMedian"},
    ),
    "cclip": Listed(
        "karimireddy2021history",
        "updates clipped around the last aggregate",
        {"cclip": "cclip:CentredClipping"},
    ),
    "fltrust": Listed(
        "cao2021fltrust",
        "updates weighed by their angle to one of the server's own",
        {"fltrust": "fltrust:FLTrust"},
    ),
    "normbound": Listed(
        "sun2019backdoor", "updates no longer than a bound", {"normbound": "normbound:NormBound"}
    ),
    "nnm": Listed(
        "allouah2023", "each update averaged with its nearest ones", {"nnm": "mixing:NearestMixing"}
    ),
    "bucketing": Listed(
        "karimireddy2022", "means of random buckets of updates", {"bucketing": "mixing:Bucketing"}
    ),
    "fedacg": Listed(
        "kim2024fedacg", "clients start ahead along the momentum", {"fedacg": "fedacg:FedACG"}
    ),
    "domo": Listed(
        "xu2022domo", "server momentum fused into what clients receive", {"domo": "domo:DOMO"}
    ),
    "fedvarp": Listed(
        "jhunjhunwala2022",
        "absent clients' last updates as control variates",
        {"fedvarp": "fedvarp:FedVARP"},
    ),
    "mifa": Listed("gu2021mifa", "mean of all clients' last updates", {"mifa": "mifa:MIFA"}),
    "mime": Listed(
        "karimireddy2021mime", "a fixed server momentum in corrected steps", {"mime": "mime:Mime"}
    ),
    "mimelite": Listed(
        "karimireddy2021mime",
        "a fixed server momentum in every local step",
        {"mimelite": "mime:MimeLite"},
    ),
    "dpclient": Listed(
        "mcmahan2018dp",
        "clipped updates with noise on their sum",
        {"dpclient": "dpclient:ClientDP"},
    ),
    "dpquantile": Listed(
        "andrew2021",
        "updates clipped at a quantile of their norms, with noise",
        {"dpquantile": "dpclient:AdaptiveClientDP"},
    ),
    "dpftrl": Listed(
        "kairouz2021dpftrl",
        "clipped updates with noise that a tree shares among rounds",
        {"dpftrl": "dpftrl:TreeDP"},
    ),
    "dpsgd": Listed("abadi2016", "clipped example gradients with noise", {"dpsgd": "dpsgd:DPSGD"}),
    "fedlc": Listed(
        "zhang2022fedlc", "scores calibrated by class counts", {"fedlc": "fedlc:FedLC"}
    ),
    "fedntd": Listed(
        "lee2022fedntd", "distillation of the not-true classes", {"fedntd": "fedntd:FedNTD"}
    ),
    "feddecorr": Listed(
        "shi2023feddecorr", "uncorrelated features", {"feddecorr": "feddecorr:FedDecorr"}
    ),
    "moon": Listed("li2021moon", "features near the received model's", {"moon": "moon:Moon"}),
    "fedrcl": Listed(
        "seo2024fedrcl",
        "features of a class together at several levels, but not too close",
        {"fedrcl": "fedrcl:FedRCL"},
    ),
    "fedmlb": Listed(
        "kim2022fedmlb", "hybrids of local and received blocks", {"fedmlb": "fedmlb:FedMLB"}
    ),
    "fedsol": Listed(
        "lee2024fedsol",
        "gradients away from the received model's outputs",
        {"fedsol": "fedsol:FedSOL"},
    ),
    "fedcurv": Listed(
        "shoham2019fedcurv",
        "a penalty on parameters that other clients need",
        {"fedcurv": "fedcurv:FedCurv"},
    ),
    "fedexp": Listed(
        "jhunjhunwala2023fedexp",
        "a longer server step where updates cancel out",
        {"fedexp": "fedexp:FedExP"},
    ),
    "fedlesam": Listed(
        "fan2024fedlesam",
        "gradients at a point back along the last global step",
        {"fedlesam": "fedlesam:FedLESAM"},
    ),
    "fedspeed": Listed(
        "sun2023fedspeed",
        "a corrected proximal term, and gradients uphill",
        {"fedspeed": "fedspeed:FedSpeed"},
    ),
    "fedsmoo": Listed(
        "sun2023fedsmoo",
        "FedDyn on gradients uphill, in a direction that clients agree on",
        {"fedsmoo": "fedsmoo:FedSMOO"},
    ),
    "fedtrip": Listed(
        "li2023fedtrip",
        "near the received model and away from the client's last one",
        {"fedtrip": "fedtrip:FedTrip"},
    ),
    "fedgamma": Listed(
        "dai2023fedgamma",
        "SCAFFOLD on gradients at the worst point nearby",
        {"scaffold": "scaffold:Scaffold", "fedsam": "fedsam:FedSAM"},
    ),
    "mofedsam": Listed(
        "qu2022fedsam",
        "FedCM on gradients at the worst point nearby",
        {"fedcm": "fedcm:FedCM", "fedsam": "fedsam:FedSAM"},
    ),
    "feddisco": Listed(
        "ye2023feddisco",
        "weights from how unevenly a client's classes are mixed",
        {"feddisco": "feddisco:FedDisco"},
    ),
    "feduv": Listed(
        "son2024feduv", "varied probabilities and scattered features", {"feduv": "feduv:FedUV"}
    ),
    "fednar": Listed(
        "li2023fednar",
        "gradient and weight decay shortened together",
        {"fednar": "fednar:FedNAR"},
    ),
    "fedper": Listed(
        "arivazhagan2019fedper", "each client keeps its head", {"fedper": "fedper:FedPer"}
    ),
    "fedrep": Listed(
        "collins2021fedrep",
        "each client's own head, trained before the base",
        {"fedrep": "fedrep:FedRep"},
    ),
    "lgfedavg": Listed(
        "liang2020lgfedavg",
        "each client keeps its representation",
        {"lgfedavg": "lgfedavg:LGFedAvg"},
    ),
    "fedbn": Listed("li2021fedbn", "each client keeps its normalisation", {"fedbn": "fedbn:FedBN"}),
    "fedbabu": Listed(
        "oh2022fedbabu",
        "a head that never moves, fine-tuned by each client",
        {"fedbabu": "fedbabu:FedBABU"},
    ),
    "fedrod": Listed(
        "chen2022fedrod",
        "a balanced head, and each client's own beside it",
        {"fedrod": "fedrod:FedRoD"},
    ),
    "fedproto": Listed(
        "tan2022fedproto",
        "each client's own model, with the mean features of each class shared",
        {"fedproto": "fedproto:FedProto"},
    ),
    "fedmd": Listed(
        "li2019fedmd",
        "each client's own model, drawn to the mean scores of public inputs",
        {"fedmd": "fedmd:FedMD"},
    ),
    "ditto": Listed(
        "li2021ditto", "each client's own model, drawn to the global one", {"ditto": "ditto:Ditto"}
    ),
    "apfl": Listed(
        "deng2020apfl", "each client's own model, mixed with the global one", {"apfl": "apfl:APFL"}
    ),
    "pfedme": Listed(
        "dinh2020pfedme", "a global model on the Moreau envelope", {"pfedme": "pfedme:PFedMe"}
    ),
    "perfedavg": Listed(
        "fallah2020perfedavg",
        "a model that one local step makes personal",
        {"perfedavg": "perfedavg:PerFedAvg"},
    ),
    "knnper": Listed(
        "marfoq2022knnper",
        "predictions by each client's nearest examples",
        {"knnper": "knnper:KNNPer"},
    ),
    "fedala": Listed(
        "zhang2023fedala",
        "each client begins at a learned mixture with its own model",
        {"fedala": "fedala:FedALA"},
    ),
    "finetune": Listed(
        "yu2020salvaging",
        "each client trains the global model once more",
        {"finetune": "finetune:FineTune"},
    ),
    "fedinit": Listed(
        "sun2023fedinit",
        "clients begin away from where they ended",
        {"fedinit": "fedinit:FedInit"},
    ),
    "fedsalora": Listed(
        "guo2025fedsalora",
        "adapters whose matrix B stays at the client",
        {"fedsalora": "fedsalora:FedSALoRA"},
    ),
    "scaffnew": Listed(
        "mishchenko2022proxskip",
        "control variates without extra messages (ProxSkip)",
        {"scaffnew": "scaffnew:Scaffnew"},
    ),
    "fedau": Listed(
        "wang2024fedau", "weights by how seldom clients take part", {"fedau": "fedau:FedAU"}
    ),
    "fedawa": Listed(
        "shi2025fedawa", "aggregation weights trained at the server", {"fedawa": "fedawa:FedAWA"}
    ),
    "qfedavg": Listed(
        "li2020qffl", "clients with a high loss count more (q-FFL)", {"qfedavg": "qfedavg:QFedAvg"}
    ),
    "term": Listed(
        "li2021term", "weights tilted by the exponential of the loss", {"term": "term:TERM"}
    ),
    "afl": Listed("mohri2019afl", "the worst mixture of clients", {"afl": "afl:AFL"}),
    "fedadamw": Listed(
        "liu2026fedadamw",
        "local AdamW from averaged second moments",
        {"fedadamw": "fedadamw:FedAdamW"},
    ),
    "fedmuon": Listed(
        "takezawa2025fedmuon",
        "orthogonalised local momentum, bias corrected",
        {"fedmuon": "fedmuon:FedMuon"},
    ),
    "fedswa": Listed(
        "liu2025fedswa", "a learning rate that falls within each round", {"fedswa": "fedswa:FedSWA"}
    ),
    "fedmoswa": Listed(
        "liu2025fedswa",
        "FedSWA with control variates that are moving averages",
        {"fedswa": "fedswa:FedSWA", "fedmoswa.variates": "fedswa:MomentumVariates"},
    ),
    "ffalora": Listed(
        "sun2024ffalora",
        "adapters of which only one factor is trained",
        {"ffalora": "lora:FFALoRA"},
    ),
    "rolora": Listed(
        "chen2025rolora", "adapters whose factors are trained in turn", {"rolora": "lora:RoLoRA"}
    ),
    "flora": Listed(
        "wang2024flora",
        "products of adapters merged into their layers",
        {"flora": "flora:FLoRA"},
    ),
    "fedlada": Listed(
        "sun2023fedlada",
        "local AMSGrad amended by the last direction",
        {"fedlada": "fedlada:FedLADA"},
    ),
    "fedbuff": Listed(
        "nguyen2022fedbuff",
        "a server step with every buffer of updates, without waiting",
        {"fedbuff": "fedbuff:FedBuff"},
    ),
    "fedasync": Listed(
        "xie2019fedasync",
        "each client's model mixed in as soon as it comes",
        {"fedasync": "fedasync:FedAsync"},
    ),
    "ifca": Listed(
        "ghosh2020ifca", "a model for each cluster, chosen by the loss", {"ifca": "ifca:IFCA"}
    ),
    "fedamp": Listed(
        "huang2021fedamp",
        "each client drawn to a mixture of models that are like its own",
        {"fedamp": "fedamp:FedAMP"},
    ),
}
"""Every method, in the order in which they are listed."""

ALIASES: Mapping[str, str] = {"fedavgm": "momentum", "sgd": "fedsgd", "proxskip": "scaffnew"}
"""Other names of methods."""

ENTRY_POINTS = "fedkeel.methods"
"""Group of the entry points of packages that bring methods."""


@lru_cache(maxsize=1)
def installed_methods() -> Mapping[str, tuple[str, ...]]:
    """Return the import paths that installed packages declare, by name."""
    paths: dict[str, tuple[str, ...]] = {}
    for point in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda p: (p.name, p.value)):
        paths[point.name] = tuple(dict.fromkeys([*paths.get(point.name, ()), point.value]))
    return paths
