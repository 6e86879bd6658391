"""Whether modules have hooks, asked before each pass that would not call them."""

from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle


class Hooks:
    """The forward hooks of some modules, as they are now and later."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._each = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        # The number of hooks that PyTorch had registered anywhere when there were last none here.
        self._none_until = -1

    def are_any(self) -> bool:
        """Whether there is one. After a pass the modules are in no cache of the processor, and looking at those of 30
        layers takes 50 us, so it is done only if PyTorch has registered a hook since."""
        registered: int = RemovableHandle.next_id
        if registered == self._none_until:
            return False
        if any(self._each):
            return True
        self._none_until = registered
        return False
