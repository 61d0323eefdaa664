"""Diagnostics: what happens in a run, measured by observers that change none of its numbers."""
