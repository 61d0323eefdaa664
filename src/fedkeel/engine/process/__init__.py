"""What a process that trains needs of the operating system: memory, cores, number format, work."""
