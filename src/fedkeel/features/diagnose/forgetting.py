"""Forgetting: how much worse local models do on others' examples, and the global model by class."""

from __future__ import annotations

import numpy as np

from fedkeel.features.diagnose.measured import RoundDiagnostics, mean
from fedkeel.features.diagnose.models import class_accuracies
from fedkeel.features.diagnose.observed_round import ObservedRound
from fedkeel.method.context import Floats


def loss_increase(before: Floats, after: Floats) -> Floats:
    r"""Return [n] the increase of the loss on the data of each client of the round before.

    .. math:: \frac{1}{K}\sum_{j} L(\theta^{(t,j)}; D_i) - L(\theta^{(t-1)}; D_i)

    Source: FedReg (Xu et al. 2022), Appendix B.1 and B.3.

    Args:
        before: [n] mean loss of the received model on the data D_i of each client of the round
            before, loss(t-1)(i).
        after: [n, K] mean loss of each local model of this round on the same data; its mean over
            the models is loss(t)(i).
    """
    increase: Floats = after.mean(axis=1) - before
    return increase


def class_forgetting(accuracies: Floats) -> Floats:
    r"""Return [Y] how far the accuracy of each class lies below its best of earlier rounds.

    .. math:: \max_{s<t} A_c^{(s)} - A_c^{(t)}

    Source: FedNTD (Lee et al. 2022), whose measure of forgetting is the mean over classes. It is
    negative for a class that was never as good as now; NaN for a class without examples, and
    everywhere where there is no earlier round.

    Args:
        accuracies: [t, Y] accuracy of each class by round, the last one now.
    """
    if len(accuracies) < 2:
        return np.full(accuracies.shape[1:], np.nan)
    below: Floats = accuracies[:-1].max(axis=0) - accuracies[-1]
    return below


def measure_forgetting(round: ObservedRound) -> RoundDiagnostics:
    """Return the loss increase of FedReg, and where there are labels the lost accuracy of FedNTD.

    FedReg's needs a round before; FedNTD's compares with the diagnosed rounds before.
    """
    measured = _fedreg(round)
    if round.setup.training.network.scores_classes and round.setup.test.has_labels:
        measured |= _fedntd(round)
    return measured


def _fedreg(round: ObservedRound) -> RoundDiagnostics:
    previous = next((row.clients for row in reversed(round.rows) if row.clients), [])
    if not previous:
        return RoundDiagnostics()
    losses = np.array([[scores["loss"] for scores in round.scores_on(i)] for i in previous])
    before, after = losses[:, 0], losses[:, 1:]
    increase = loss_increase(before, after)
    numbers = {
        "loss_before": mean(before),
        "loss_after": mean(after),
        "increase": mean(increase),
    }
    return RoundDiagnostics(
        numbers, {"increase.client": dict(zip(map(str, previous), increase.tolist(), strict=True))}
    )


def _fedntd(round: ObservedRound) -> RoundDiagnostics:
    now = class_accuracies(round.setup, round.after, round.setup.test)
    labels, axis = [str(label) for label in range(len(now))], "accuracy.class"
    earlier = [row.breakdowns.get(f"forgetting.{axis}", {}) for row in round.rows]
    history = [[known[label] for label in labels] for known in earlier if known]
    measured = RoundDiagnostics({}, {axis: dict(zip(labels, now.tolist(), strict=True))})
    if history:
        lost = class_forgetting(np.array([*history, now]))
        by_class = dict(zip(labels, lost.tolist(), strict=True))
        measured |= RoundDiagnostics({"by_class": mean(lost)}, {"lost_accuracy.class": by_class})
    return measured


def measure_global_forgetting(round: ObservedRound) -> RoundDiagnostics:
    r"""Return the mean loss on all clients' examples before and after local training.

    .. math::
        L^{t-1} = L(\theta^{t-1}; D), \qquad
        L^t = \frac{1}{C}\sum_k \frac{1}{K}\sum_i L(\theta_i^t; D_k)

    Source: FedGC (the paper of `fedgc`), Appendix A.10, Eq. (34) and (35), where all clients take
    part: C = K, and all receive the same model. D are the examples of all clients together.
    """
    setup = round.setup
    clients = [k for k in range(len(setup.federation)) if setup.federation.sizes[k]]
    losses = np.array([[scores["loss"] for scores in round.scores_on(k)] for k in clients])
    sizes = setup.federation.sizes[clients]
    before = float((losses[:, 0] * sizes).sum() / sizes.sum())
    after = mean(losses[:, 1:].mean(axis=1))
    return RoundDiagnostics(
        {"loss_before": before, "loss_after": after, "increase": after - before}
    )
