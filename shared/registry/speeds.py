"""Tokens per second of the versions behind an alias over time, as workers have reported them: for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import Corrupt
from shared.registry.names import speeds_note
from shared.registry.registry import Registry
from shared.served import Served

# Time is cut into parts of FIRST_S, which become twice as long, up to LAST_S, whenever there are too many of them.
FIRST_S, LAST_S = 60, 60 << 11
MAX_POINTS = 500


@dataclass
class Speeds:
    """`sums`: the tokens of a part of time and a version, and the seconds they took. A part is numbered from 1970."""

    part_s: int = FIRST_S
    sums: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def observe(self, version: int, served: Served, at_s: float) -> None:
        """Counts what was served of a version until `at_s` (Unix seconds)."""
        self._add(int(at_s // self.part_s), version, served.num_tokens, served.seconds)
        while len(self.sums) > MAX_POINTS and self.part_s < LAST_S:
            before, self.sums, self.part_s = self.sums, {}, 2 * self.part_s
            for (part, earlier), sums in before.items():
                self._add(part // 2, earlier, *sums)
        while len(self.sums) > MAX_POINTS:
            del self.sums[min(self.sums)]

    def _add(self, part: int, version: int, tokens: float, seconds: float) -> None:
        before = self.sums.get((part, version), (0.0, 0.0))
        self.sums[part, version] = before[0] + tokens, before[1] + seconds

    def points(self) -> Iterator[tuple[int, float, float]]:
        """Yields version, Unix seconds and tokens per second of an answer, in the order of time."""
        for (part, version), (tokens, seconds) in sorted(self.sums.items()):
            if seconds > 0:
                yield version, (part + 0.5) * self.part_s, tokens / seconds

    def keep(self, registry: Registry, model_id: str, alias: str) -> None:
        """Raises what `Registry.keep_note` raises."""
        sums = [[*place, *sums] for place, sums in self.sums.items()]
        registry.keep_note(speeds_note(model_id, alias), {"part_s": self.part_s, "sums": sums})


def kept_speeds(registry: Registry, model_id: str, alias: str) -> Speeds:
    """What `keep` kept; nothing where that is damaged or of another build. Raises Unavailable."""
    try:
        record: Mapping[str, Any] = registry.note(speeds_note(model_id, alias)) or {"part_s": FIRST_S, "sums": ()}
        sums = {(int(part), int(version)): (float(n), float(took)) for part, version, n, took in record["sums"]}
        return Speeds(max(int(record["part_s"]), FIRST_S), sums)
    except (Corrupt, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return Speeds()
