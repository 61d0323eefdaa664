"""Baselines of a comparison, which send nothing: each client alone, all examples together."""
