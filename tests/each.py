"""One test of many cases: what pytest does for a test costs more than most of these cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def each(
    names: str | tuple[str, ...], values: Iterable[Any] | Callable[[], Iterable[Any]]
) -> Callable[..., Any]:
    """Run a test on every value, as `pytest.mark.parametrize` does, but as a single test.

    Every case is run. Those that fail are raised together, each with its values in a note. The
    fixtures are those of the one test, so it suits tests whose cases leave these as they are.
    A function that returns the values is called by the test, not while tests are collected.
    """
    words = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
    if not callable(values):
        values = list(values)  # a generator can be read once

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def all_cases(**fixtures: Any) -> None:
            failures: list[BaseException] = []
            listed = list(values() if callable(values) else values)
            assert listed, f"there is no {words}"
            for value in listed:
                case = dict(zip(words, value if len(words) > 1 else (value,), strict=True))
                try:
                    test(**fixtures, **case)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    error.add_note(
                        f"with {', '.join(f'{k} = {v!r:.200}' for k, v in case.items())}"
                    )
                    failures.append(error)
            if failures:
                message = f"{len(failures)} of {len(listed)} cases fail"
                raise BaseExceptionGroup(message, failures)

        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in words]
        all_cases.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return all_cases

    return decorate
