"""KV caches that hold no lengths: the contract of all of them, and the contiguous one.

Every pass states the position at which it starts. A cache is rolled back by starting the next pass at a smaller
position. Layers that are behind the others get passes that start where they stopped, so running a model in parts needs
no cache operation either.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from shared.errors import RETRY_AFTER_S, Exhausted, InvalidInput
from shared.model.inference import inference
from shared.ops.layer import LayerKV, TensorTable

# Keys and values, each as one table per row of a cache.
KVTables = tuple[list[TensorTable], list[TensorTable]]

# PyTorch has no exception class for this failure on a CPU. Its message names the allocator.
CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that Python or PyTorch, on any device, could not allocate memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)
    )


def refuse_if_out_of_memory(error: BaseException) -> None:
    """For checks of what a model can do: memory that is short now says nothing about the model, and a verdict is
    remembered for later starts. Raises `Exhausted` (OUT_OF_MEMORY) if that is what `error` says."""
    if is_out_of_memory(error):
        raise Exhausted("there is not enough memory to try the model", reason="OUT_OF_MEMORY") from error


class LengthlessCache(Cache):
    """A transformers cache without a length. Transformers asks for it to place positions and masks; the answer is for
    the current pass.

    `offset`: the position of the pass's first query. `layers` stays empty, so no per-layer kind applies.
    """

    def __init__(self, offset: int = 0) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.offset = offset

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Also the query offset that transformers passes to the mask function."""
        return self.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.offset + query_length, 0


class _LateLength(int):
    """The number of keys of a late start. Transformers leaves out the mask of a window or chunk that is longer than the
    keys, as if they began at position 0; behind a late start a chunk may end among them. So this is shorter than
    nothing."""

    def __lt__(self, other: int) -> bool:
        return False

    def __ge__(self, other: int) -> bool:
        return True


class KVCache(ABC):
    """The keys and values of at most `capacity` tokens per sequence, in every layer. Made by `Runner.new_cache`.

    `origin`: the position that the model sees for the first of them. 0, except in checks: they set it to try late
    positions without reading all that come before.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.origin = 0

    def begin(self, base: int, num_tokens: int) -> None:
        """States that the next pass holds positions [base, base + num_tokens).

        Raises `InvalidInput` (reason CACHE_CAPACITY) if they exceed the capacity.
        """
        if not 0 <= base <= base + num_tokens <= self.capacity:
            raise InvalidInput(
                f"positions [{base}, {base + num_tokens}) do not fit a KV cache of {self.capacity} tokens",
                reason="CACHE_CAPACITY",
            )

    @abstractmethod
    def copy(self, donor: "KVCache", start: int, end: int) -> None:
        """Copies the keys and values of positions [start, end) in all layers from a cache of the same runner."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of memory that the cache holds now."""


def as_contiguous(cache: KVCache) -> "ContiguousCache":
    """`cache` itself. Raises `TypeError` if it is a cache of another kind, so of another runner."""
    if not isinstance(cache, ContiguousCache):
        raise TypeError(f"the runner needs a ContiguousCache, not a {type(cache).__name__}")
    return cache


class ContiguousCache(LengthlessCache, KVCache):
    """Keys and values of B rows as one tensor each per layer, [B, Hkv, capacity, Dh]: index j holds the token at
    position j.

    A layer's tensors are allocated at its first pass, or all at once by `reserve`. `dtype`: the one that keys and
    values are rounded to when they are written; None: that of the states. Attention must read such a cache as it is:
    "neap" does, the implementations of transformers do not.
    """

    def __init__(self, capacity: int, dtype: torch.dtype | None = None) -> None:
        LengthlessCache.__init__(self)
        KVCache.__init__(self, capacity)
        self.dtype = dtype
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._base = self._end = 0
        self._tables: dict[tuple[int, ...], KVTables] = {}
        # The pass per row, in the form that a fused layer takes.
        self._bases: list[int] = []
        self._counts: list[int] = []

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        length = self._base + query_length
        return _LateLength(length) if self.origin else length, self.origin

    @property
    def keys(self) -> Mapping[int, Tensor]:
        """By layer. Read-only, because tables have the tensors' addresses."""
        return MappingProxyType(self._keys)

    @property
    def values(self) -> Mapping[int, Tensor]:
        return MappingProxyType(self._values)

    def begin(self, base: int, num_tokens: int) -> None:
        super().begin(base, num_tokens)
        self.offset, self._base, self._end = self.origin + base, base, base + num_tokens
        self._bases, self._counts = [base], [num_tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, Hkv, Q, Dh] at the positions of the pass.
        Returns views [B, Hkv, base + Q, Dh] of the positions up to its end."""
        keys, values = self.layer_tensors(key_states, value_states, layer_idx)
        keys[:, :, self._base : self._end] = key_states
        values[:, :, self._base : self._end] = value_states
        return self.seen(layer_idx)

    def seen(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Views [B, Hkv, base + Q, Dh] of a layer's keys and values up to the end of the pass, which has written them
        before."""
        return self._keys[layer_idx][:, :, : self._end], self._values[layer_idx][:, :, : self._end]

    def layer_tensors(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """A layer's whole tensors [B, Hkv, capacity, Dh]. The first call allocates them for states of this form."""
        keys = self._keys.get(layer_idx)
        if keys is None:
            keys = self._keys[layer_idx] = self._allocate(key_states)
            self._values[layer_idx] = self._allocate(value_states)
        return keys, self._values[layer_idx]

    def layers_kv(self, likes: Sequence[tuple[Tensor, Tensor]], layers: tuple[int, ...]) -> LayerKV:
        """The tensors of layers, per row, and the positions in them that the pass will write.

        `likes`: of each layer keys and values [B, Hkv, any, Dh] that show the form of what will be written.
        """
        rows = likes[0][0].shape[0]
        return LayerKV(*self.tables(likes, layers), self._bases * rows, self._counts * rows)

    def tables(self, likes: Sequence[tuple[Tensor, Tensor]], layers: tuple[int, ...]) -> KVTables:
        """Tables of the keys and of the values of `layers`, one per row. `likes` as in `layers_kv`."""
        tables = self._tables.get(layers)
        if tables is None:
            both = [self.layer_tensors(*like, layer) for like, layer in zip(likes, layers, strict=True)]
            tables = self._tables[layers] = (
                _tables_of_rows([row_keys for row_keys, _ in both]),
                _tables_of_rows([row_values for _, row_values in both]),
            )
        return tables

    @inference
    def copy(self, donor: KVCache, start: int, end: int) -> None:
        source = as_contiguous(donor)
        assert 0 <= start <= end <= min(self.capacity, source.capacity)
        for layer_idx, theirs in source._keys.items():
            keys, values = self.layer_tensors(theirs, source._values[layer_idx], layer_idx)
            keys[:, :, start:end] = theirs[:, :, start:end]
            values[:, :, start:end] = source._values[layer_idx][:, :, start:end]

    def reserve(self, like: "ContiguousCache") -> None:
        """Allocates all layers now, in the form that `like` has them.

        Raises `Exhausted` (reason OUT_OF_MEMORY) if there is not enough memory.
        """
        try:
            for layer_idx, keys in like._keys.items():
                self.layer_tensors(keys, like._values[layer_idx], layer_idx)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise Exhausted(
                f"there is no memory for the keys and values of {self.capacity} positions",
                reason="OUT_OF_MEMORY",
                retry_after_s=RETRY_AFTER_S,
            ) from None

    def _allocate(self, like: Tensor) -> Tensor:
        rows, heads, _, width = like.shape
        dtype = self.dtype or like.dtype
        # Not filled: filling the memory of a long answer takes longer than passes do, and no pass reads a position
        # beyond its end.
        return torch.empty(rows, heads, self.capacity, width, dtype=dtype, device=like.device)

    @property
    def kv_bytes(self) -> int:
        tensors = [*self._keys.values(), *self._values.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tables_of_rows(layers: Sequence[Tensor]) -> list[TensorTable]:
    """Per row, the table of its tensors [1, Hkv, S, Dh] in all layers [B, Hkv, S, Dh]."""
    return [TensorTable(rows) for rows in zip(*(layer.split(1) for layer in layers), strict=True)]
