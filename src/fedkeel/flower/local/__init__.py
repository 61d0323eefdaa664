"""A whole federation on one machine: its keys, its processes, from start to end."""
