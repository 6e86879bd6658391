"""How a folder stores quantised matrices that neap reads itself: several tensors in the place of one parameter."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shared.model.remembered.packed import PackedMatrices
from shared.model.weights.files import StableFile
from shared.model.weights.stored import Stored


class Place(NamedTuple):
    """A tensor of a file."""

    file: StableFile
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        num_bytes = torch.Size(self.shape).numel() * self.dtype.itemsize
        return self.file.read(self.offset, num_bytes).view(self.dtype).view(self.shape)


class Scheme(ABC):
    """`parts`: what the names of a parameter's tensors end with, the one that is always there first. `suffix`: what its
    own name has in place of that."""

    parts: tuple[str, ...]
    suffix: str

    @abstractmethod
    def shape_of(self, name: str, places: Mapping[str, Place]) -> tuple[int, ...]:
        """The shape of parameter `name`, whose tensors are `places`, by what is behind a dot or underscore in
        `parts`. Raises `Corrupt` if they contradict each other."""

    @abstractmethod
    def stored(
        self, name: str, places: Mapping[str, Place], target_dtype: torch.dtype | None, matrices: PackedMatrices | None
    ) -> Stored:
        """The same parameter. `target_dtype` and `matrices` as of `Plain`. Raises `Corrupt`."""
