"""What a server sends among the settings is compared with what is installed on the node.

It may set values. Names of code, and of places such as files, are those of the app that the node's
operator has installed, or of the site's policy. This is settled before anything is imported, read
or built.
"""

from __future__ import annotations

from fedkeel.config import Experiment
from fedkeel.config.code_names import HUBS, PLACES, code_names, texts_by_place, value_at
from fedkeel.features.budget.policy import Policy, PolicyError

_INSTALLED = "what the app has that is installed on this node"


def check_sent(installed: Experiment, sent: Experiment, policy: Policy | None) -> None:
    """Refuse settings of a server that name other code, or other places, than the node has.

    Args:
        installed: the experiment in the app on this node.
        sent: the same with the settings that the server has sent.
        policy: the site's own, which may name more code.

    Raises:
        PolicyError: names the setting.
    """
    known = code_names(installed)
    code = () if policy is None else policy.code
    methods = code if policy is None else (*code, *(policy.methods or ()))
    for key, name in sorted(code_names(sent) - known):
        if name not in (methods if key == "method" else code):
            installed_names = sorted(path for other, path in known if other == key)
            raise PolicyError(
                f"The server names code that is not installed on this node: {key} = {name!r}.",
                expected=", ".join(installed_names) or "no name of code, as in the app here",
                why="what a setting names is called",
                do="install an app that names it, or name it as 'code' in the site's policy",
            )
    for key in PLACES:
        if value_at(sent, key) != value_at(installed, key):
            raise _other(key, value_at(sent, key))
    if sent.model.name != installed.model.name and sent.model.name.startswith(HUBS):
        raise _other("model.name", sent.model.name)
    if ":" in sent.model.name:  # what foreign code does with a text is not known: it may be a path
        texts = texts_by_place(installed.model.args)
        for place, text in texts_by_place(sent.model.args).items():
            if texts.get(place) != text:
                raise _other(f"model.args{place}", text)


def _other(key: str, value: object) -> PolicyError:
    return PolicyError(
        f"The server sets {key}, which only the operator of this node may set.",
        got=repr(value),
        expected=_INSTALLED,
        do="change it in the app that is installed on the node",
    )
