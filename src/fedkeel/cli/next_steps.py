"""What follows a search: the commands that compare its methods on seeds that chose nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from fedkeel.cli.common import ExperimentSource
from fedkeel.cli.experiment import is_search
from fedkeel.config import Experiment, load
from fedkeel.study.tuning_result import TuningResult, experiment_files


def next_steps(
    result: TuningResult, experiment: Experiment, source: ExperimentSource
) -> Iterator[str]:
    """Yield what compares the tuned methods on seeds on which nothing was chosen.

    Args:
        result: the finished search.
        experiment: as the search read it.
        source: what the command was given of it.
    """
    pairs = zip(result.rows, experiment_files(result), strict=True)
    tuned = [(row, file) for row, file in pairs if row.value is not None]
    values = [{k: v for k, v in row.chosen.items() if k != "method"} for row, _ in tuned]
    seed = max(experiment.seed, fresh_seed(experiment))
    given = (
        [f"--preset {source.preset}"] if source.path is None else [shlex.quote(str(source.path))]
    )
    given += [f"-s {shlex.quote(text)}" for text in source.settings if not text.startswith("tune.")]
    if not tuned:
        return
    if all(value == values[0] for value in values):
        chosen = [f"-s {shlex.quote(f'{key}={json.dumps(v)}')}" for key, v in values[0].items()]
        methods = shlex.quote(", ".join(str(row.chosen["method"]) for row, _ in tuned))
        more = " ".join([*given, *chosen, f"-s seed={seed}"])
        yield f"fedkeel compare {more} --methods {methods}"
        return
    keys = [key for key in values[0] if len({json.dumps(value[key]) for value in values}) > 1]
    yield (
        f"one comparison has one {' and '.join(keys)} for all methods, and the best values differ: "
        "compare each method by itself on new seeds, then make one report"
    )
    folders = []
    for _, file in tuned:
        folders.append(shlex.quote(f"{result.folder}-compare/{file.stem}"))
        yield f"fedkeel compare {shlex.quote(str(file))} -s seed={seed} --out {folders[-1]}"
    yield f"fedkeel report {' '.join(folders)}"


def fresh_seed(experiment: Experiment) -> int:
    """Return the first seed after those of the trials."""
    first = experiment.seed if experiment.tune.seed is None else experiment.tune.seed
    return first + experiment.tune.seeds


def fresh_seed_of_tuned(source: ExperimentSource, experiment: Experiment, seeds: int) -> int | None:
    """Return the first seed after those by which a search chose the settings of its file.

    None where the file is of no search, or the seeds are others already.
    """
    if source.path is None or source.path.parent.name != "best":
        return None
    first, fresh = experiment.tune.seed, fresh_seed(experiment)
    if first is None:  # the trials began at the seed that stands in the file
        first = load(source.path).seed
        fresh = first + experiment.tune.seeds
    is_used = experiment.seed < fresh and first < experiment.seed + seeds
    return fresh if is_used and is_search(source.path.parent.parent) else None
