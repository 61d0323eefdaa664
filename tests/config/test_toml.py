"""Settings from TOML and back, and what is said about every kind of mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from config.examples import values
from each import each
from fedkeel.base.error_messages import SYNONYMS
from fedkeel.base.settings import RenamedSetting, warn_once
from fedkeel.config import Data, Experiment, build, load, override, paths, to_toml
from fedkeel.errors import ConfigError


def refusal(**changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(Experiment, values(**changes), "try.toml")
    assert caught.value.what.startswith("try.toml: ")
    assert len(str(caught.value).splitlines()) <= 4
    return caught.value


# --- mistakes --------------------------------------------------------------------------------


@each(
    ("changes", "says"),
    [
        ({"tune__methods": {}}, "[tune] has no key 'methods'.\n  do   did you mean 'method'?"),
        ({"rouns": 3}, "the experiment has no key 'rouns'.\n  do   did you mean 'rounds'?"),
        ({"local__epoch": 1}, "[local] has no key 'epoch'.\n  do   did you mean 'epochs'?"),
        ({"lerning": 1}, "the experiment has no key 'lerning'.\n  do   did you mean local.lr?"),
        ({"lerning_rate": 1}, "did you mean local.lr?"),
        ({"local__lerning": 1}, "[local] has no key 'lerning'.\n  do   did you mean 'lr'?"),
        ({"local__lerning_rate": 1}, "did you mean 'lr'?"),
        ({"batchsize": 1}, "did you mean local.batch_size or evaluation.batch_size?"),
        ({"xyzzy": 1}, "has no key 'xyzzy'.\n  do   known: "),
        ({"local__LR": 1}, "[local] has no key 'LR'.\n  do   did you mean 'lr'?"),
        ({"local__schedule__kid": 1}, "[local.schedule] has no key 'kid'"),
        ({"partition__alfa": 1.0}, "did you mean 'alpha'?"),
        ({"engine__workrs": 1}, "did you mean 'workers'?"),
        # known elsewhere
        ({"lr": 0.1}, "the experiment has no key 'lr'.\n  do   set local.lr"),
        ({"batch_size": 8}, "set local.batch_size or evaluation.batch_size"),
        ({"local__alpha": 0.1}, "[local] has no key 'alpha'.\n  do   set partition.alpha"),
        ({"decay": 0.1}, "set local.weight_decay"),
        # also where the known key is missing for it
        ({"local__lr": ..., "local__learning_rate": 0.1}, "did you mean 'lr'?"),
        ({"rounds": ..., "num_rounds": 3}, "did you mean 'rounds'?"),
    ],
)
def test_unknown_keys(changes: dict[str, Any], says: str) -> None:
    assert says in str(refusal(**changes))


PATHS = list(paths(Experiment))


@each(("word", "meant"), SYNONYMS.items())
def test_other_peoples_words_are_known(word: str, meant: str) -> None:
    """In the table that has what is meant, and at the top."""
    homes = [path for path in PATHS if path.rpartition(".")[2] == meant]
    assert homes
    for home in homes:
        table = home.rpartition(".")[0]
        changes = {f"{table.replace('.', '__')}__{word}" if table else word: 1}
        if word not in [path.rpartition(".")[2] for path in PATHS if path.startswith(table)]:
            assert f"did you mean {meant!r}?" in str(refusal(**changes))
    if meant not in PATHS:
        assert f"set {' or '.join(homes)}" in str(refusal(**{word: 1}))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rounds": ...}, "rounds"),
        ({"local": ...}, "local"),
        ({"local__lr": ...}, "local.lr"),
        ({"data__source": ...}, "data.source"),
        ({"model": ...}, "model"),
        ({"model__name": ...}, "model.name"),
    ],
)
def test_missing_keys(changes: dict[str, Any], key: str) -> None:
    error = refusal(**changes)
    assert error.what == f"try.toml: {key!r} is missing."
    assert error.do == f"set {key}"


@each(
    ("changes", "key", "got", "expected"),
    [
        ({"rounds": 2.0}, "rounds", "2.0", "a valid integer"),
        ({"rounds": True}, "rounds", "True", "a valid integer"),
        ({"rounds": 0}, "rounds", "0", "greater than or equal to 1"),
        ({"seed": 2**32}, "seed", "4294967296", "less than or equal to 4294967295"),
        ({"name": "a b"}, "name", "'a b'", "string should match pattern"),
        (
            {"weights": "sample"},
            "weights",
            "'sample'",
            "'examples', 'processed', 'uniform' or 'method'",
        ),
        ({"local": 3}, "local", "3", "a table"),
        ({"local__lr": "0.1"}, "local.lr", "'0.1'", "a valid number"),
        ({"local__lr": 0}, "local.lr", "0", "greater than 0"),
        ({"local__momentum": 1.0}, "local.momentum", "1.0", "less than 1"),
        ({"local__batch_size": 1.5}, "local.batch_size", "1.5", "a valid integer, or 'all'"),
        ({"local__batch_size": "al"}, "local.batch_size", "'al'", "a valid integer, or 'all'"),
        ({"local__schedule": "cosine"}, "local.schedule", "'cosine'", "a table"),
        ({"data__source": 3}, "data.source", "3", "a valid string, or a list"),
        ({"data__shape": [1, 2]}, "data.shape", "(1, 2)", "a longer list"),
        ({"data__shape": [1] * 4}, "data.shape", "(1, 1, 1, 1)", "at most 3 items"),
        ({"data__shape": [1, 2, "x"]}, "data.shape", "'x'", "a valid integer"),
        ({"partition__sizes": "big"}, "partition.sizes", "'big'", "'equal' or 'power', or a list"),
        ({"model__args": 3}, "model.args", "3", "a table"),
        ({"compare__methods": 3}, "compare.methods", "3", "a list"),
        ({"compare__methods": ["x", 3]}, "compare.methods", "3", "a valid string"),
        ({"engine__dtype": "half"}, "engine.dtype", "'half'", "'float32' or 'float64'"),
    ],
)
def test_values_that_cannot_be_used(
    changes: dict[str, Any], key: str, got: str, expected: str
) -> None:
    error = refusal(**changes)
    assert error.what == f"try.toml: {key!r} cannot be used."
    assert error.got == got
    assert expected in str(error.expected)
    assert "Input" not in str(error)
    assert "tuple" not in str(error)


def test_a_long_value_is_cut_short() -> None:
    error = refusal(partition__kind="x" * 500)
    assert len(str(error.got)) == 60
    assert str(error.got).endswith("...")


def test_tables_that_contradict_themselves_are_named() -> None:
    error = refusal(local__steps=3)
    assert error.what == "try.toml: [local] give either 'epochs' or 'steps'."
    assert refusal(local__schedule__milestones=[1]).what.startswith(
        "try.toml: [local.schedule] 'milestones'"
    )


# --- files -----------------------------------------------------------------------------------

FULL = values(
    name="all-of_it.1",
    method="fedreg(mg=True)+fedavg",
    seed=2**32 - 1,
    weights="uniform",
    local__schedule={"kind": "piecewise", "milestones": [1, 2], "factors": [0.5, 1e-7]},
    local__batch_size="all",
    local__momentum=1 / 3,
    cohort__participation=0.1,
    evaluation__target=0.9,
    evaluation__clients_every=2,
    task__metrics=["accuracy", "macro_f1"],
    stop__patience=20,
    root={"file": "root.npz"},
    privacy={"epsilon": 8.0, "delta": 1e-5, "quantile": 0.5},
    stop__min_delta=0.01,
    stop__hours=1e-3,
    adversary__kind="sign_flip",
    track__to=["tensorboard", "mlflow"],
    system={
        "speed": "lognormal",
        "deadline_seconds": 60.0,
        "classes": {"old phone": {"share": 1.0, "speed": 0.2}},
    },
    adversary__share=0.2,
    diagnose__kinds=("drift", "cka"),
    diagnose__every=5,
    engine__dtype="float64",
    engine__memory_gb=1.5,
    flower__quorum=0.25,
    data__source=["digits", 'a "quoted"\\path', "ünïcode"],
    data__shape=[1, 28, 28],
    partition__sizes="power",
    partition__seed=0,
    model__args={"width": 8, "layers": [1, 2], "act": "relu", "deep": {"x": 1.5}},
    model__head="fc2",
    compare__methods=["fedavg", "fedprox(mu=0.1)+gcfed"],
    tune__trials=12,
    tune__space={"local.lr": {"low": 1e-3, "high": 1.0, "log": True}, "weights": ["uniform"]},
    tune__method={"fedprox": {"mu": [0.1, 1.0]}, "fedgc.sgc": {"margin": [0, 0.5]}},
)


@pytest.mark.parametrize("given", [values(), FULL])
def test_what_is_written_is_what_is_read(given: dict[str, Any], tmp_path: Path) -> None:
    experiment = build(Experiment, given, "values")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(experiment), encoding="utf-8")
    again = load(path)
    assert again == experiment
    assert to_toml(again) == to_toml(experiment)


def test_the_round_trip_above_sets_something_in_every_table() -> None:
    plain = build(Experiment, values(), "values")
    full = build(Experiment, FULL, "values")
    for name in Experiment.model_fields:
        if name != "rounds":
            assert getattr(full, name) != getattr(plain, name)


def test_a_written_file_names_every_setting_that_is_not_none() -> None:
    text = tomllib.loads(to_toml(build(Experiment, values(), "values")))
    assert text["engine"]["kind"] == "auto"
    assert text["local"]["schedule"]["kind"] == "constant"
    assert "weights" not in text
    assert "steps" not in text["local"]


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "try.toml"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"rounds = ", "is not valid TOML"),
        (b"rounds = 1\nrounds = 2", "is not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b"", "is missing"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(written(tmp_path, content))
    assert "try.toml" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = to_toml(build(Experiment, values(), "try.toml")).replace("\n", "\r\n")
    marked = b"\xef\xbb\xbf" + text.encode()
    assert load(written(tmp_path, marked)) == build(Experiment, values(), "try.toml")


def test_a_file_that_is_not_there_and_one_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such experiment file") as caught:
        load(tmp_path / "none.toml")
    assert "none.toml" in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


# --- settings on the command line ------------------------------------------------------------


@each(
    ("text", "path", "value"),
    [
        ("rounds=7", "rounds", 7),
        (" rounds = 7", "rounds", 7),
        ("local.lr=1e-3", "local.lr", 1e-3),
        ("local.lr = 0.5", "local.lr", 0.5),
        ("local.nesterov=true", "local.nesterov", True),
        ("local.batch_size=all", "local.batch_size", "all"),
        ('local.batch_size="all"', "local.batch_size", "all"),
        ("data.shape=[1, 2, 3]", "data.shape", [1, 2, 3]),
        ("method=fedprox(mu=0.1)+gcfed", "method", "fedprox(mu=0.1)+gcfed"),
        ("name= plain ", "name", "plain"),
        ("name=", "name", ""),
        ("local.schedule.kind=cosine", "local.schedule.kind", "cosine"),
        ("model.args.width=3", "model.args.width", 3),
        ("model.args={width = 3}", "model.args", {"width": 3}),
    ],
)
def test_overrides(text: str, path: str, value: object) -> None:
    before = values()
    after = override(before, [text])
    assert before == values()
    here: Any = after
    for name in path.split("."):
        here = here[name]
    assert here == value
    assert type(here) is type(value)


def test_one_text_is_a_list_of_one() -> None:
    given = values(data__source="a.csv", data__drop="patient", compare__methods="fedavg")
    made = build(Experiment, given, "try.toml")
    assert (made.data.drop, made.data.source) == (("patient",), "a.csv")
    assert made.compare.methods == ("fedavg",)
    assert Data(source="nodes", labels="sick").labels == ("sick",)


def test_the_nearest_word_is_named() -> None:
    assert refusal(partition__kind="dirchlet").do == "did you mean 'dirichlet'?"
    assert refusal(local__batch_size="al").do == "did you mean 'all'?"
    assert refusal(data__normalize="xyz").do is None
    assert refusal(rounds="al").do is None


def test_a_setting_is_taken_away() -> None:
    before = values()
    assert "lr" in before["local"]
    assert "lr" not in override(before, ["local.lr=unset"])["local"]
    assert override(before, ['name="unset"'])["name"] == "unset"
    with pytest.raises(ConfigError, match=r"'local.lrr' is not set[^$]*did you mean 'lr'"):
        override(before, ["local.lrr=unset"])
    with pytest.raises(ConfigError, match="is not set"):
        override(before, ["nothing.of_it=unset"])
    assert "lr" in before["local"]


def test_an_override_wins_once_and_others_stay() -> None:
    assert override(values(), ["local.lr=0.25", "seed=3"]) == values(local__lr=0.25, seed=3)
    with pytest.raises(ConfigError, match=r"'local.lr' is given twice"):
        override(values(), ["local.lr=0.5", "local.lr=0.25"])


@pytest.mark.parametrize("text", ["rounds", "=3", "  =3", ""])
def test_overrides_have_a_key_and_a_sign(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value") as caught:
        override({}, [text])
    assert repr(text) in str(caught.value)


def test_a_number_is_no_table() -> None:
    with pytest.raises(ConfigError, match="'rounds' is not a table"):
        override(values(), ["rounds.lr=3"])


def test_files_and_overrides_together(tmp_path: Path) -> None:
    path = written(tmp_path, to_toml(build(Experiment, values(), "values")).encode())
    assert load(path, ["local.lr=0.5", "method=fedgc"]).method == "fedgc"
    with pytest.raises(ConfigError, match=r"try\.toml: 'local\.lr' cannot be used") as caught:
        load(path, ["local.lr=fast"])
    assert caught.value.got == "'fast'"


def test_old_names_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, to_toml(build(Experiment, values(), "values")).encode())
    text = path.read_text().replace('kind = "auto"', 'kind = "vectorised"\nchunk = 3')
    path.write_text(text)
    with pytest.warns(RenamedSetting) as caught:
        engine = load(path, ["engine.chunk=4", "stop.patience=2", "stop.rise=0.1"]).engine
    assert (engine.kind, engine.parallel_clients) == ("vectorized", 4)
    messages = [str(warning.message).split(" The old")[0] for warning in caught]
    assert messages == [
        "The value 'vectorised' of the setting 'engine.kind' is now called 'vectorized'.",
        "The setting 'engine.chunk' is now called 'engine.parallel_clients'.",
        "The setting 'stop.rise' is now called 'stop.min_delta'.",
    ]  # each once, though 'chunk' was given twice
    warn_once.cache_clear()
    with pytest.warns(RenamedSetting):
        assert load(path, ["engine.chunk=unset"]).engine.parallel_clients is None
