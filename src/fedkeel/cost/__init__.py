"""What a run takes: seconds by engine, memory, disk, traffic."""
