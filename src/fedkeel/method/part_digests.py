"""Digests of users' parts: a finished run is used again only where their code is unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedkeel.base.fingerprint.reached_values import Describer, Description
from fedkeel.base.fingerprint.source_digest import digest_of
from fedkeel.method.part import Part
from fedkeel.method.plugins import file_digest_of, user_modules


def user_part_digests(parts: Iterable[Part]) -> dict[str, str]:
    """Return digests of the parts outside the package, by the modules in which they are written.

    They change with the files there, with the user's files that these import, and with every value
    that the parts' code can reach, see `fedkeel.base.fingerprint.reached_values`.
    """
    return digests_of_modules(describe_user_parts(parts))


def digests_of_modules(descriptions: Mapping[str, Description]) -> dict[str, str]:
    """Return a digest of each module that `describe_user_parts` has described, and of its file."""
    return {
        module: digest_of(f"{file_digest_of(module)} {description.text}")
        for module, description in descriptions.items()
    }


def describe_user_parts(parts: Iterable[Part]) -> dict[str, Description]:
    """Return a description of the parts outside the package, by their modules.

    It follows all values that they can reach; `user_modules` does not.
    """
    return {module: _description(kinds) for module, kinds in user_modules(parts).items()}


def _description(kinds: Iterable[type[Part]]) -> Description:
    describer = Describer()
    return describer.description(" ".join([describer.describe(kind) for kind in kinds]))
