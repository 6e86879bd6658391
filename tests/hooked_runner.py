"""A runner that tests can slow down, watch, or make fail."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shared.model.cache import SlotCache
from shared.model.load import LoadedModel
from shared.model.runner import DepthRunner


class HookedRunner(DepthRunner):
    """Calls `before[name]` with a method's positional arguments before the method of that name runs.

    Methods with hooks: run, run_packed, logits, new_cache, reserve. Its class is a `runner_of` of an engine.
    """

    def __init__(self, loaded: LoadedModel, kv_budget_bytes: int = 0) -> None:
        self.before: dict[str, Callable[..., object]] = {}
        super().__init__(loaded)

    def _call(self, name: str, *args: object) -> None:
        hook = self.before.get(name)
        if hook is not None:
            hook(*args)

    def run(self, *args: Any, **options: Any) -> Tensor:
        self._call("run", *args)
        return super().run(*args, **options)

    def run_packed(self, *args: Any, **options: Any) -> Tensor:
        self._call("run_packed", *args)
        return super().run_packed(*args, **options)

    def logits(self, state: Tensor) -> Tensor:
        self._call("logits", state)
        return super().logits(state)

    def new_cache(self, capacity: int) -> SlotCache:
        self._call("new_cache", capacity)
        return super().new_cache(capacity)

    def reserve(self, cache: SlotCache) -> None:
        self._call("reserve", cache)
        super().reserve(cache)
