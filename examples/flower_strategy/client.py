"""A client as any Flower app has it: it knows nothing of the method."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn

app = ClientApp()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def examples(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits of two classes and a half: each node has others."""
    x, y = load_digits(return_X_y=True)
    first, of = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    client_state = [(label * of) // 10 == first for label in y]
    return torch.tensor(x[client_state] / 16, dtype=torch.float32), torch.tensor(y[client_state])


@app.train()
def train(message: Message, context: Context) -> Message:
    model, (x, y) = net(), examples(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y), "train-loss": loss.item()}),
        }
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model, (x, y) = net(), examples(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with torch.no_grad():
        accuracy = float((model(x).argmax(dim=1) == y).float().mean())
    metrics = MetricRecord({"num-examples": len(y), "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
