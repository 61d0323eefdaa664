"""Whether the doctor's advice is good: python benchmarks/doctor.py tune, then advise, then table

For each setting of `doctor_settings.py`, `tune` tunes every candidate method with an equal budget:
the local learning rate and, where it has one, its most important hyper-parameter, in six trials
of one seed that is not reported, by the mean score of the last ten rounds on a fifth of each
client's training examples; the best of them then runs with three other seeds. `advise` asks the
doctor, and `table` prints as Markdown how far the best of its three methods is from the best of
all, in seen and in unseen settings, and what fixed lists of methods would have got. Each line of
RESULTS is one method in one setting; what is there is not made again, so the script can be
stopped, or killed, and started at any time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Literal

import torch
from doctor_settings import SEEN, SETTINGS, UNSEEN, Setting

from fedkeel import config
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import Stat, mean_of_last, sample_deviation
from fedkeel.report.formatting import format_score
from fedkeel.study.compare import compare
from fedkeel.study.doctor.examine import ADVISED, examine
from fedkeel.study.trial_score import TrialScore
from fedkeel.study.tune import tune

RESULTS = Path(__file__).parent / "results" / "doctor.jsonl"
SEEDS, TUNING_SEED = 3, 100

BASELINES = ("local", "centralised")
GLOBAL = (
    *("fedavg", "fedprox", "scaffold", "fednova", "momentum", "fedadam", "feddyn", "fedcm"),
    *("fedsam", "gcfed", "fedgc", "fedgh", "gradma.s", "fedntd", "fedlc", "fedexp"),
)
PERSONAL = (
    *("fedavg", "fedprox", "scaffold", "momentum", "fedadam", "fedlc"),
    *("fedper", "fedrep", "finetune", "ditto", "apfl", "fedrod"),
)
BATCH_NORM = ("fedbn", "fedbn+finetune")
"""Personal methods for a model with batch normalisation."""
CHOICES: dict[str, dict[str, config.Choices]] = {
    "fedprox": {"mu": (0.01, 0.3)},
    "momentum": {"beta": (0.5, 0.9)},
    "fedadam": {"lr": (0.01, 0.1)},
    "feddyn": {"alpha": (0.01, 0.1)},
    "fedcm": {"alpha": (0.1, 0.5)},
    "fedsam": {"rho": (0.02, 0.1)},
    "gcfed": {"lam": (0.3, 0.9)},
    "gradma.s": {"beta1": (0.5, 0.9)},
    "fedntd": {"beta": (0.3, 1.0)},
    "fedlc": {"tau": (0.1, 1.0)},
    "finetune": {"epochs": (1, 5)},
    "ditto": {"lam": (0.1, 1.0)},
}
"""Hyper-parameters that are tuned beside the learning rate."""

FIXED = ("feddyn", "fedgh", "gradma.s")
"""One of the two lists of three that did best in seen settings with one model, in hindsight."""

RATES = {3: (0.3, 1.0, 3.0), 6: (0.1, 0.3, 0.6, 1.0, 2.0, 4.0)}
"""Factors on a setting's learning rate, by their number."""


def space(method: str, setting: Setting) -> config.Space:
    """Six trials: six learning rates, or three of them by two values of a hyper-parameter."""
    name = next((name for name in CHOICES if name in method.split("+")), None)
    rates = tuple(float(f"{setting.lr * factor:.3g}") for factor in RATES[3 if name else 6])
    return config.Space(
        space={"local.lr": rates},
        method={name: CHOICES[name]} if name else {},
        seed=TUNING_SEED,
        metric="last_mean",
    )


def baseline(
    method: str, space: config.Space, run: config.Run, parts: Ingredients
) -> tuple[config.Run, float, MetricInfo]:
    """Choose a baseline's learning rate as `tune` does, which takes methods alone."""
    score = TrialScore.prepare(run, parts, space)
    values: dict[float, float] = {}
    rates = space.space["local.lr"]
    for lr in map(float, rates if isinstance(rates, tuple) else ()):
        settings = with_rate(score.settings, lr).model_copy(update={"seed": TUNING_SEED})
        try:
            result = compare(settings, score.ingredients, [method], 1).results[0]
        except TrainingError:
            continue
        info = result.record.score
        values[lr] = score.of(result.rows, info)
    best = max(values, key=lambda lr: info.sign * values[lr])
    return with_rate(run, best), values[best], info


def with_rate(run: config.Run, lr: float) -> config.Run:
    return run.model_copy(update={"local": run.local.model_copy(update={"lr": lr})})


def tuned(method: str, setting: Setting, run: config.Run, parts: Ingredients) -> dict[str, Any]:
    """Tune a method and run the best; return what is to be known of it."""
    begun = time.perf_counter()
    row: dict[str, Any] = {}
    try:
        choices = space(method, setting)
        if method in BASELINES:
            best, value, info = baseline(method, choices, run, parts)
            best = best.model_copy(update={"method": method})
        else:
            with tempfile.TemporaryDirectory() as out:
                search = tune(run, parts, [method], choices, Path(out))
            best, chosen = search.settings[method], search.rows[0]
            value, info = chosen.value or 0.0, chosen.score
        row |= {"tuned": best.method, "lr": best.local.lr, "validation": value}
        row |= {"metric": info.name, "sign": info.sign}
        made = compare(best, parts, [best.method], SEEDS)
        row["scores"] = [
            mean_of_last([r.test[info.name] for r in result.rows if r.round and r.test])
            for result in made.results
        ]
        if made.failures:
            row["failures"] = made.failures
    except FedkeelError as error:
        row["error"] = str(error).splitlines()[0]
    return {**row, "seconds": round(time.perf_counter() - begun, 1)}


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that are there; the last one may be half written."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def write(path: Path, row: dict[str, Any]) -> None:
    """Append a row, on a line of its own whatever a kill left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if is_cut else "") + json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def tune_all(path: Path, names: Sequence[str]) -> None:
    done = {(row["setting"], row.get("method")) for row in rows(path)}
    for name in names:
        setting, methods = SETTINGS[name], methods_of(name)
        missing = [method for method in methods if (name, method) not in done]
        if not missing:
            continue
        run, parts = setting.build()
        for method in missing:
            row = {"setting": name, "method": method, **tuned(method, setting, run, parts)}
            write(path, row)
            print(json.dumps(row), flush=True)


def advise_all(path: Path, names: Sequence[str], folder: Path | None) -> None:
    """Ask the doctor about each setting that it was not asked about, and write what it says."""
    done = {row["setting"] for row in rows(path) if "trials" in row.get("advice", ())}
    for name in names:
        if name in done:
            continue
        setting = SETTINGS[name]
        run, parts = setting.build()
        run = with_rate(run.model_copy(update={"name": name}), setting.lr)
        begun = time.process_time()
        record = examine(run, parts, out=None if folder is None else folder / name)
        values = record.to_json()
        tried = [*values["advised"], *values["not_advised"]]
        advice = {
            "methods": record.methods,
            "trials": [one["trial"] for one in tried],
            "excluded": [one["method"] for one in values["excluded"]],
            "findings": values["findings"],
            "processor_seconds": round(time.process_time() - begun, 1),
        }
        write(path, {"setting": name, "advice": advice})
        print(name, *record.methods, flush=True)


@dataclass(frozen=True)
class Outcome:
    """How the advice did in a setting.

    Args:
        setting: its name.
        best: the row of the best method of all.
        advised: the three methods.
        best_advised: the row of the best of them.
        methods: number of methods that could be compared.
    """

    setting: str
    best: dict[str, Any]
    advised: tuple[str, ...]
    best_advised: dict[str, Any]
    methods: int

    @property
    def loss(self) -> float:
        """How much worse the best advised method is, in the metric, positive for worse."""
        sign = float(self.best["sign"])
        return sign * (mean(self.best["scores"]) - mean(self.best_advised["scores"]))

    @property
    def error(self) -> float:
        """Standard error of the mean of the best method over its seeds."""
        return (sample_deviation(self.best["scores"]) or 0.0) / math.sqrt(SEEDS)

    @property
    def is_within(self) -> bool:
        """Whether the best advised method is within one standard error of the best of all."""
        return self.loss <= self.error


def outcomes(path: Path, names: Iterable[str]) -> list[Outcome]:
    """Return the outcome of each setting that has been tuned in full and asked about."""
    advice = {
        row["setting"]: tuple(row["advice"]["methods"]) for row in rows(path) if "advice" in row
    }
    by_setting = compared(path, names)
    return [
        outcome(name, of_setting, advice[name])
        for name, of_setting in by_setting.items()
        if name in advice
    ]


def of_list(path: Path, names: Iterable[str], methods: Sequence[str]) -> list[Outcome]:
    """Return the outcomes of the same methods in every setting where one model is judged.

    A setting in which none of them can run is left out, and counts as a miss.
    """
    return [
        outcome(name, of_setting, tuple(methods))
        for name, of_setting in compared(path, names).items()
        if not SETTINGS[name].is_personal and any(method in of_setting for method in methods)
    ]


def full_length(path: Path, names: Iterable[str]) -> list[Outcome]:
    """Return the outcomes of the three methods with the best tuning trials, in place of advice.

    These trials are as long as a run, and none was cut short: what the doctor cannot beat.
    """
    found = []
    for name, of_setting in compared(path, names).items():
        tuned = [row for row in of_setting.values() if row["method"] not in BASELINES]
        tuned.sort(key=lambda row: -row["sign"] * row["validation"])
        advised = tuple(str(row["method"]) for row in tuned[:ADVISED])
        found.append(outcome(name, of_setting, advised))
    return found


def compared(path: Path, names: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what can be compared, by setting and method, of settings tuned in full.

    `local` counts where personal models are judged; training in one place never does.
    """
    tuned: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows(path):
        if "advice" not in row:
            tuned.setdefault(row["setting"], {})[row["method"]] = row
    return {
        name: {
            method: row
            for method, row in tuned[name].items()
            if len(row.get("scores", ())) == SEEDS
            and (method not in BASELINES or (SETTINGS[name].is_personal and method == "local"))
        }
        for name in names
        if set(methods_of(name)) <= tuned.get(name, {}).keys()
    }


def outcome(name: str, of_setting: dict[str, dict[str, Any]], advised: tuple[str, ...]) -> Outcome:
    ranked = sorted(of_setting.values(), key=lambda row: -row["sign"] * mean(row["scores"]))
    of_three = [row for row in ranked if row["method"] in advised]
    return Outcome(name, ranked[0], advised, of_three[0], len(ranked))


def table(found: Sequence[Outcome]) -> str:
    """Return the outcomes as Markdown."""
    lines = [
        "| setting | advised | best of the three | best of all | behind | SE | within |",
        "| --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    for one in found:
        info = MetricInfo(one.best["metric"], one.best["sign"] > 0, unit_of(one.best["metric"]))
        shown = [f"`{r['tuned']}` {score(r, info)}" for r in (one.best_advised, one.best)]
        behind, error = (points(value, info) for value in (one.loss, one.error))
        advised = ", ".join(f"`{method}`" for method in one.advised)
        lines.append(
            f"| {SETTINGS[one.setting].about} | {advised} | {shown[0]} | {shown[1]}, of "
            f"{one.methods} | {behind} | {error} | {'yes' if one.is_within else '**no**'} |"
        )
    lines += ["", f"Within one standard error: {within(found)} of {len(found)} settings."]
    return "\n".join(lines)


def table_of_lists(path: Path, names: Sequence[str]) -> str:
    """Return how the doctor and `FIXED` did, and counts of all lists of three, as Markdown."""
    lines = [
        "| setting | behind, the doctor | behind, the list | SE | within, the list |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    doctor = {one.setting: one for one in outcomes(path, names)}
    names = [name for name in doctor if not SETTINGS[name].is_personal]
    for one in of_list(path, names, FIXED):
        info = MetricInfo(one.best["metric"], one.best["sign"] > 0, unit_of(one.best["metric"]))
        values = (doctor[one.setting].loss, one.loss, one.error)
        cells = " | ".join(points(value, info) for value in values)
        is_within = "yes" if one.is_within else "**no**"
        lines.append(f"| {SETTINGS[one.setting].about} | {cells} | {is_within} |")
    counts = {three: within(of_list(path, names, three)) for three in combinations(GLOBAL, 3)}
    best = max(counts.values())
    reached = sum(count == best for count in counts.values())
    lines += [
        "",
        f"One model, {len(names)} settings: the doctor "
        f"{within([doctor[name] for name in names])}, {', '.join(FIXED)} {counts[FIXED]}, FedAvg "
        f"alone {within(of_list(path, names, ['fedavg']))}, a list of three drawn at random "
        f"{mean(counts.values()):.1f} (mean), the best of all {len(counts)} lists in hindsight "
        f"{best} ({reached} of them)",
    ]
    return "\n".join(lines)


def within(found: Sequence[Outcome]) -> int:
    return sum(one.is_within for one in found)


def points(value: float, info: MetricInfo) -> str:
    """Return a difference, in points of a share; of other metrics to four decimals."""
    return f"{abs(info.scale * value):.{2 if info.unit else 4}f}"


def unit_of(metric: str) -> Literal["", "%"]:
    return "%" if "accuracy" in metric or metric == "dice" else ""


def score(row: dict[str, Any], info: MetricInfo) -> str:
    return format_score(Stat.of(row["scores"]), info, 1)


def every_method(path: Path, names: Iterable[str]) -> str:
    """Return the mean score of each method in each setting, as Markdown."""
    tuned = [row for row in rows(path) if "scores" in row and len(row["scores"]) == SEEDS]
    lines = []
    for name in names:
        of_setting = [row for row in tuned if row["setting"] == name]
        if not of_setting:
            continue
        ranked = sorted(of_setting, key=lambda row: -row["sign"] * mean(row["scores"]))
        lines += [f"**{SETTINGS[name].about}**", ""]
        texts = []
        for row in ranked:
            info = MetricInfo(row["metric"], row["sign"] > 0, unit_of(row["metric"]))
            texts.append(f"`{row['tuned']}` {score(row, info)}")
        lines += ["; ".join(texts) + ".", ""]
    return "\n".join(lines)


def methods_of(name: str) -> list[str]:
    """Return what is tuned in a setting."""
    if not SETTINGS[name].is_personal:
        return [*GLOBAL]
    return [*BASELINES, *PERSONAL, *(BATCH_NORM if name == "sources-personal" else ())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=["tune", "advise", "table"])
    parser.add_argument("--settings", default=",".join(SETTINGS), help="names, by commas")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pilots", type=Path, help="folder in which the doctor's runs are kept")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = given.settings.split(",")
    if given.do == "tune":
        tune_all(given.results, names)
    elif given.do == "advise":
        advise_all(given.results, names, given.pilots)
    else:
        for title, group in (("Seen", SEEN), ("Unseen", UNSEEN)):
            chosen = [name for name in group if name in names]
            print(f"## {title} settings\n\n{table(outcomes(given.results, chosen))}\n")
            full = full_length(given.results, chosen)
            missed = ", ".join(one.setting for one in full if not one.is_within)
            held = f"{within(full)} of {len(full)}"
            print(f"By tuning trials of full length: {held}; missed: {missed}\n")
            print(table_of_lists(given.results, chosen), "\n")
            print(every_method(given.results, chosen))


if __name__ == "__main__":
    main()
