"""The public name of the checks that every method must pass: `check_method`."""

from fedkeel.study.conformance import CHECKS, Check, ConformanceError, check_method, run_checks

__all__ = ["CHECKS", "Check", "ConformanceError", "check_method", "run_checks"]
