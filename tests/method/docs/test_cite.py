"""Citations: exactly those of the parts composed, each with its entry."""

from __future__ import annotations

import re
from importlib.resources import files

from each import each
from fedkeel.method.docs.cite import bibtex, cite, keys
from fedkeel.method.grammar import parse
from fedkeel.method.registry import REGISTRY

TEXT = files("fedkeel.method.docs").joinpath("papers.bib").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^@\w+\{([^,]+),", TEXT, flags=re.MULTILINE)


def cited(expression: str) -> list[str]:
    return re.findall(r"^@\w+\{([^,]+),", cite(expression), flags=re.MULTILINE)


@each("entry", REGISTRY)
def test_every_entry_cites_its_own_paper_and_those_of_its_parts(entry: str) -> None:
    recipe = REGISTRY[entry]
    papers = {recipe.paper, *(kind.paper for kind in recipe.parts.values())}
    assert sorted(cited(entry)) == sorted(papers)
    if entry not in ("fedgamma", "mofedsam"):
        assert papers == {recipe.paper}


@each(
    ("expression", "wanted"),
    [
        ("fedavg", ["mcmahan2017"]),
        ("fedavg+fedprox", ["li2020fedprox"]),
        ("fedprox+gcfed", ["li2020fedprox", "gcfed2025"]),
        ("gcfed+fedprox", ["gcfed2025", "li2020fedprox"]),
        ("gradma", ["luo2023gradma"]),
        ("gradma.w+momentum", ["luo2023gradma", "hsu2019"]),
        ("fedgamma+topk", ["dai2023fedgamma", "karimireddy2020", "qu2022fedsam", "stich2018"]),
        ("fedsam+scaffold", ["dai2023fedgamma", "qu2022fedsam", "karimireddy2020"]),
        ("mofedsam", ["xu2021fedcm", "qu2022fedsam"]),
        ("fednova+fedgh+addition(lr=0.5)", ["wang2020fednova", "fedgh2024", "mcmahan2017"]),
    ],
)
def test_a_combination_cites_its_parts_once_each(expression: str, wanted: list[str]) -> None:
    assert cited(expression) == wanted
    assert keys(parse(expression)) == wanted


def test_every_key_has_one_entry() -> None:
    assert len(set(ENTRIES)) == len(ENTRIES)
    assert {recipe.paper for recipe in REGISTRY.values()} <= set(ENTRIES)


@each("key", ENTRIES)
def test_an_entry_is_whole(key: str) -> None:
    entry = bibtex([key])
    assert entry.startswith("@")
    assert entry.count("{") == entry.count("}")
    assert entry.endswith("\n}")
    for name in ("author", "title", "year"):
        assert re.search(rf"^\s*{name}\s*=\s*[{{\"]?\S", entry, flags=re.MULTILINE)
