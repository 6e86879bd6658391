"""Sums up tokens, time and layer executions per policy."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from neap_client.inference.v1 import inference_pb2 as pb
from rich.table import Table

from neap_engine.cli.generate import seconds

PROMPTS: dict[str, str] = {
    "translation": (
        "Translate into French, then repeat the English sentence: 'The boat leaves the harbour when the tide turns, "
        "and the boat comes back when the tide turns again.'"
    ),
    "summary": (
        "Summarise in two sentences: Neap tides happen twice a month, when the sun and the moon pull at right angles. "
        "The sun then cancels part of the moon's pull, so high water is lower and low water is higher than on other "
        "days. Sailors plan around neap tides because the currents are weaker, and harbours with a shallow entrance "
        "may be closed to large ships until the tides grow again."
    ),
    "question": "Why does the sea taste of salt while most rivers do not?",
    "maths": (
        "A ferry carries 48 cars on each trip and makes 6 trips a day. How many cars does it carry in 5 days? Work it "
        "out step by step."
    ),
}


@dataclass
class PolicyFigures:
    """Sums over all prompts of one side of a comparison. Times are in seconds."""

    name: str
    num_tokens: int = 0
    decode_s: float = 0.0
    num_layer_executions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed. Excludes the prefill and the token it yields, which are the same under every policy."""
        return (self.num_tokens - len(self.outputs)) / self.decode_s if self.decode_s else 0.0

    def speed_up(self, baseline: "PolicyFigures") -> float:
        return self.tokens_per_s / baseline.tokens_per_s if baseline.tokens_per_s else 0.0

    @property
    def layers_per_token(self) -> float:
        return self.num_layer_executions / max(self.num_tokens, 1)

    def add(self, name: str, tokens: Sequence[int], finished: pb.Finished) -> None:
        """Add the figures of one generation."""
        self.num_tokens += finished.usage.num_completion_tokens
        self.decode_s += seconds(finished.timing.decode)
        self.num_layer_executions += finished.depth.num_layer_executions
        self.num_drafted += finished.depth.num_drafted
        self.num_accepted += finished.depth.num_accepted
        self.outputs[name] = tuple(tokens)


def policy_table(figures: Sequence[PolicyFigures]) -> Table:
    """Format the figures as a table. The first entry is the baseline for speed and outputs."""
    table = Table("policy", "tokens/s", "layer executions\nper token", "accepted /\ndrafted", "identical\noutput")
    baseline = figures[0]
    for entry in figures:
        identical = "yes" if entry.outputs == baseline.outputs else "no"
        speed_up = entry.speed_up(baseline)
        table.add_row(
            entry.name,
            f"{entry.tokens_per_s:.1f}" + ("" if entry is baseline else f" ({speed_up:.2f}x)"),
            f"{entry.layers_per_token:.1f}",
            f"{entry.num_accepted}/{entry.num_drafted}",
            "baseline" if entry is baseline else identical,
        )
    return table
