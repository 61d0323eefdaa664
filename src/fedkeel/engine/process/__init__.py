"""Child processes, the memory and cores they use, and the work items they are given."""
