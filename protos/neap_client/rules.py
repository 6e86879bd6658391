"""What the protos say of a field: the class of `neap_client.fields`, which is made from them."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Field:
    """One field of a message. `kind`: its type in the proto, such as "double"; of a map, that of its values. `help`:
    the first paragraph of its comment. The others are those of neap.options.v1.Rule; None: there is no such limit. A
    number that is above another one has a largest one, too."""

    name: str
    kind: str
    help: str
    is_optional: bool = False
    is_list: bool = False
    is_map: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    off: float | None = None
    most_items: int | None = None
    in_generation_config: bool = False

    @property
    def python_type(self) -> type[Any]:
        """The type of its numbers or texts."""
        return {"double": float, "bool": bool, "string": str}.get(self.kind, int)

    @property
    def limits(self) -> str:
        """Which numbers are allowed, such as "in (0, 1]" or "at least 0"; empty if all are."""
        if self.most is not None:
            below = self.above if self.least is None else self.least
            return f"in {'(' if self.least is None else '['}{below:g}, {self.most:g}]"
        if self.least is None:
            return ""
        return f"{'finite and ' if self.kind == 'double' else ''}at least {self.least:g}"

    @property
    def described(self) -> str:
        """Its help, its limits and what switches it off."""
        parts = [self.help]
        if self.limits:
            parts.append(f"{self.limits[0].upper()}{self.limits[1:]}.")
        if self.most_items is not None:
            parts.append(f"At most {self.most_items:,}.")
        if self.off is not None:
            parts.append(f"Off: {self.off:g}.")
        return " ".join(parts)

    def refusal(self, value: Any) -> str | None:
        """Why `value`, of the field's type, is refused. None: it is not."""
        if self.most_items is not None and isinstance(value, Collection) and len(value) > self.most_items:
            return f"{len(value)} {self.name}; at most {self.most_items} are allowed"
        if isinstance(value, Mapping):
            named = ((f"{self.name} of token {key}", number) for key, number in value.items())
            return next(filter(None, (self._of_number(name, number) for name, number in named)), None)
        return self._of_number(self.name, value) if isinstance(value, int | float) else None

    def _of_number(self, name: str, number: float) -> str | None:
        if number == self.off or self._allows(number):
            return None
        off = "" if self.off is None or self._allows(self.off) else f"{self.off:g}, for off, or "
        return f"{name} is {number}; it must be {off}{self.limits or 'finite'}"

    def _allows(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
        )
