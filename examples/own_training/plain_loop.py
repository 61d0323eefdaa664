"""Clients that train by a loop of your own: `python examples/own_training/plain_loop.py`.

The loop clips gradients, and keeps the momentum of its optimiser from round to round.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fedkeel as fk


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model, data, round):
    """Train a client in one round: the parameters of `model` afterwards are what it sends."""
    parameters = dict(model.named_parameters())
    optimiser = torch.optim.SGD(model.parameters(), lr=round.lr, momentum=0.9)
    for name, momentum in round.state.items():  # nothing in the client's first round
        optimiser.state[parameters[name]]["momentum_buffer"] = momentum
    total = right = count = 0
    for x, y in data.batches:  # the mini-batches of the whole round, all its epochs
        optimiser.zero_grad()
        scores = model(x)
        loss = round.loss(scores, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        total += loss.item() * len(y)
        right += int((scores.argmax(dim=1) == y).sum())
        count += len(y)
    for name, parameter in parameters.items():
        round.state[name] = optimiser.state[parameter]["momentum_buffer"]
    return {"loss": total / count, "accuracy": right / count}


def main(rounds: int = 10, method: str = "momentum(beta=0.5)", engine: str = "auto"):
    x, y = load_digits(return_X_y=True)
    return fk.run(
        method,
        task=fk.Task(net),
        clients=fk.dirichlet(x[:1400] / 16, y[:1400], clients=10, alpha=0.3),
        test=(x[1400:] / 16, y[1400:]),
        rounds=rounds,
        participation=0.5,
        local=fk.Local(lr=0.05, epochs=2, batch_size=20, keep_state=True),
        local_training=fk.LocalTraining(train),
        engine=fk.Engine(kind=engine),
    )


if __name__ == "__main__":
    result = main()
    accuracy = result.rows[-1].diagnostics["local_training.accuracy"]
    print(f"{accuracy:.1%} while clients train, {result.last:.1%} of the test set")
