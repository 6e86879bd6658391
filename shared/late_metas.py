"""Imports torch without its meta registrations: what functions give for tensors without numbers, once more in Python.

They are a quarter of torch's import. A skeleton needs those that torch has in C++, and torch refuses a function that
has none (NotImplementedError): then `import_metas` imports the others, and the skeleton is made again.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_METAS = "torch._meta_registrations"


def import_without_metas() -> None:
    """Does nothing if torch is imported already. To be called before there are threads."""
    if "torch" in sys.modules:
        return
    sys.modules[_METAS] = _LateMetas(_METAS)
    import torch
    from torch._opaque_base import OpaqueBaseMeta

    # Torch makes no generator before this is set, which it does in a module that is left out now.
    torch._C._set_generator_metaclass(OpaqueBaseMeta)


def import_metas() -> bool:
    """Imports them, too, if they were left out. Whether they were."""
    late = sys.modules.get(_METAS)
    return isinstance(late, _LateMetas) and late.load()


class _LateMetas(ModuleType):
    """Stands for the module until something needs more of it than what it registers."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.load()
        return getattr(sys.modules[_METAS], name)

    def load(self) -> bool:
        import torch

        if sys.modules.get(_METAS) is not self:
            return False
        del sys.modules[_METAS]
        torch._meta_registrations = importlib.import_module(_METAS)
        return True
