"""Files of tokens for tests."""

from collections.abc import Mapping
from pathlib import Path

from shared.pool_names import DEFAULT_POOL
from shared.rpc.callers import Role
from shared.rpc.tokens import new_token

# One caller for each role, and one who may do everything.
CALLERS: Mapping[str, tuple[Role, ...]] = {**{role.value: (role,) for role in Role}, "all": tuple(Role)}


def write_tokens(
    path: Path, callers: Mapping[str, tuple[Role, ...]] = CALLERS, pools: Mapping[str, str] = {}
) -> dict[str, str]:
    """Writes a file of services at `path`. Returns name -> token. `pools`: of callers that have one."""
    made = {name: new_token(name, roles, pools.get(name, DEFAULT_POOL)) for name, roles in callers.items()}
    path.write_text("".join(f"{entry.to_line()}\n" for _, entry in made.values()))
    return {name: token for name, (token, _) in made.items()}


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that shows `token`."""
    return (("authorization", f"Bearer {token}"),)
