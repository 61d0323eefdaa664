"""The papers: BibTeX entries by citation key, and a reference in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files

_ENTRY = re.compile(r"@\w+\{([^,]+),.*?\n\}", re.DOTALL)
_FIELD = re.compile(r"^\s*(\w+)\s*=\s*\{(.*)\},?$", re.MULTILINE)
_ACCENT = re.compile(r"\\([\"'`^~=.uvHcdbk])\s*(\w)|\\([\"'`^~=.uvHcdbk])\{(\w)\}")
_MARKS = {'"': "\u0308", "'": "\u0301", "`": "\u0300", "^": "\u0302", "~": "\u0303", "c": "\u0327"}
_MARKS |= {"v": "\u030c", "u": "\u0306", "=": "\u0304", ".": "\u0307", "H": "\u030b", "k": "\u0328"}


def bibtex(keys: Iterable[str]) -> str:
    """Return the BibTeX entries of citation keys."""
    known = entries()
    return "\n\n".join(known[key] for key in keys)


@lru_cache(maxsize=1)
def entries() -> Mapping[str, str]:
    """Return every BibTeX entry by its key."""
    text = files("fedkeel.method.docs").joinpath("papers.bib").read_text(encoding="utf-8")
    return {found.group(1): found.group() for found in _ENTRY.finditer(text)}


def reference(key: str) -> str:
    """Return a paper in words: authors, title, where it appeared, year.

    >>> reference("li2020fedprox")
    'Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020'
    """
    told = {name: _words(value) for name, value in _FIELD.findall(entries()[key])}
    people = [_family(one) for one in told["author"].split(" and ")]
    who = " and ".join(people) if len(people) < 3 else f"{people[0]} et al."
    printed = [told[name] for name in ("booktitle", "journal") if name in told]
    online = [f"arXiv:{told['eprint']}"] if "eprint" in told else [told.get("note", "")]
    venue = (printed or online)[0]
    short = re.search(r"\(([^()]+)\)", venue)
    where = short[1] if short else venue
    when = [told["year"]] if told["year"] not in where else []
    place = " ".join([where, *when]) if printed else ", ".join([where, *when] if where else when)
    return f"{who}, {told['title']}, {place}"


def _family(person: str) -> str:
    """Return what stands before the comma, or the last word.

    >>> _family("Li, Tian"), _family("Tian Li"), _family("Anonymous")
    ('Li', 'Li', 'Anonymous')
    """
    return person.split(",")[0].strip() if "," in person else person.split()[-1]


def _words(value: str) -> str:
    r"""Return a BibTeX value without its markup.

    >>> _words(r"{SCAFFOLD}: Ag{\"u}era {\'E}, M{\"{u}}ller \& others")
    'SCAFFOLD: Agüera É, Müller & others'
    """
    import unicodedata

    def accented(found: re.Match[str]) -> str:
        mark, letter = found[1] or found[3], found[2] or found[4]
        return unicodedata.normalize("NFC", letter + _MARKS.get(mark, ""))

    plain = _ACCENT.sub(accented, value).replace("\\&", "&").replace("--", "-")
    return " ".join(re.sub(r"[{}\\]", "", plain).split())
