"""The blobs of a published router, by name. Free of torch."""

from collections.abc import Iterable

# What workers load.
LADDER_BLOB = "ladder.safetensors"
# The sums that the ladder was solved from, for calibrations that go on from it. A router may lack it.
STATISTICS_BLOB = "statistics.safetensors"


def served_blobs(names: Iterable[str]) -> list[str]:
    """The blobs that a worker needs to serve the router: all but the statistics."""
    return [name for name in names if name != STATISTICS_BLOB]
