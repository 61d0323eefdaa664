"""Your own model on your own arrays, divided among 20 clients that know a few classes each."""

from sklearn.datasets import load_digits
from torch import nn

import fedkeel as fk


def net() -> nn.Module:  # any nn.Module: a class, or a function that makes one
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


if __name__ == "__main__":
    x, y = load_digits(return_X_y=True)  # any arrays: inputs [N, ...] and labels [N]
    clients = fk.dirichlet(x[:1400] / 16, y[:1400], clients=20, alpha=0.1)
    test = (x[1400:] / 16, y[1400:])
    task, local = fk.Task(net), fk.Local(lr=0.1, epochs=2, batch_size=10)
    for method in ("fedavg", "scaffold"):
        result = fk.run(method, task=task, clients=clients, test=test, rounds=15, local=local)
        print(f"{method}: {result.last:.1%} of the test set")
