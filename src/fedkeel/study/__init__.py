"""Many runs: comparisons, searches for settings, and the Python interface."""
