"""Names of pools. A pool is those callers who share a router, cached prefixes and what is learned from answers."""

import re

from shared.errors import InvalidInput

# The pool of those who name none. Its router is the model's own: `latest`, where another pool's is `latest@POOL`.
DEFAULT_POOL = "default"
# In a token's entry: each request says of which pool it is.
ANY_POOL = "*"
POOL_PATTERN = r"[a-z0-9][a-z0-9_-]{0,31}"


def check_pool(pool: str) -> str:
    """Check the name of a pool, which is a part of aliases and paths. Raises InvalidInput (BAD_POOL)."""
    if not re.fullmatch(POOL_PATTERN, pool):
        raise InvalidInput(
            f"pool {pool[:40]!r} is not valid: it must have 1 to 32 lower-case letters, digits, '-' and '_', and begin "
            "with a letter or digit",
            reason="BAD_POOL",
        )
    return pool
