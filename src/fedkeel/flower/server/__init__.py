"""The server of a federation: who is connected, orders and replies, the engine that drives the nodes."""
