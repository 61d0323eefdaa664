"""The quantities of diagnostics that a page draws."""

from __future__ import annotations

CHARTS: dict[str, str] = {
    "forgetting.increase": "Loss increase on the last round's clients",
    "forgetting.by_class": "Accuracy lost since the best round, mean over classes",
    "forgetting.lost_accuracy.class": "Accuracy lost since the best round, by class",
    "global_forgetting.increase": "Loss increase on all clients' examples",
    "drift.norm": "Norm of an update",
    "drift.norm.layer": "Norm of an update, by layer",
    "drift.to_mean": "Distance of a local model to the mean of all",
    "drift.diversity": "Gradient diversity of the updates",
    "drift.diversity.layer": "Gradient diversity, by layer",
    "conflict.share": "Share of conflicting pairs of updates",
    "conflict.share.layer": "Share of conflicting pairs, by layer",
    "conflict.cosine": "Mean cosine of two updates",
    "conflict.cosine.layer": "Mean cosine of two updates, by layer",
    "participation.relative": "Distance to the update of all clients, relative",
    "participation.relative.layer": "Distance to the update of all clients, by layer",
    "fisher.correlation_pseudo": "Correlation of Fisher information, pseudo and earlier data",
    "fisher.correlation_own": "Correlation of Fisher information, own and earlier data",
    "cka.unbiased": "CKA of local and global model, mean over layers",
    "cka.unbiased.layer": "CKA of local and global model, by layer",
    "cka.class_drift.class": "Representation drift, by class",
    "landscape.global_barrier": "Loss barrier between a local and the global model",
    "landscape.client_barrier": "Loss barrier between two local models",
    "landscape.global_loss.position": "Loss from the global (0) to a local model (1)",
    "landscape.client_loss.position": "Loss from a local model (0) to another (1)",
    "landscape.global_score.position": "Score from the global (0) to a local model (1)",
    "landscape.client_score.position": "Score from a local model (0) to another (1)",
    "sharpness.eigenvalue": "Largest eigenvalue of the Hessian",
}
"""Quantity that is drawn -> title of its chart, in the order of the page."""
