"""What operators want of the judge, as a note of the registry, so that any calibrator can take it: aliases that are to
stay as they are, and versions that are not to be tried."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import Exhausted, InvalidInput
from shared.registry.names import check_alias, check_model_id
from shared.registry.registry import Registry

_NOTE = "judge-orders"
MAX_ORDERS = 4096
ACTIONS = ("hold", "release", "forbid", "allow")


@dataclass(frozen=True)
class Order:
    """`hold` and `release` are for an alias, `forbid` and `allow` for a version. Raises InvalidInput (BAD_ORDER)."""

    model_id: str
    action: str
    alias: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        check_model_id(self.model_id)
        if self.action not in ACTIONS:
            raise InvalidInput(f"the judge takes {', '.join(ACTIONS)}", reason="BAD_ORDER")
        if self.action in ("hold", "release"):
            check_alias(self.alias)
        elif not 1 <= self.version < 2**53:
            raise InvalidInput(f"version is {self.version}; versions start at 1", reason="BAD_ORDER")


class Orders:
    """The orders as they were when `read` was called."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._held: set[tuple[str, str]] = set()
        self._forbidden: set[tuple[str, int]] = set()

    def read(self) -> "Orders":
        """Return the orders as they stand now. Raises Corrupt, Unavailable."""
        orders = Orders(self._registry)
        record: Mapping[str, Any] = self._registry.note(_NOTE) or {}
        orders._held = {(str(model), str(alias)) for model, alias in record.get("held", ())}
        orders._forbidden = {(str(model), int(version)) for model, version in record.get("forbidden", ())}
        return orders

    def holds(self, place: tuple[str, str]) -> bool:
        return place in self._held

    def forbidden(self, model_id: str) -> set[int]:
        return {version for model, version in self._forbidden if model == model_id}

    def give(self, order: Order) -> None:
        """Record an order. One of two that are given at once may be lost: look with `read`. Raises Exhausted
        (TOO_MANY_ORDERS)."""
        now = self.read()
        alias, version = (order.model_id, order.alias), (order.model_id, order.version)
        if order.action == "hold":
            now._held.add(alias)
        elif order.action == "release":
            now._held.discard(alias)
        elif order.action == "forbid":
            now._forbidden.add(version)
        else:
            now._forbidden.discard(version)
        if len(now._held) + len(now._forbidden) > MAX_ORDERS:
            raise Exhausted(f"the judge keeps at most {MAX_ORDERS} orders", reason="TOO_MANY_ORDERS")
        self._registry.keep_note(
            _NOTE, {"held": sorted(map(list, now._held)), "forbidden": sorted(map(list, now._forbidden))}
        )
