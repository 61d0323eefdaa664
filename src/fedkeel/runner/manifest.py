"""Making the run record before a run starts: method, data, model, engine, environment."""

from __future__ import annotations

import platform
from datetime import UTC, datetime

import numpy as np
import torch

from fedkeel import config
from fedkeel.base.feature import declarations
from fedkeel.data.cohort import new_clients
from fedkeel.engine.base import OwnTraining
from fedkeel.engine.choose.engine_rule import choose_engine
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.affinity import core_count, processor_name
from fedkeel.errors import counted
from fedkeel.method.compose import roles_of
from fedkeel.method.docs.cite import bibtex, keys
from fedkeel.method.docs.describe import describe
from fedkeel.method.part import Part
from fedkeel.method.part_digests import user_part_digests
from fedkeel.records.histogram import is_large
from fedkeel.records.run_record import (
    DataRecord,
    EngineChoice,
    Environment,
    ModelRecord,
    PartitionRecord,
    PartRecord,
    RangeRecord,
    RunRecord,
    ScaleRecord,
)
from fedkeel.records.score import MetricInfo, TaskRecord
from fedkeel.runner.features import features_of
from fedkeel.runner.warnings import find_warnings
from fedkeel.task.losses import loss_name, named_like
from fedkeel.tree import nbytes, numel
from fedkeel.version import __version__


def describe_run(prepared: Prepared, engine: EngineChoice | None = None) -> RunRecord:
    """Return the record of a run before it starts.

    Args:
        prepared: the run.
        engine: the engine, where it is chosen already.
    """
    settings, setup, plan = prepared.settings, prepared.setup, prepared.plan
    network, federation = setup.training.network, prepared.clients
    parts, known = plan.parts or (), named_like(network.task_loss)
    described = (feature.description(prepared) for feature in features_of(prepared).values())
    is_here = federation.how["kind"] != "nodes"
    has_histogram = is_here and not is_large(len(federation), federation.data.classes)
    targets = (feature.target for feature in features_of(prepared).values())
    return RunRecord(
        name=settings.name,
        key=prepared.key,
        method=settings.method,
        describe=next(filter(None, described), "") or describe(plan),
        parts=[_part_record(part) for part in parts],
        citations=keys(plan),
        bibtex=bibtex(keys(plan)),
        weights=plan.weights,
        seed=settings.seed,
        rounds=settings.rounds,
        status="running",
        model=ModelRecord(
            name=prepared.ingredients.model,
            parameters=numel(network.params),
            bytes=nbytes(dict(network.params)),
            head=network.head,
            args=dict(prepared.ingredients.model_args),
        ),
        task=TaskRecord(
            loss=loss_name(network.task_loss),
            metrics=_metrics(prepared),
            score=setup.metrics.score_name,
            like="" if known is network.task_loss else loss_name(known),
        ),
        judges=prepared.judges,
        client_parameters=prepared.client_parameters,
        new_clients=new_clients(settings.cohort, len(prepared.clients), settings.seed).tolist(),
        data=_data_record(prepared),
        partition=PartitionRecord.of(
            {
                **federation.how,
                "clients": len(federation),
                "sizes": federation.sizes.tolist(),
                "histogram": federation.histogram().tolist() if has_histogram else [],
                "names": list(federation.names),
            }
        ),
        local=_local_text(
            settings.local if prepared.is_baseline else setup.training.local,
            prepared.plan.client_optimiser,
            setup.own,
        ),
        participation=_participation_text(prepared),
        target=settings.evaluation.target or next(filter(None, targets), None),
        engine=engine or choose_engine(prepared),
        environment=environment(),
        estimate=estimate_run(prepared),
        warnings=find_warnings(prepared),
        features={
            table: value
            for table, feature in features_of(prepared).items()
            if (value := feature.record(prepared)) is not None
        },
    )


def _metrics(prepared: Prepared) -> list[MetricInfo]:
    """Return the metrics of a run, with those of features before the last one, the loss."""
    infos = prepared.setup.metrics.infos
    added = [score for item in features_of(prepared).values() for score in item.scores(prepared)]
    return [*infos[:-1], *added, *infos[-1:]]


def _data_record(prepared: Prepared) -> DataRecord:
    setup, data = prepared.setup, prepared.setup.federation.data
    test = setup.test
    is_hidden = any(declarations()[table].hides_values for table in features_of(prepared))
    ranges = {} if is_hidden or setup.federation.how["kind"] == "nodes" else data.ranges
    return DataRecord(
        sources=list(data.sources),
        train=len(setup.federation.rows),
        test=test.example_count,
        classes=data.classes,
        label_names=list(data.label_names),
        columns=list(data.columns),
        schema=[] if data.schema is None else data.schema.record(),
        scale=None if data.scale is None else ScaleRecord(*map(list, data.scale)),
        client_scales={k: ScaleRecord(*map(list, pair)) for k, pair in data.client_scales.items()},
        ranges={name: RangeRecord(*map(list, pair)) for name, pair in ranges.items()},
        text_column=data.text_column,
        shape=list(data.shape) if isinstance(data.shape, tuple) else [],
        inputs={k: list(v) for k, v in data.shape.items()} if isinstance(data.shape, dict) else {},
        grouped_by=data.grouped_by,
        test_groups=0 if test.group is None else len(np.unique(test.group[test.group >= 0])),
        types={
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor in (data.x if isinstance(data.x, dict) else {"": data.x}).items()
        },
        fingerprint=prepared.data_digest,
    )


def _local_text(local: config.Local, part: Part | None, own: OwnTraining | None) -> str:
    if local.epochs:
        work = counted(local.epochs, "epoch")
    else:
        work = f"{counted(local.steps or 0, 'step')} ({local.sampling})"
    name = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[local.optimiser]
    if part is not None:
        name = f"optimiser of {part.name}"
    if own is not None:
        name = f"your own {own.name}"
    batch = f"batch {local.batch_size}" + (f" x {local.accumulate}" if local.accumulate > 1 else "")
    texts = [f"{name}, lr {local.lr:g}", work, batch]
    if local.momentum and part is None:
        texts.append(f"momentum {local.momentum:g}" + (" Nesterov" if local.nesterov else ""))
    if local.weight_decay:
        texts.append(f"weight decay {local.weight_decay:g}")
    if local.keep_state and part is None:
        texts.append("optimiser state kept")
    if local.clip_norm is not None:
        texts.append(f"gradients clipped at {local.clip_norm:g}")
    schedule = local.schedule
    if schedule.kind != "constant":
        by_step = " by step" if schedule.over == "steps" else ""
        texts.append(f"{schedule.kind} schedule{by_step}")
    if schedule.cycle < 1.0:
        texts.append(f"down to {schedule.cycle:g} of it within each round")
    if schedule.warmup:
        texts.append(f"warm-up {schedule.warmup:g} rounds")
    return ", ".join(texts)


def _participation_text(prepared: Prepared) -> str:
    cohort, clients = prepared.settings.cohort, len(prepared.clients)
    text = f"{cohort.size(clients)} of {clients} clients a round"
    if cohort.sampling == "poisson":
        text += " expected, each drawn by itself"
    elif cohort.sampling != "uniform":
        text += f", sampled by {cohort.sampling}"
    if cohort.new_count:
        text += f", {cohort.new_count} of them in none"
    if cohort.dropout:
        text += f", each drops out with probability {cohort.dropout:g}"
    return text


def environment() -> Environment:
    """Return versions, processor and date."""
    return Environment(
        fedkeel=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        numpy=np.__version__,
        system=f"{platform.system()} {platform.machine()}",
        processor=processor_name(),
        cores=core_count(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _part_record(part: Part) -> PartRecord:
    return PartRecord(
        name=part.name,
        paper=part.paper,
        roles=roles_of(type(part)),
        code=" ".join(user_part_digests([part]).values()),
    )
