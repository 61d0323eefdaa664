"""Flower's simulation: python run_flower.py RECIPE [--processes 2]

The message API with its own FedAvg and Ray, one CPU of Ray and one thread for each client, so that
`--processes` clients train at a time. Data are mapped into memory once by each actor, the model
lives as long as the actor, nothing is evaluated at clients, the server evaluates when the recipe
says.
"""

from __future__ import annotations

import logging
import os
import time
import warnings

from harness import Clock, arguments, metered, quiet_stdout, report


def server(recipe, arrays, clock: Clock, rounds: int, device: str, done: dict):
    """The server's app. Its evaluation function is where rounds end."""
    import recipes
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    model = recipe.network()
    app = ServerApp()

    class Counting(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            sizes = [reply.content["metrics"]["num-examples"] for reply in replies]
            done["examples"].append(sum(sizes) * recipe.epochs)
            done["failures"] += recipe.per_round - len(replies)
            return super().aggregate_train(server_round, replies)

    def evaluated(number: int, arrays_record):
        if number:
            clock.round()
        if number % recipe.every and number != rounds:
            return None
        model.load_state_dict(arrays_record.to_torch_state_dict())
        model.to(device)
        done["accuracy"] = recipes.accuracy(model, arrays, recipe.evaluation_batch)
        clock.evaluation()
        return MetricRecord({"accuracy": done["accuracy"]})

    @app.main()
    def main(grid, context) -> None:
        population = recipe.data.clients
        share = (recipe.per_round + 0.5) / population  # it rounds down
        strategy = Counting(
            fraction_train=min(share, 1.0),
            fraction_evaluate=0.0,
            min_train_nodes=recipe.per_round,
            min_available_nodes=population,
        )
        while len(list(grid.get_node_ids())) < population:
            time.sleep(0.1)
        done["start"] = clock.skip()
        first = ArrayRecord(model.state_dict())
        strategy.start(grid, first, num_rounds=rounds, evaluate_fn=evaluated)

    return app


def main() -> None:
    given = arguments(__doc__)
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "BENCHMARK_RECIPE": given.recipe,
        "BENCHMARK_DEVICE": given.device,
    }
    warnings.simplefilter("ignore")
    import recipes
    import torch

    recipe = recipes.RECIPES[given.recipe]
    if recipe.method != "fedavg":
        raise SystemExit(f"{recipe.name} needs {recipe.method}; Flower has FedAvg here")
    arrays = recipes.load(recipe.data)
    torch.set_num_threads(max(1, os.cpu_count() or 1))  # of the server, for its evaluations
    with quiet_stdout(), metered(given.memory) as memory:
        import flower_client
        from flwr.simulation import run_simulation

        logging.getLogger("flwr").setLevel(logging.ERROR)
        done = {"examples": [], "failures": 0, "accuracy": 0.0, "start": 0.0}
        rounds = given.rounds or recipe.few
        clock = Clock(given.device)
        gpus = 1 / given.processes if given.device == "cuda" else 0.0
        run_simulation(
            server(recipe, arrays.to(given.device), clock, rounds, given.device, done),
            flower_client.app,
            num_supernodes=recipe.data.clients,
            backend_config={
                "init_args": {"num_cpus": given.processes, "log_to_driver": False},
                "client_resources": {"num_cpus": 1, "num_gpus": gpus},
            },
        )
    report("flower", "flwr", recipe, given, clock, **done, **memory)


if __name__ == "__main__":
    main()
