"""What a run leaves behind.

This package is a leaf. Engines write these rows and the report reads them; it imports neither torch
nor any other room of the house, so that a report needs no more than the files.
"""
