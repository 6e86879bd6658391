"""Tensors of several objects in one file, told apart by the prefixes of their names."""

from torch import Tensor


def take_part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Removes the tensors whose names begin with `prefix` and a dot, and returns them by the rest of their names."""
    names = [name for name in tensors if name.startswith(f"{prefix}.")]
    return {name.removeprefix(f"{prefix}."): tensors.pop(name) for name in names}
