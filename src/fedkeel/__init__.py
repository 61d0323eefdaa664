"""Federated learning on non-IID data: every drift and forgetting correction as a part."""

__version__ = "0.1.0"
