"""Forgetting: how much worse local models do on examples of others, and the global model by class.

The functions here take losses and accuracies that were measured; `fedkeel.diagnose.models` measures
them.
"""

from __future__ import annotations

import numpy as np

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
