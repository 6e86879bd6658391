"""Starts of chains for exits that are asked without an engine."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from shared.ops.chains import ChainStart


def begun(begins: Iterable[Tensor], starts: Sequence[ChainStart]) -> list[ChainStart]:
    """The starts with what each chain goes on from."""
    return [start._replace(begin=begin) for begin, start in zip(begins, starts, strict=True)]
