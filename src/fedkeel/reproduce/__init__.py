"""The papers' tables as data, and published numbers next to measured ones."""
