"""Methods: parts, their composition, the local loop and the server round."""

from fedkeel.method.compose import Plan, compose
from fedkeel.method.docs.cite import cite
from fedkeel.method.docs.describe import describe
from fedkeel.method.grammar import parse
from fedkeel.method.registry import REGISTRY

__all__ = ["REGISTRY", "Plan", "cite", "compose", "describe", "parse"]
