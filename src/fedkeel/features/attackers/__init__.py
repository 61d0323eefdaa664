"""Simulated attackers: who they are, and what they do to their data and to their updates."""
