"""What every method has to do, checked: for entries of the registry and for one's own."""

from fedkeel.conformance.checks import CHECKS, Check, ConformanceError, check_method, run_checks

__all__ = ["CHECKS", "Check", "ConformanceError", "check_method", "run_checks"]
