"""Scores of clients: of the global model on each one's own examples, and of personal models."""
