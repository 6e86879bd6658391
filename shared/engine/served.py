"""Counts what finished answers of the policy exact took, for comparing versions. Only the engine's thread counts; any
thread may read."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from shared.engine.drafting.pass_costs import PassCosts
from shared.served import MAX_SERVED, MOST_TOKENS, NOTHING, Served, ServedKey

# Answers with fewer tokens after the first pass say little of a version's speed.
LEAST_TOKENS = 8


@dataclass(slots=True)
class Pace:
    """What the decoding steps of one answer took so far: tokens and seconds, and over its steps the sum of how many
    requests shared each."""

    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    num_running: int = 0


class ServedCounts:
    """Counts by ServedKey, for the MAX_SERVED that were used last, and by load. `costs`: of passes, once they are
    known."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.costs: PassCosts | None = None
        self.by_key: OrderedDict[ServedKey, Served] = OrderedDict()
        self.by_load: dict[int, Served] = {}

    def record(
        self, alias: str, version: int, pace: Pace, *, num_passes: int, num_drafted: int, num_executions: int
    ) -> None:
        """Counts an answer that is whole. `num_passes`: of verification, which `num_executions` of decoder layers and
        `num_drafted` drafts went with."""
        if pace.num_tokens < LEAST_TOKENS or pace.seconds <= 0 or num_passes <= 0:
            return
        mean_running = pace.num_running / pace.num_steps
        key = ServedKey(alias, version, (math.ceil(mean_running - 0.5) - 1).bit_length())
        weight = min(pace.num_tokens, MOST_TOKENS)
        full_s = pace.seconds * self._speed_up(pace.num_tokens, num_passes, num_drafted, num_executions, mean_running)
        one = Served(
            1,
            pace.num_tokens,
            num_passes,
            num_drafted,
            pace.seconds,
            full_s,
            weight,
            weight * math.log(pace.seconds / pace.num_tokens),
        )
        self.by_key[key] = self.by_key.get(key, NOTHING).plus(one)
        self.by_load[key.load] = self.by_load.get(key.load, NOTHING).plus(one)
        self.by_key.move_to_end(key)
        while len(self.by_key) > MAX_SERVED:
            self.by_key.popitem(last=False)

    def _speed_up(
        self, num_tokens: int, num_passes: int, num_drafted: int, num_executions: int, num_running: float
    ) -> float:
        """How many times as long full depth would have taken, by the measured costs of passes; 0 if there are none.
        As both sides take their times from the same measurement, a machine that is busy otherwise changes neither. What
        exits take beside their layers is not in it."""
        if self.costs is None:
            return 0.0
        full_s = self.costs.pass_s(num_running)
        drafting_layers = max(num_executions / num_passes - self._num_layers, 0.0)
        drafting_s = full_s * drafting_layers / self._num_layers
        return (
            num_tokens
            / num_passes
            * full_s
            / (self.costs.pass_s(num_running * (1 + num_drafted / num_passes)) + drafting_s)
        )
