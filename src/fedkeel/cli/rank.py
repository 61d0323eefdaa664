"""``fedkeel rank``: methods over several experiments."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import JSON, document, say, stderr


def rank(
    comparisons: list[Path] = typer.Argument(
        ..., metavar="COMPARISON...", help="Comparison folders, one for each experiment."
    ),
    figure: Path = typer.Option(
        None, "--figure", help="Write the picture to FIGURE.svg and FIGURE.pdf (needs matplotlib)."
    ),
    as_json: bool = JSON,
) -> None:
    """Rank methods over several experiments: Friedman's test, Nemenyi's critical difference.

    Methods that all comparisons have are ranked in each by the mean of their best scores.
    """
    from rich.console import Console

    from fedkeel.report.paper_figures import save_rank_figure
    from fedkeel.report.ranking import rank_methods, rank_sentence
    from fedkeel.report.text_table import TextTable

    test = rank_methods(comparisons)
    pairs = list(zip(test.methods, test.ranks, strict=True))
    if as_json:
        document(
            {
                "experiments": test.experiments,
                "friedman_p_value": test.p_value,
                "critical_difference": test.critical_difference,
                "ranks": [{"method": name, "mean_rank": rank} for name, rank in pairs],
                "above": [list(pair) for pair in test.separated],
                "claim": rank_sentence(test),
            }
        )
    else:
        ranks = [(name, f"{mean:.2f}") for name, mean in pairs]
        Console().print(TextTable(["method", "mean rank"], ranks).terminal())
        say(Console(), rank_sentence(test))
    if figure is not None:
        for file in save_rank_figure(test, figure):
            say(stderr(), f"figure  {file}")
