"""A runner that tests can slow down, watch, or make fail."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shared.model.cache import ContiguousCache
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel


class HookedRunner(ContiguousRunner):
    """Calls `before[name]` with a method's positional arguments before the method of that name runs.

    Methods with hooks: run, run_ragged, logits, new_cache, reserve. Its class is a `runner_of` of an engine.
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

    def run_ragged(self, *args: Any, **options: Any) -> Tensor:
        self._call("run_ragged", *args)
        return super().run_ragged(*args, **options)

    def logits(self, state: Tensor) -> Tensor:
        self._call("logits", state)
        return super().logits(state)

    def choices(self, states: Tensor) -> Tensor:
        self._call("logits", states)
        return super().choices(states)

    def new_cache(self, capacity: int) -> ContiguousCache:
        self._call("new_cache", capacity)
        return super().new_cache(capacity)

    def reserve(self, cache: ContiguousCache) -> None:
        self._call("reserve", cache)
        super().reserve(cache)
