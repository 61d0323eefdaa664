"""A whole federation on one machine: its keys and its processes."""
