"""Counts of where the tokens of one `generate` call left the model."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.engine.request.request import GeneratedToken


@dataclass(frozen=True)
class ExitStats:
    """Counts of all answers of one call. `exits_per_layer` maps a depth, the number of layers that ran before the token
    left, to tokens.

    Under policy exact, a token that left early was a draft that the full model accepted.
    """

    total_tokens: int
    exits_per_layer: Mapping[int, int]

    @classmethod
    def of(cls, tokens: Iterable[GeneratedToken], num_layers: int) -> "ExitStats":
        """Counts `tokens` of a model with `num_layers` layers."""
        depths = Counter(token.exit_depth for token in tokens)
        exits = {depth: depths[depth] for depth in sorted(depths) if depth < num_layers}
        return cls(depths.total(), exits)

    @property
    def total_exited(self) -> int:
        return sum(self.exits_per_layer.values())

    @property
    def remaining_tokens(self) -> int:
        """Tokens that the full model chose."""
        return self.total_tokens - self.total_exited

    @property
    def exit_rate(self) -> float:
        """Share of the tokens that left early, in [0, 1]."""
        return self.total_exited / max(self.total_tokens, 1)

    def summary(self) -> str:
        """A summary of a few lines for people to read."""
        lines = [f"{self.total_tokens} tokens, {self.total_exited} left early ({self.exit_rate:.1%})"]
        lines += [
            f"  after {depth} layers: {count} tokens ({count / self.total_tokens:.1%})"
            for depth, count in self.exits_per_layer.items()
        ]
        return "\n".join([*lines, f"  after all layers: {self.remaining_tokens} tokens"])
