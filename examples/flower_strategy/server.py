"""A server as any Flower app has it, with `Method` where `FedAvg` stood.

With two SuperNodes on this machine and their SuperLink configured as `here`:

    flwr run . here --stream -c "method='fedadam(lr=0.01)'"
"""

import torch
from client import net
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedkeel.flower.strategy import Method

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    strategy = Method(str(context.run_config["method"]), clients=2)
    result = strategy.start(
        grid,
        initial_arrays=ArrayRecord(net().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        timeout=120.0,
    )
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.3f}", flush=True)
