"""Checks that every method must pass: those of the registry and those of users."""

from fedkeel.study.conformance.checks import (
    CHECKS,
    Check,
    ConformanceError,
    check_method,
    run_checks,
)

__all__ = ["CHECKS", "Check", "ConformanceError", "check_method", "run_checks"]
