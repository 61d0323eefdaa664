"""Differential privacy: the account of what a run spends, its budget, and what is legal in it."""
