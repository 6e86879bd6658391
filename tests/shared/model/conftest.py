"""The runners' tests see each position that a pass reads without having written it."""

from tests.unwritten_caches import unwritten_positions_are_nan

__all__ = ["unwritten_positions_are_nan"]
