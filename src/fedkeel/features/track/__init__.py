"""Trackers: TensorBoard, MLflow and Weights & Biases, each behind the same few calls.

A module of a tracker is imported when a run reports to it, so that nobody needs its package who
does not use it.
"""
