"""What the restatements share: a network by hand, a federation of arrays, one small programme.

The restatements themselves know vectors only. A model is one vector of all parameters in the order
of the toy network; `Net.groups` says which entries a projection treats as one. There is no torch in
what they compute, only in what they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import torch

from fedkeel.config import Local
from fedkeel.task.network import Network
from harness import Federation, ToyMLP, toy_network

Vector = np.ndarray


def softmax(scores: np.ndarray) -> np.ndarray:
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


class Net:
    """Linear, ReLU, linear, and the mean softmax cross-entropy, with its derivatives by hand."""

    def __init__(self, inputs: int = 8, hidden: int = 6, classes: int = 3) -> None:
        self.sizes = (inputs, hidden, classes)
        self.shapes = {
            "fc1.weight": (hidden, inputs),
            "fc1.bias": (hidden,),
            "fc2.weight": (classes, hidden),
            "fc2.bias": (classes,),
        }
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        self.spans = {
            name: slice(int(end) - int(np.prod(shape)), int(end))
            for (name, shape), end in zip(self.shapes.items(), ends, strict=True)
        }

    def split(self, theta: Vector) -> dict[str, np.ndarray]:
        return {n: theta[self.spans[n]].reshape(shape) for n, shape in self.shapes.items()}

    def groups(self, kind: str) -> list[slice]:
        """The entries that a projection treats as one vector."""
        tensors = list(self.spans.values())
        if kind == "tensor":
            return tensors
        if kind == "layer":
            return [slice(tensors[i].start, tensors[i + 1].stop) for i in (0, 2)]
        return [slice(0, tensors[-1].stop)]

    def _forward(self, theta: Vector, x: np.ndarray) -> tuple[dict, np.ndarray, np.ndarray]:
        p = self.split(theta)
        before = x @ p["fc1.weight"].T + p["fc1.bias"]
        hidden = np.where(before > 0, before, 0.0)
        return p, hidden, hidden @ p["fc2.weight"].T + p["fc2.bias"]

    def _backward(self, theta: Vector, x: np.ndarray, y: np.ndarray) -> tuple[dict, dict]:
        """Derivatives with respect to scores, hidden units and so on; y: labels or classes."""
        p, hidden, scores = self._forward(theta, x)
        target = np.eye(self.sizes[2])[y] if y.ndim == 1 else y
        d_scores = (softmax(scores) - target) / len(x)
        d_before = (d_scores @ p["fc2.weight"]) * (hidden > 0)
        return p, {"hidden": hidden, "scores": d_scores, "before": d_before}

    def predict(self, theta: Vector, x: np.ndarray) -> np.ndarray:
        return softmax(self._forward(theta, x)[2])

    def grad(self, theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
        _, d = self._backward(theta, x, y)
        return np.concatenate(
            [
                (d["before"].T @ x).ravel(),
                d["before"].sum(axis=0),
                (d["scores"].T @ d["hidden"]).ravel(),
                d["scores"].sum(axis=0),
            ]
        )

    def outputs(self, theta: Vector, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features, which are the hidden units, and scores."""
        _, hidden, scores = self._forward(theta, x)
        return hidden, scores

    def pull_back(
        self, theta: Vector, x: np.ndarray, d_scores: np.ndarray, d_hidden: np.ndarray | float = 0.0
    ) -> Vector:
        """The gradient of a function of which the derivatives by scores and features are given."""
        p, hidden, _ = self._forward(theta, x)
        d_before = (d_scores @ p["fc2.weight"] + d_hidden) * (hidden > 0)
        return np.concatenate(
            [
                (d_before.T @ x).ravel(),
                d_before.sum(axis=0),
                (d_scores.T @ hidden).ravel(),
                d_scores.sum(axis=0),
            ]
        )

    def input_grad(self, theta: Vector, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        p, d = self._backward(theta, x, y)
        return d["before"] @ p["fc1.weight"]


def flat(tree: Mapping[str, object]) -> Vector:
    """One of our trees as a vector."""
    return np.concatenate([np.asarray(v).ravel() for v in tree.values()])


@dataclass
class TrainingSetup:
    """Clients of unequal size and label mix, with given mini-batches."""

    sizes: Sequence[int] = (9, 5, 12, 7)
    batch: int = 4
    epochs: int = 1
    seed: int = 0
    classes: int = 3
    labels: Sequence[Sequence[int]] | None = None
    net: Net = field(init=False)
    data: list[tuple[np.ndarray, np.ndarray]] = field(init=False)
    start: Vector = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.net = Net(classes=self.classes)
        centres = rng.normal(size=(self.classes, 8))
        self.data = []
        for k, n in enumerate(self.sizes):
            own = self.labels[k] if self.labels else range(self.classes)
            mix = rng.dirichlet(0.4 * np.ones(len(own)))
            y = rng.choice(own, size=n, p=mix).astype(np.int64)
            self.data.append((centres[y] + 0.7 * rng.normal(size=(n, 8)), y))
        self.start = flat(self.network().params)

    def network(self) -> Network:
        if self.classes == 3:
            return toy_network(seed=self.seed)
        torch.manual_seed(self.seed)
        return Network(ToyMLP(classes=self.classes), head="fc2", dtype=torch.float64)

    def batches(self, k: int, t: int) -> list[np.ndarray]:
        """Positions of each mini-batch of client k in round t: shuffled anew in every epoch."""
        rng = np.random.default_rng([self.seed, k, t])
        n = self.sizes[k]
        orders = [rng.permutation(n) for _ in range(self.epochs)]
        return [o[i : i + self.batch] for o in orders for i in range(0, n, self.batch)]

    def examples(self, k: int, t: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        x, y = self.data[k]
        return ((x[rows], y[rows]) for rows in self.batches(k, t))

    def shares(self, kind: str, clients: Sequence[int], t: int = 0) -> np.ndarray:
        """p_k of each client: by examples, by examples processed this round, or equal."""
        raw = {
            "examples": lambda k: self.sizes[k],
            "processed": lambda k: sum(len(rows) for rows in self.batches(k, t)),
            "uniform": lambda k: 1,
        }[kind]
        counts = np.array([raw(k) for k in clients], dtype=np.float64)
        return counts / counts.sum()

    def ours(self, expression: str, lr: float, **settings: object) -> Federation:
        """Our implementation of the same federation."""
        outer = {k: settings.pop(k) for k in ("weights", "seed", "per_round") if k in settings}
        local = Local(lr=lr, **{"epochs": self.epochs, "batch_size": self.batch, **settings})
        return Federation(expression, self.network(), self.data, local, self.batches, **outer)


@dataclass
class Told:
    """A round as a paper tells it.

    Args:
        model: the global model after it.
        sent: what each client added to the model it received, as it sends it.
        kept: further vectors to compare, by a name that `agree` can look up in our federation.
    """

    model: Vector
    sent: dict[int, Vector] = field(default_factory=dict)
    kept: dict[str, Vector] = field(default_factory=dict)


def agree(
    ours: Federation,
    story: Iterator[Told],
    cohorts: Sequence[Sequence[int]] | None = None,
    look: Callable[[Federation], Mapping[str, Vector]] | None = None,
    tol: float = 1e-12,
) -> int:
    """Play our rounds beside the paper's and compare everything; return the number of rounds."""
    rounds = 0
    for rounds, told in enumerate(story, start=1):
        played = ours.round(None if cohorts is None else cohorts[rounds - 1])
        pairs = [("model", flat(ours.params), told.model)]
        assert not told.sent or set(told.sent) == set(played.deltas)
        pairs += [(f"client {k}", flat(played.deltas[k]), v) for k, v in told.sent.items()]
        seen = look(ours) if look else {}
        assert set(told.kept) <= set(seen)
        pairs += [(name, seen[name], v) for name, v in told.kept.items()]
        for what, client_state, theirs in pairs:
            worst = float(np.abs(client_state - theirs).max())
            MEASURED.append(worst)
            assert worst < tol, f"round {rounds}, {what}: {worst:.3e}"
        start = flat(ours.training.shared_params)
        assert float(np.abs(told.model - start).max()) > 1e-3  # it moved
    assert rounds >= 3
    return rounds


def paced(ours: Federation, story: Iterator[Told], rates: Sequence[float]) -> Iterator[Told]:
    """Tell a story while our local learning rate follows it: one for each round."""
    for told, lr in zip(story, rates, strict=True):
        local = ours.training.local.model_copy(update={"lr": lr})
        ours.training = replace(ours.training, local=local)
        yield told


MEASURED: list[float] = []
"""Every difference that was compared."""


def descend(
    theta: Vector,
    gradients: Iterator[Callable[[Vector], Vector]],
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    decay: float = 0.0,
) -> Vector:
    """SGD as torch documents it: g + wd theta, then b = rho b + g, then g + rho b or b."""
    buffer = np.zeros_like(theta)
    for gradient in gradients:
        g = gradient(theta) + decay * theta
        buffer = momentum * buffer + g
        theta = theta - lr * (g + momentum * buffer if nesterov else buffer)
    return theta


def averaged(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    gradient: Callable[[Vector, Vector, np.ndarray, np.ndarray, int], Vector],
    lr: float,
    ended: Callable[[int, Vector], None] = lambda i, y: None,
    weights: str = "examples",
    **local: object,
) -> Iterator[Told]:
    """FedAvg whose clients follow another gradient: of (theta, received, x, y, client).

    `ended` is told where each client's local training ends.
    """
    x = setup.start
    for t, clients in enumerate(cohorts):
        sent = {}
        for i in clients:

            def at(bx, by, i=i, x=x):
                return lambda w: gradient(w, x, bx, by, i)

            steps = (at(*batch) for batch in setup.examples(i, t))
            end = descend(x, steps, lr, **local)
            ended(i, end)
            sent[i] = end - x
        p = setup.shares(weights, clients, t)
        x = x + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(x, sent)


def nearest(p: Vector, rows: np.ndarray, bound: float | np.ndarray = 0.0) -> Vector | None:
    """The u nearest to p with <u, row> >= bound for every row, or None where there is none.

    Every set of rows is tried as the active one: u - p is then the shortest vector that lifts those
    rows to their bounds (by SVD of the rows themselves), and it is the answer if it is a
    non-negative combination of them and all other rows are met.
    """
    bounds = np.broadcast_to(np.asarray(bound, dtype=np.float64), len(rows))
    norms = np.linalg.norm(rows, axis=1)
    if np.any((norms == 0) & (bounds > 0)):
        return None
    M, b = rows[norms > 0] / norms[norms > 0, None], bounds[norms > 0] / norms[norms > 0]
    if np.all(M @ p >= b):
        return p
    size = np.linalg.norm(p) + np.abs(b).max()
    best, answer = 1e-10 * size, None
    for count in range(1, len(M) + 1):
        for chosen in map(list, combinations(range(len(M)), count)):
            A = M[chosen]
            step = np.linalg.lstsq(A, b[chosen] - A @ p, rcond=1e-12)[0]
            u = p + step
            unmet = max(np.max(b - M @ u), np.abs(A @ u - b[chosen]).max())
            if unmet < best:
                multipliers = np.linalg.lstsq(A.T, step, rcond=1e-12)[0]
                unmet = max(unmet, -multipliers.min())
            if unmet < best:
                best, answer = unmet, u
        if best < 1e-14 * size:
            break
    return answer
