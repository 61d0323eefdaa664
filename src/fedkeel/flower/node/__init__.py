"""A node of a federation: its data, its clients and its replies."""
