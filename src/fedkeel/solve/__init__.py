"""Projections and quadratic programmes: pure mathematics that knows no federation."""
