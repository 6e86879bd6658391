"""Which models engines use. Two engines would run passes of two threads through the same modules, and prepare these
twice."""

import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module

from shared.errors import PreconditionFailed


class ModelClaim:
    """The use of a model by one engine, from its construction until its thread has ended."""

    def __init__(self, model: Module) -> None:
        """Waits for an engine that is ending. Raises `PreconditionFailed` (reason MODEL_IN_USE) if the model's engine
        is not."""
        self._model = model
        self._released = threading.Event()
        # Set without a lock, by finalisers too.
        self.is_ending = False
        self.thread: int | None = None
        # Without a lock as well: a forked child would inherit it as it is then.
        while (held := _claims.setdefault(model, self)) is not self:
            if not held.is_ending or held.thread == threading.get_ident():
                raise PreconditionFailed("another engine uses this model; close it first", reason="MODEL_IN_USE")
            held._released.wait()

    def release(self) -> None:
        """Another engine may use the model from now on. Idempotent."""
        if _claims.get(self._model) is self:
            del _claims[self._model]
        self._released.set()


_claims: "WeakKeyDictionary[Any, ModelClaim]" = WeakKeyDictionary()
