"""Leaves that every room may import: streams, clock, names of code, settings, declarations."""
