"""Units of systemd, read as systemd reads them: sections, quoted words, variables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

SECTIONS = {"Unit", "Service", "Install"}


@dataclass(frozen=True)
class Unit:
    """A unit.

    Args:
        values: all values of each key of a section, in order.
    """

    values: dict[str, dict[str, list[str]]]

    @classmethod
    def read(cls, file: Path) -> Unit:
        """Read a unit; what systemd would not read as it is meant is refused."""
        text = re.sub(r"\\\n\s*", " ", file.read_text(encoding="utf-8"))
        values: dict[str, dict[str, list[str]]] = {}
        section = ""
        for line in text.splitlines():
            if not line.strip() or line.startswith(("#", ";")):
                continue
            if line.startswith("["):
                section = line.strip("[]")
                assert section in SECTIONS, line
                continue
            key, equals, value = line.partition("=")
            assert equals, line
            assert section, line
            assert re.fullmatch("[A-Z][A-Za-z]+", key), line
            assert "%" not in value.replace("%%", ""), f"a specifier: {line}"
            values.setdefault(section, {}).setdefault(key, []).append(value.strip())
        return cls(values)

    def only(self, key: str, section: str = "Service") -> str:
        """Return the value of a key that is there once."""
        (value,) = self.values[section][key]
        return value

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the unit sets; of two with one name, the last counts."""
        words = [
            word for text in self.values["Service"]["Environment"] for word in shlex.split(text)
        ]
        return dict(word.split("=", 1) for word in words)

    def command(self, **changed: str) -> list[str]:
        """Return the words of ``ExecStart``, with variables of which some have other values."""
        variables = {**self.environment, **changed}
        words = []
        for word in shlex.split(self.only("ExecStart")):
            if match := re.fullmatch(r"\$(\w+)", word):
                words += variables[match[1]].split()
                continue
            word = re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word)
            assert "$" not in word.replace("$$", ""), word
            words.append(word.replace("$$", "$").replace("%%", "%"))
        assert words[0].startswith("/"), "systemd takes a whole path only"
        return words
