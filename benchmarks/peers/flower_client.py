"""The client of run_flower.py, in a module of its own so that Ray's actors import it once."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
import recipes

app = ClientApp()


@cache
def resident():
    """Recipe, data, model and device of this actor. The model lives as long as the actor."""
    torch.set_num_threads(1)
    recipe = recipes.RECIPES[os.environ["BENCHMARK_RECIPE"]]
    device = os.environ["BENCHMARK_DEVICE"]
    return recipe, recipes.load(recipe.data).to(device), recipe.network().to(device), device


@app.train()
def train(msg, context):
    """Train one client from the received model."""
    from flwr.app import Message

    recipe, arrays, model, device = resident()
    k = int(context.node_config["partition-id"])
    first, end = int(arrays.offsets[k]), int(arrays.offsets[k + 1])
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=recipe.lr)
    for _ in range(recipe.epochs):
        order = first + torch.randperm(end - first, device=device)
        for rows in order.split(recipe.batch):
            optimiser.zero_grad()
            F.cross_entropy(model(arrays.x[rows]), arrays.y[rows]).backward()
            optimiser.step()
    arrays_record = ArrayRecord({k: v.cpu() for k, v in model.state_dict().items()})
    metrics = MetricRecord({"num-examples": end - first})
    content = RecordDict({"arrays": arrays_record, "metrics": metrics})
    return Message(content=content, reply_to=msg)
