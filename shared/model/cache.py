"""A KV cache of preallocated slots that holds no lengths.

Every pass says at which position it starts; slot j holds position j. Rolling back is starting the next pass at a smaller
base, and layers that are behind simply get passes with an older base, so split depth needs no cache operation at all.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from shared.errors import Exhausted, InvalidInput
from shared.ops.packing import Slots

RETRY_AFTER_S = 1.0
# PyTorch has no class of its own for this failure on a CPU.
CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that Python or PyTorch, on any device, could not allocate memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)
    )


class LengthlessCache(Cache):
    """A transformers cache that is asked for its length only to place positions and masks, and answers for the pass at hand."""

    # Read by transformers; as plain attributes because our `layers` stays empty: no per-layer kind applies.
    is_sliding: list[bool] = []  # noqa: RUF012
    is_linear: list[bool] = []  # noqa: RUF012
    is_dummy: list[bool] = []  # noqa: RUF012
    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        return -1


class SlotCache(LengthlessCache):
    """Keys and values of B rows, `capacity` slots each, allocated per layer at its first pass."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._base = 0
        self._end = 0
        self._bases: list[int] = []  # the same per row, as a fused layer wants it
        self._counts: list[int] = []

    def begin(self, base: int, num_tokens: int) -> None:
        """States that the next pass holds positions [base, base + num_tokens). Raises `InvalidInput` past the capacity."""
        if not 0 <= base <= base + num_tokens <= self.capacity:
            raise InvalidInput(
                f"positions [{base}, {base + num_tokens}) do not fit {self.capacity} slots",
                reason="CACHE_CAPACITY",
            )
        self._base, self._end = base, base + num_tokens
        self._bases, self._counts = [base], [num_tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, Hkv, Q, Dh] at the pass' positions; returns views [B, Hkv, base + Q, Dh] of the slots."""
        keys, values = self.stores(key_states, value_states, layer_idx)
        keys[:, :, self._base : self._end] = key_states
        values[:, :, self._base : self._end] = value_states
        return keys[:, :, : self._end], values[:, :, : self._end]

    def stores(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """All slots of a layer [B, Hkv, capacity, Dh], allocated for states of this form at the first call."""
        keys = self.keys.get(layer_idx)
        if keys is None:
            # Zeros, not empty: a masked NaN in an unused slot would still poison attention.
            keys = self.keys[layer_idx] = self._allocate(key_states)
            self.values[layer_idx] = self._allocate(value_states)
        return keys, self.values[layer_idx]

    def slots(self, keys: Tensor, values: Tensor, layer_idx: int) -> Slots:
        """The stores of a layer, row by row, and where in them the pass' tokens belong: see `SlottedCache`."""
        all_keys, all_values = self.stores(keys, values, layer_idx)
        rows = keys.shape[0]
        if rows == 1:
            return Slots([all_keys], [all_values], self._bases, self._counts)
        return Slots(
            list(all_keys.split(1)),
            list(all_values.split(1)),
            self._bases * rows,
            self._counts * rows,
        )

    @torch.inference_mode()
    def copy(self, other: "SlotCache", start: int, end: int) -> None:
        """Takes over slots [start, end) of another cache of the same model, all layers."""
        assert 0 <= start <= end <= min(self.capacity, other.capacity)
        for layer_idx, theirs in other.keys.items():
            keys, values = self.stores(theirs, other.values[layer_idx], layer_idx)
            keys[:, :, start:end] = theirs[:, :, start:end]
            values[:, :, start:end] = other.values[layer_idx][:, :, start:end]

    def reserve(self, like: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Allocates all layers now, instead of at each layer's first pass. `like`: keys and values [B, Hkv, .., Dh] by layer.

        Raises `Exhausted` (reason OUT_OF_MEMORY) where there is no memory for them.
        """
        try:
            for layer_idx, (keys, values) in like.items():
                self.stores(keys, values, layer_idx)
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
        return torch.zeros(rows, heads, self.capacity, width, dtype=like.dtype, device=like.device)

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated so far."""
        tensors = [*self.keys.values(), *self.values.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._base

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._base

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        # transformers before 5.3 handed the positions themselves.
        num_queries = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self._base + num_queries, 0
