"""Clients with different networks, which share no parameters."""
