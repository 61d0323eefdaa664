"""Keep the site readable without a network: a hook of mkdocs.

Formulas become MathML, which browsers draw without a script. Figures in notebooks bring plotly.js
with them. The scripts by which nbconvert loads MathJax and Mermaid are left out: no notebook here
has formulas or diagrams. A page that would still load anything from another host ends the build.
"""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path
from typing import Any

_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL
)  # as pymdownx.arithmatex leaves them

_NOT_KNOWN = (
    (re.compile(r"\\arg(?![A-Za-z])"), r"\\operatorname{arg}"),
    (re.compile(r"(\\[bB]ig[lr])\\[lr]Vert"), r"\1‖"),
    (re.compile(r"\{aligned\}"), "{align*}"),
)
"""LaTeX that latex2mathml has no MathML for, and what to write in its place."""

_ALIGNED = (
    ('columnalign="right"', 'style="text-align: right; padding-right: 0"'),
    ('columnalign="left"', 'style="text-align: left; padding-left: 0"'),
)
"""What is not of MathML Core, and the style that browsers take in its place."""

_LOADER = re.compile(
    r"""<script\b(?:(?!</script>).)*?["']https?://[^"']*/(?:mathjax|mermaid)/.*?</script>""",
    re.DOTALL,
)

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\ssrc\s*=\s*["']?((?:https?:)?//[^"'\s>]+)
    |<link\b(?=[^>]*\brel\s*=\s*["']?(?:stylesheet|preload|preconnect|icon|dns-prefetch))[^>]*?
        \shref\s*=\s*["']?((?:https?:)?//[^"'\s>]+)
    |(?:@import\s*|url\(\s*|\bimport\s*\(\s*)["']?((?:https?:)?//[^"'\s)]+)""",
    re.VERBOSE,
)


def on_startup(**_: Any) -> None:  # noqa: ANN401 - what mkdocs passes
    """Let figures in notebooks be HTML, where plotly would leave only a type that Jupyter draws."""
    os.environ["PLOTLY_RENDERER"] = "notebook"


def on_page_content(html: str, **_: Any) -> str:  # noqa: ANN401
    """Return a page with MathML in place of LaTeX, and without nbconvert's loaders."""
    return _FORMULA.sub(_mathml, _LOADER.sub("", html))


def on_post_build(config: Any, **_: Any) -> None:  # noqa: ANN401
    """Refuse a site that loads from another host.

    Raises:
        PluginError: a page or a style does.
    """
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    files = [file for kind in ("*.html", "*.css") for file in sorted(site.rglob(kind))]
    found = [
        f"{file.relative_to(site)}: {address}"
        for file in files
        for address in loaded_from_hosts(file.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError("loaded from another host:\n" + "\n".join(found))


def loaded_from_hosts(text: str) -> list[str]:
    """Return the addresses on other hosts that a browser would load with a page or a style.

    >>> loaded_from_hosts('<script src="https://a.org/b.js"></script> <a href="https://c.org">c</a>')
    ['https://a.org/b.js']
    """
    return ["".join(groups) for groups in _LOADED.findall(text)]


def _mathml(found: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    latex = unescape(found[3]).strip()
    for pattern, known in _NOT_KNOWN:
        latex = pattern.sub(known, latex)
    made = convert(latex, display="block" if found[2] == "[" else "inline")
    left = re.search(r"\\[A-Za-z]+|&(?!#)", made)
    if left:
        from mkdocs.exceptions import PluginError

        raise PluginError(f"no MathML for {left[0]} in the formula {latex}")
    for attribute, style in _ALIGNED:
        made = made.replace(attribute, style)
    return str(made)
