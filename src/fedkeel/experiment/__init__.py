"""From settings to records: prepare, execute, resume, compare."""
