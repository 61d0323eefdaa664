"""A local step or round, traced once and run again as a list of tensor operations."""
