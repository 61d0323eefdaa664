"""The papers: their BibTeX entries by citation key, and references as text."""

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
    return "\n\n".join(entries()[key] for key in keys)


@lru_cache(maxsize=1)
def entries() -> Mapping[str, str]:
    """Return every BibTeX entry by its key."""
    text = files("fedkeel.method.docs").joinpath("papers.bib").read_text(encoding="utf-8")
    return {match.group(1): match.group() for match in _ENTRY.finditer(text)}


def reference(key: str) -> str:
    """Return a paper in words: authors, title, where it appeared, year.

    >>> reference("li2020fedprox")
    'Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020'
    """
    fields = {name: _plain(value) for name, value in _FIELD.findall(entries()[key])}
    names = [_family_name(author) for author in fields["author"].split(" and ")]
    authors = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    printed = fields.get("booktitle", fields.get("journal"))
    online = f"arXiv:{fields['eprint']}" if "eprint" in fields else fields.get("note", "")
    venue = online if printed is None else printed
    acronym = re.search(r"\(([^()]+)\)", venue)
    venue = acronym[1] if acronym else venue
    year = "" if fields["year"] in venue else fields["year"]
    place = (", " if printed is None else " ").join(filter(None, (venue, year)))
    return f"{authors}, {fields['title']}, {place}"


def _family_name(author: str) -> str:
    """Return the words before a comma, or the last word.

    >>> _family_name("Li, Tian"), _family_name("Tian Li"), _family_name("Anonymous")
    ('Li', 'Li', 'Anonymous')
    """
    return author.split(",")[0].strip() if "," in author else author.split()[-1]


def _plain(value: str) -> str:
    r"""Return a BibTeX value without its markup.

    >>> _plain(r"{SCAFFOLD}: Ag{\"u}era {\'E}, M{\"{u}}ller \& others")
    'SCAFFOLD: Agüera É, Müller & others'
    """
    import unicodedata

    def accented(match: re.Match[str]) -> str:
        mark, letter = match[1] or match[3], match[2] or match[4]
        return unicodedata.normalize("NFC", letter + _MARKS.get(mark, ""))

    text = _ACCENT.sub(accented, value).replace("\\&", "&").replace("--", "-")
    return " ".join(re.sub(r"[{}\\]", "", text).split())
