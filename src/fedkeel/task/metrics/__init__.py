"""Metrics: what is measured of a model, as sums that add up over shards, clients and nodes."""
