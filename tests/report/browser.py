"""Pages in headless Chromium: what a reader sees, measured in the page itself.

The page is shown in a frame of the given width, because a window has a smallest one.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

_FRAME = """<!doctype html><html lang="en"><title>frame</title>
<body style="margin: 0"><iframe title="page" style="border: 0; height: 900px;
width: WIDTHpx"></iframe><pre id="result"></pre>
<script src="axe.js"></script><script>
const axeText = fetch("axe.js").then((answer) => answer.text());
const frame = document.querySelector("iframe");
frame.addEventListener("load", async (event) => {
  const page = event.target.contentWindow, root = page.document;
  const all = (query) => [...root.querySelectorAll(query)];
  all("details").forEach((part) => { part.open = true; });
  await new Promise((done) => setTimeout(done, 1000));  // charts are drawn when they are opened
  const script = root.createElement("script");
  script.textContent = await axeText;
  root.head.append(script);
  const { violations } = await page.axe.run(root, { resultTypes: ["violations"] });

  const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(page.getComputedStyle(root.body).backgroundColor);
  const contrast = (element) => {
    const tone = light(page.getComputedStyle(element).fill);
    return (Math.max(tone, ground) + 0.05) / (Math.min(tone, ground) + 0.05);
  };
  const texts = all(".plot svg text:not(.hm text)").filter((text) => text.textContent.trim());
  const traces = all("#curves .plot").filter((box) => box.data)
    .map((box) => box.data.filter((t) => t.mode === "lines" && t.line.width > 0 && t.legendgroup));
  document.getElementById("result").textContent = JSON.stringify({
    dark: page.matchMedia("(prefers-color-scheme: dark)").matches,
    width: page.innerWidth,
    needed: root.documentElement.scrollWidth,
    violations: violations.map((v) => [v.id, v.nodes.map((n) => n.html.slice(0, 200))]),
    faint: texts.filter((text) => contrast(text) < 4.5).map((text) => text.textContent),
    texts: texts.length,
    drawn: all(".plot .main-svg").length,
    untold: all(".plot, svg:not(.plot svg, #js-plotly-tester)")
      .filter((image) => !image.closest("[aria-hidden]") && !(image.ariaLabel && image.role))
      .map((image) => image.outerHTML.slice(0, 200)),
    bare: all("table").filter((table) => !table.caption).length
      + all("th").filter((cell) => !cell.scope).length,
    tables: all("table").length,
    lines: traces.map((lines) => lines.map((t) => [t.legendgroup, t.line.dash || "solid"])),
  });
});
frame.src = "page.html";  // a small page would have been loaded before anybody listens
</script></body></html>
"""


@dataclass(frozen=True)
class Seen:
    """What was seen of a page.

    Args:
        console: errors and warnings of the console, one line each.
        dark: whether the page was in its dark colours.
        width: of the page, in pixels.
        needed: width of its content; larger than `width` where the page scrolls sideways.
        violations: (rule, elements) of axe-core.
        faint: texts in charts whose contrast to the page is below 4.5.
        texts: number of texts in charts.
        drawn: number of charts that were drawn.
        untold: charts and images without a text for readers who cannot see them.
        bare: number of tables without a caption, and of their headings without a scope.
        tables: number of tables.
        lines: of each chart of learning curves, the method and the dash of each line.
    """

    console: list[str]
    dark: bool
    width: int
    needed: int
    violations: list[tuple[str, list[str]]]
    faint: list[str]
    texts: int
    drawn: int
    untold: list[str]
    bare: int
    tables: int
    lines: list[list[tuple[str, str]]]


def look_at(page: str, folder: Path, *, width: int, dark: bool) -> Seen:
    """Show a page in the browser.

    Args:
        page: its HTML.
        folder: an empty folder for the browser.
        width: of the page in pixels.
        dark: whether the reader's system is dark.
    """
    site = folder / "site"
    site.mkdir()
    if "script-src" not in page:  # it forbids all scripts, axe-core too
        page = page.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    (site / "page.html").write_text(page, encoding="utf-8")
    (site / "frame.html").write_text(_FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    axe = resources.files("axe_core_python") / "axe.min.js"
    (site / "axe.js").write_text(axe.read_text(encoding="utf-8"), encoding="utf-8")
    with _served(site) as address:
        done = subprocess.run(
            [
                *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"),
                *(f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"),
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                *("--window-size=1400,900", "--virtual-time-budget=60000", "--dump-dom"),
                f"{address}/frame.html",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
    console = re.findall(r":CONSOLE:\d+\] (.*)", done.stderr)
    result = re.search(r'<pre id="result">(.+?)</pre>', done.stdout, re.S)
    if result is None:
        raise AssertionError(f"the page was not measured: {console or done.stderr[-2000:]}")
    return Seen(console, **json.loads(html.unescape(result[1])))


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; the address is given."""
    handler = partial(_Silent, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Silent(SimpleHTTPRequestHandler):
    """A server that prints nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
