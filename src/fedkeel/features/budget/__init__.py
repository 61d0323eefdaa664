"""The budget of differential privacy: its noise, its account, and the end of a run."""
