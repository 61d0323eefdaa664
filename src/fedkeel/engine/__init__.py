"""Engines run clients. They differ in speed, never in results."""
