"""What every room may import: the base of settings, and what a feature declares."""
