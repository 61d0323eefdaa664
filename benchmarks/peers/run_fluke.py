"""fluke's in-process loop: python run_fluke.py RECIPE [--threads 2]

Its own FedAvg or SCAFFOLD, its own fast data loader over slices of one tensor, models in memory,
clients without a model of their own where the method keeps none, evaluation by its own evaluator
with the accuracy alone.
"""

from __future__ import annotations

import sys
import time

from harness import Clock, arguments, metered, quiet_stdout, report


def bear_torchvision():
    """Let torchvision be imported: fluke does so, and calls none of its operators.

    A torchvision built for GPUs cannot load its operators beside a torch for CPUs, and then stops
    at two that it misses. What is returned has to be kept.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        return declared


def loaders(recipe, arrays):
    """One data loader for each client, and one for the test set."""
    from fluke.data import DummyDataContainer, FastDataLoader

    def loader(x, y, batch: int, shuffle: bool):
        return FastDataLoader(
            x,
            y,
            num_labels=recipe.data.classes,
            batch_size=batch,
            shuffle=shuffle,
            skip_singleton=False,
        )

    bounds = zip(arrays.offsets[:-1], arrays.offsets[1:], strict=True)
    clients = [loader(arrays.x[a:b], arrays.y[a:b], recipe.batch, True) for a, b in bounds]
    test = loader(arrays.test_x, arrays.test_y, recipe.evaluation_batch, False)
    nobody = [None] * len(clients)
    return DummyDataContainer(clients, nobody, test, recipe.data.classes)


def algorithm(recipe, arrays, clock: Clock, sizes: list[int]):
    """The algorithm, whose evaluations go to the clock, as the rest of its rounds does."""
    import torch
    from fluke import DDict
    from fluke.algorithms.fedavg import FedAVG
    from fluke.algorithms.scaffold import SCAFFOLD
    from fluke.data import DataSplitter

    parent = FedAVG if recipe.method == "fedavg" else SCAFFOLD

    class Timed(parent):
        def _compute_evaluation(self, round, eligible) -> None:
            if self.rounds > round:  # once more, at the very end
                return
            clock.round()
            sizes.append(sum(client.n_examples for client in eligible) * recipe.epochs)
            if (round + 1) % recipe.every == 0:
                super()._compute_evaluation(round, eligible)
                clock.evaluation()

    client = {
        "batch_size": recipe.batch,
        "local_epochs": recipe.epochs,
        "loss": torch.nn.CrossEntropyLoss,
        "optimizer": DDict(name="SGD", lr=recipe.lr),
        "scheduler": DDict(name="StepLR", gamma=1.0, step_size=1),
        "persistency": recipe.method != "fedavg",
    }
    weighted = DDict(weighted=bool(recipe.data.spread))
    settings = DDict(client=DDict(client), server=weighted, model=recipe.network())
    data = DataSplitter(loaders(recipe, arrays), distribution="iid")
    return Timed(recipe.data.clients, data, settings)


def main() -> None:
    given = arguments(__doc__)
    if given.processes > 1:
        raise SystemExit("fluke trains in one process")
    import recipes
    import torch

    declared = bear_torchvision()  # noqa: F841
    from fluke import FlukeENV
    from fluke.evaluation import ClassificationEval
    from torchmetrics import Accuracy

    torch.set_num_threads(given.threads)
    recipe = recipes.RECIPES[given.recipe]
    arrays = recipes.load(recipe.data)
    env, classes, sizes = FlukeENV(), recipe.data.classes, []
    with quiet_stdout(), metered(given.memory) as memory:
        began = time.perf_counter()
        env.set_seed(recipe.seed)
        env.set_device(given.device)
        env.set_inmemory(True)
        env.set_eval_cfg(server=True, locals=False, pre_fit=False, post_fit=False)
        metric = Accuracy(task="multiclass", num_classes=classes)
        env.set_evaluator(ClassificationEval(recipe.every, classes, accuracy=metric))
        clock = Clock(given.device)
        federation = algorithm(recipe, arrays, clock, sizes)
        start = time.perf_counter() - began
        clock.skip()
        share = (recipe.per_round + 0.5) / recipe.data.clients  # it rounds down
        federation.run(given.rounds or recipe.rounds, min(share, 1), finalize=False)
    score = recipes.accuracy(federation.server.model.cpu(), arrays, recipe.evaluation_batch)
    values = {"start": start, "accuracy": score, "examples": sizes, **memory}
    report("fluke", "fluke-fl", recipe, given, clock, **values)


if __name__ == "__main__":
    main()
