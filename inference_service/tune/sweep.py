"""Measures what each depth policy does to answers and to speed, on prompts of one's own."""

from collections.abc import Iterator, Sequence

from inference_service.engine.engine import Engine
from inference_service.tune.results import Measurement
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk

# Tokens of the answers that are generated before measuring begins, one per policy.
WARM_UP_TOKENS = 8


def policies(thresholds: Sequence[float]) -> list[DepthPolicy]:
    """full, exact, and relaxed at each threshold, the highest first. Raises `InvalidInput`."""
    relaxed = [DepthPolicy("relaxed", threshold=t) for t in sorted(set(thresholds), reverse=True)]
    return [DepthPolicy("full"), DepthPolicy("exact"), *relaxed]


class Sweep:
    """Greedy answers of at most `max_tokens` tokens, one request at a time. `risk`: the bounds that the router publishes, if any."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        settings: Sequence[DepthPolicy],
        *,
        max_tokens: int,
        risk: PublishedRisk | None,
    ) -> None:
        self._engine, self._prompts, self._settings = engine, prompts, settings
        self._max_tokens, self._risk = max_tokens, risk

    @property
    def num_measurements(self) -> int:
        return len(self._prompts) * len(self._settings)

    def measurements(self, done: set[tuple[int, str, float | None]]) -> Iterator[Measurement]:
        """Measures what is not in `done`. All policies take turns on a prompt, so that what disturbs the machine meets all of them."""
        left = [
            (number, policy)
            for number in range(len(self._prompts))
            for policy in self._settings
            if (number, policy.name, threshold_of(policy)) not in done
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
        threshold = threshold_of(policy)
        return Measurement(
            number,
            policy.name,
            threshold,
            self._risk.epsilon_at(threshold) if self._risk and threshold else None,
            answer.token_ids,
            answer.finished.decode_s,
            answer.stats.num_deep_passes,
        )


def threshold_of(policy: DepthPolicy) -> float | None:
    """The threshold of a relaxed policy; the others have none."""
    return policy.threshold if policy.name == "relaxed" else None
