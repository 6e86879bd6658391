"""Keys and values that a layer of a model hands on to later ones, which make none of their own.

Transformers gives all layers one mapping for that, and the model chooses the names in it. A layer that runs without the
earlier ones finds what they have written in the cache.
"""

from collections import UserDict
from typing import Any

# The argument of layers, in transformers.
ARGUMENT = "shared_kv_states"


class HandedOn(UserDict[Any, Any]):
    """The mapping as one layer gets it. Notes the names that the layer has `read` and `written`."""

    def __init__(self, states: Any) -> None:
        self.data = states  # not copied: the other layers have it, too
        self.read: set[Any] = set()
        self.written: set[Any] = set()

    def __getitem__(self, name: Any) -> Any:
        self.read.add(name)
        return self.data[name]

    def __setitem__(self, name: Any, states: Any) -> None:
        self.written.add(name)
        self.data[name] = states


def noted(arguments: dict[str, Any]) -> tuple[dict[str, Any], HandedOn | None]:
    """The arguments of a layer's call, with the mapping as `HandedOn`. Themselves and None if there is no mapping."""
    states = arguments.get(ARGUMENT)
    if states is None:
        return arguments, None
    handed_on = HandedOn(states)
    return {**arguments, ARGUMENT: handed_on}, handed_on
