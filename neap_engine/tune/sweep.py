"""Measures what each depth policy does to answers and to speed, on prompts of one's own."""

from collections.abc import Iterator, Mapping, Sequence

from neap_engine.tune.results import Key, Measurement
from shared.engine.engine import Engine
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk, Setting

# Tokens of the answers that are generated before measuring begins, one per policy.
WARM_UP_TOKENS = 8


def policies(thresholds: Sequence[float], margins: Sequence[float] = ()) -> list[DepthPolicy]:
    """full, exact, and relaxed at each threshold and at each margin, the safest first. Raises `InvalidInput`."""
    relaxed = [DepthPolicy("relaxed", threshold=t) for t in sorted(set(thresholds), reverse=True)]
    relaxed += [DepthPolicy("relaxed", margin=m) for m in sorted(set(margins))]
    return [DepthPolicy("full"), DepthPolicy("exact"), *relaxed]


def covered_tokens(bounds: Mapping[Setting, PublishedRisk]) -> int | None:
    """The number of first tokens of an answer that all bounds cover; None if they cover whole answers."""
    limits = [risk.num_tokens for risk in bounds.values() if risk.num_tokens is not None]
    return min(limits, default=None)


class Sweep:
    """Greedy answers of at most `max_tokens` tokens, one request at a time. `bounds`: those of the router that hold
    for this engine."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        settings: Sequence[DepthPolicy],
        *,
        max_tokens: int,
        bounds: Mapping[Setting, PublishedRisk],
    ) -> None:
        self._engine, self._prompts, self._settings = engine, prompts, settings
        self._max_tokens, self._bounds = max_tokens, bounds

    @property
    def num_measurements(self) -> int:
        return len(self._prompts) * len(self._settings)

    def measurements(self, done: set[Key]) -> Iterator[Measurement]:
        """Measures what is not in `done`. All policies take turns on a prompt, so that what disturbs the machine meets
        all of them."""
        left = [
            (number, policy)
            for number in range(len(self._prompts))
            for policy in self._settings
            if (number, policy.name, *values_of(policy)) not in done
        ]
        for policy in self._settings if left else ():
            self._engine.generate(self._prompts[0], policy=policy, max_tokens=WARM_UP_TOKENS)
        for number, policy in left:
            yield self._measure(number, policy)

    def _measure(self, number: int, policy: DepthPolicy) -> Measurement:
        prompt = self._prompts[number]
        room = self._engine.loaded.context_length - len(prompt)
        answer = self._engine.generate(
            prompt, policy=policy, max_tokens=min(self._max_tokens, room)
        )
        threshold, margin = values_of(policy)
        return Measurement(
            number,
            policy.name,
            threshold,
            margin,
            self._bound(policy),
            answer.token_ids,
            answer.finished.decode_s,
            answer.stats.num_verify_passes,
        )

    def _bound(self, policy: DepthPolicy) -> float | None:
        threshold, margin = values_of(policy)
        value = threshold if margin is None else margin
        risk = self._bounds.get(policy.setting)
        return risk.epsilon_at(value) if risk is not None and value is not None else None


def values_of(policy: DepthPolicy) -> tuple[float | None, float | None]:
    """The threshold and the margin of a policy. Relaxed has one of them, other policies have neither."""
    if policy.name != "relaxed":
        return None, None
    return (policy.threshold, None) if policy.margin is None else (None, policy.margin)
