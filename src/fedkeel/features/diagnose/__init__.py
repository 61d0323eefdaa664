"""Diagnostics: what happens in a run, measured by an observer that changes no number of it."""
