"""A small table on digits, and its experiments."""

from __future__ import annotations

from pathlib import Path

TINY = """\
id = "tiny"
paper = "fedgh2024"
title = "Tiny: a table for tests"
shows = "Nothing."
source = "Nowhere."
data = ["digits"]
baseline = "FedAvg"
seeds = 2
deviations = ["Everything is made up."]

[metric]
kind = "best"

[base]
rounds = 6
seed = 3

[base.data]
source = "digits"

[base.partition]
kind = "dirichlet"
clients = 8
alpha = 0.1
min_size = 4

[base.model]
name = "mlp"
args = { hidden = [8] }

[base.local]
lr = 0.1
epochs = 1
batch_size = 16

[base.cohort]
clients = 4

[base.engine]
kind = "sequential"
checkpoint_seconds = 0.0

[[columns]]
id = "skew"
name = "alpha 0.1"

[[columns]]
id = "skew-share"
name = "alpha 0.1, R_0.9"
metric = { kind = "rounds_to_share", share = 0.9, reference = "FedAvg" }

[[columns]]
id = "far"
name = "alpha 0.1, to 100 %"
metric = { kind = "rounds_to", target = 1.0 }

[[columns]]
id = "plain"
name = "iid"
ours = true
settings = { partition = { kind = "iid", alpha = "unset" } }

[[columns]]
id = "gone"
name = "a set that is gone"
missing = "The set is gone."

[[rows]]
name = "FedAvg"
method = "fedavg"

[rows.published]
skew = [50.0, 1.5]
skew-share = 4
far = 30
gone = 12.0

[[rows]]
name = "FedGH"
method = "fedgh"
settings_in = { plain = { local.lr = 0.2 } }

[rows.published]
skew = 55.0
skew-share = 3
far = "never"

[[rows]]
name = "Momentum"
method = "momentum(beta=0.5)"
columns = ["skew"]
ours = true

[quick]
name = "2 rounds of 6, the first setting"
settings = { rounds = 2 }
columns = ["skew"]
"""


def tiny(folder: Path, text: str = TINY) -> Path:
    """Write the table into a folder."""
    file = folder / "tiny.toml"
    file.write_text(text)
    return file
