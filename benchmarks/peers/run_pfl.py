"""pfl-research's simulation: python run_pfl.py RECIPE [--processes 2] [--threads 2]

As its guide on fast simulations advises: users as tensors in memory, `Dataset` and the simulated
backend, several processes, central evaluation rarely, in large batches and
sharded over the processes; where users differ in size, their sizes for its scheduler. SCAFFOLD is
pfl's own, with its state in memory, its faster Option II, and users pinned to processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

from harness import Clock, arguments, metered, quiet_stdout, report


def launch(given) -> None:
    """Start this script again as each of several workers, and print the first one's line."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    addresses = ",".join(f"localhost:{port + i}" for i in range(given.processes))
    with metered(given.memory) as memory:
        workers = []
        for rank in range(given.processes):
            env = {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)}
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            command = [sys.executable, *sys.argv]
            workers.append(subprocess.Popen(command, stdout=out, env={**os.environ, **env}))
        found, _ = workers[0].communicate()
        if any(worker.wait() for worker in workers):
            raise SystemExit("a worker of pfl failed")
    print(json.dumps(json.loads(found) | memory))


def network(recipe, device: str):
    """The model with the two methods that pfl asks for."""
    import types

    import torch
    import torch.nn.functional as F
    from pfl.metrics import Weighted

    def loss(self, x, y, eval=False):
        if self.training == eval:
            self.train(not eval)
        return F.cross_entropy(self(x).flatten(0, -2), y.flatten())

    @torch.no_grad()
    def metrics(self, x, y, eval=True):
        if self.training == eval:
            self.train(not eval)
        return {"accuracy": Weighted(int((self(x).argmax(-1) == y).sum()), y.numel())}

    model = recipe.network().to(device)
    model.loss = types.MethodType(loss, model)
    model.metrics = types.MethodType(metrics, model)
    return model


def users(recipe, arrays, processes: int):
    """The federated dataset. Users are slices of one tensor."""
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import CrossSiloUserSampler, MinimizeReuseUserSampler

    def user(k: int):
        first, end = arrays.offsets[k], arrays.offsets[k + 1]
        return Dataset((arrays.x[first:end], arrays.y[first:end]), user_id=k)

    ids = list(range(recipe.data.clients))
    ragged = recipe.data.spread and processes > 1
    sizes = dict(enumerate(recipe.data.sizes().tolist())) if ragged else None
    if recipe.method == "scaffold" and processes > 1:
        sampler = CrossSiloUserSampler("minimize_reuse", user_ids=ids)
    else:
        sampler = MinimizeReuseUserSampler(ids)
    return FederatedDataset(user, sampler, user_id_to_weight=sizes)


def callbacks(recipe, arrays, clock: Clock, examples: list[int]):
    """Clock, central evaluation, clock: callbacks act in this order after every round."""
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import NNEvalHyperParams
    from pfl.metrics import Metrics

    class Round(TrainingProcessCallback):
        def on_train_begin(self, *, model):
            clock.skip()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            clock.round()
            for name, value in aggregate_metrics:
                if str(name) == "train population | number of data points":
                    examples.append(int(value.weighted_value) * recipe.epochs)
            return False, Metrics()

    class Evaluated(TrainingProcessCallback):
        def on_train_begin(self, *, model):
            clock.evaluation()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            if central_iteration and central_iteration % recipe.every == 0:
                clock.evaluation()
            return False, Metrics()

    test = Dataset((arrays.test_x, arrays.test_y), eval_kwargs={"eval": True})
    hyper = NNEvalHyperParams(local_batch_size=recipe.evaluation_batch)
    evaluation = CentralEvaluationCallback(test, hyper, frequency=recipe.every)
    return [Round(), evaluation, Evaluated()]


def algorithm(recipe, rounds: int):
    """FedAvg or SCAFFOLD with its parameters."""
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data.user_state import InMemoryUserStateStorage

    shared = {
        "central_num_iterations": rounds,
        "evaluation_frequency": rounds + 1,  # of single users, which nobody asks for
        "train_cohort_size": recipe.per_round,
        "val_cohort_size": 0,
    }
    if recipe.method == "fedavg":
        return FederatedAveraging(), NNAlgorithmParams(**shared)
    params = SCAFFOLDParams(
        **shared,
        population=recipe.data.clients,
        use_gradient_as_control_variate=False,
        user_state_storage=InMemoryUserStateStorage(),
    )
    return SCAFFOLD(), params


def train(given):
    """Run the recipe; return it, the clock, and what is to be reported."""
    import numpy as np
    import recipes
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.scaffold import SCAFFOLD  # noqa: F401 - here, so that it is not timed
    from pfl.callback.central_evaluation import CentralEvaluationCallback  # noqa: F401
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(given.threads)
    recipe = recipes.RECIPES[given.recipe]
    arrays = recipes.load(recipe.data).to(given.device)
    began = time.perf_counter()
    np.random.seed(recipe.seed)
    net = network(recipe, given.device)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    data = users(recipe, arrays, given.processes)
    weighting = [WeightByDatapoints()] if recipe.data.spread else []
    backend = SimulatedBackend(data, data, postprocessors=weighting)
    rounds, examples = given.rounds or recipe.rounds, []
    clock = Clock(given.device)
    method, params = algorithm(recipe, rounds)
    with metered(given.memory and given.processes == 1) as memory:
        start = time.perf_counter() - began
        method.run(
            params,
            backend,
            model,
            model_train_params=NNTrainHyperParams(
                local_num_epochs=recipe.epochs,
                local_learning_rate=recipe.lr,
                local_batch_size=recipe.batch,
            ),
            model_eval_params=None,
            callbacks=callbacks(recipe, arrays, clock, examples),
            send_metrics_to_platform=False,  # tables on standard output
        )
    score = recipes.accuracy(net, arrays, recipe.evaluation_batch)
    return recipe, clock, {"start": start, "accuracy": score, "examples": examples, **memory}


def main() -> None:
    given = arguments(__doc__)
    rank = os.environ.get("PFL_WORKER_RANK")
    if given.processes > 1 and rank is None:
        launch(given)
        return
    os.environ["PFL_PYTORCH_DEVICE"] = given.device
    with quiet_stdout():
        recipe, clock, values = train(given)
    if rank in (None, "0"):
        report("pfl", "pfl", recipe, given, clock, **values)


if __name__ == "__main__":
    main()
