"""A node of a federation: its data, its clients, its answers."""
