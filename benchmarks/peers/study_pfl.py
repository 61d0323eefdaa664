"""FedAvg by pfl-research, several runs one after the other: python study_pfl.py FOLDER --runs 30

FOLDER has a file SEED.npz for each seed: x, y, offsets of the users' examples, test_x, test_y; and
settings.json: rounds, cohort, epochs, batch_size, lr, hidden. The test set is evaluated after each
round, all in one process and one thread. Prints the seconds after the imports and the last score.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
import types
from pathlib import Path
from typing import Any

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"


def train(arrays: Any, given: dict[str, Any], seed: int) -> float:
    """Make a run; return its test accuracy."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch import nn

    def loss(self: nn.Module, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> Any:
        self.train(not eval)
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self: nn.Module, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> Any:
        self.train(not eval)
        return {"accuracy": Weighted(int((self(x).argmax(-1) == y).sum()), len(y))}

    torch.manual_seed(seed)
    np.random.seed(seed)
    x, y, offsets = (torch.from_numpy(arrays[k]) for k in ("x", "y", "offsets"))
    test_x, test_y = torch.from_numpy(arrays["test_x"]), torch.from_numpy(arrays["test_y"])
    features, classes = x[0].numel(), int(test_y.max()) + 1
    hidden = given["hidden"]
    net: Any = nn.Sequential(
        nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )
    net.loss, net.metrics = types.MethodType(loss, net), types.MethodType(metrics, net)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))

    def user(k: int) -> Dataset:
        first, end = offsets[k], offsets[k + 1]
        return Dataset((x[first:end], y[first:end]), user_id=k)

    sampler = MinimizeReuseUserSampler(list(range(len(offsets) - 1)))
    users = FederatedDataset(user, sampler)
    params = NNAlgorithmParams(
        central_num_iterations=given["rounds"],
        evaluation_frequency=given["rounds"] + 1,  # of single users, which nobody asks for
        train_cohort_size=given["cohort"],
        val_cohort_size=0,
    )
    test = Dataset((test_x, test_y), eval_kwargs={"eval": True})
    evaluation = NNEvalHyperParams(local_batch_size=len(test_y))
    FederatedAveraging().run(
        params,
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=given["epochs"],
            local_learning_rate=given["lr"],
            local_batch_size=given["batch_size"],
        ),
        model_eval_params=None,
        callbacks=[CentralEvaluationCallback(test, evaluation, frequency=1)],
        send_metrics_to_platform=False,
    )
    with torch.no_grad():
        return float((net(test_x).argmax(1) == test_y).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, required=True)
    asked = parser.parse_args()
    import numpy as np
    import torch

    torch.set_num_threads(1)
    given = json.loads((asked.folder / "settings.json").read_text())
    seeds = sorted(asked.folder.glob("*.npz"))
    score, began = 0.0, time.perf_counter()
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        for run in range(asked.runs):
            score = train(np.load(seeds[run % len(seeds)]), given, run)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "accuracy": score}))


if __name__ == "__main__":
    main()
