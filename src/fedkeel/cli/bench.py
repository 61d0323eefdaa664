"""``fedkeel bench``: how fast this machine trains clients, by engine."""

from __future__ import annotations

from typing import Any

import typer

from fedkeel.cli.common import JSON, document

SECONDS = typer.Option(1.0, "--seconds", min=0.0, help="Seconds for each engine, about.")
ONLY = typer.Option(None, "--only", metavar="NAME", help="One workload: 2NN, CNN or logistic.")


def bench(seconds: float = SECONDS, only: str = ONLY, as_json: bool = JSON) -> None:
    """Measure clients and steps a second by engine, and their share of the arithmetic peak."""
    from dataclasses import asdict

    from fedkeel.experiment.bench import gpus, peak, speeds, workloads
    from fedkeel.experiment.manifest import environment
    from fedkeel.experiment.prepare import cores

    chosen = workloads(only)
    machine = environment()
    peaks = [peak(cores(), seconds), *gpus(seconds)]
    gpu = peaks[1].rate if len(peaks) > 1 else None
    found: dict[str, Any] = {"environment": machine, "peaks": [asdict(one) for one in peaks]}
    found["workloads"] = {}
    if not as_json:
        _print_machine(machine, found["peaks"])
    for work in chosen:
        if not as_json:
            print(f"\n{work.name}: {work.words}")
            print(f"  {'engine':<36}{'clients/s':>12}{'steps/s':>12}{'of peak':>12}")
        rows = []
        for speed in speeds(work, peaks[0].rate, seconds, gpu):
            rows.append(asdict(speed))
            if not as_json:
                print(
                    f"{'*' if speed.auto else ' '} {speed.engine:<36}{speed.clients:>12,.1f}"
                    f"{speed.steps:>12,.1f}{speed.share:>12.3f}",
                    flush=True,
                )
        found["workloads"][work.name] = {**asdict(work), "engines": rows}
    if as_json:
        document(found)
    else:
        print("\n* what engine.kind = 'auto' chooses")


def _print_machine(machine: dict[str, Any], peaks: list[dict[str, Any]]) -> None:
    count = machine["cores"]
    print(f"machine   {machine['processor']}, {count} core{'s' if count > 1 else ''}")
    print(f"software  torch {machine['torch']}, Python {machine['python']}")
    for one in peaks:
        where = f"{one['processes']} x 1 thread" if one["device"] == "cpu" else one["device"]
        print(f"peak      {one['rate'] / 1e9:,.1f} billion multiply-adds/s in float32, {where}")
