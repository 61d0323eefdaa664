"""What a run costs: seconds by engine, memory, disk space and traffic."""
