"""The doctor: how clients differ, what goes wrong with FedAvg, and what to tune."""
