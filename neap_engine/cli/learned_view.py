"""Says in words what a calibration learned from, and how often its proposers were right on text that it had not learned
from."""

from collections.abc import Iterator, Mapping
from typing import Any

from neap_engine.cli.console import print_line
from neap_engine.cli.job_progress import LEAST_POSITIONS_SHOWN, proposer_in_words, shown_share

# The situations for which a manifest has figures of joint probabilities.
SITUATIONS = {
    "tables_unsure": "where tables are unsure",
    "agree": "where tables and exits agree",
    "differ": "where they differ",
}


def print_learned(manifest: Mapping[str, Any]) -> None:
    """Print `learned_lines`, indented."""
    for line in learned_lines(manifest):
        print_line(f"  {line}")


def learned_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a manifest says about a router's text and figures, and which exits it does without; nothing where it
    does not say it, or in another form."""
    calibration = as_mapping(manifest.get("calibration"))
    tokens = as_mapping(calibration.get("tokens"))
    total, measured = tokens.get("total"), tokens.get("report")
    if isinstance(total, int) and isinstance(measured, int):
        yield f"learned from {total - measured:,} tokens"
        shares = [
            f"{proposer_in_words(name)} {shown_share(agreement, measured)}"
            for name, agreement in _agreements(manifest.get("proposers"))
        ]
        if shares:
            yield f"guessed right, of {measured:,} tokens that it did not learn from: {', '.join(shares)}"
    speed = as_mapping(calibration.get("speed"))
    median, low, high, per_pass = map(speed.get, ("speed_up", "low", "high", "tokens_per_pass"))
    if all(isinstance(figure, float) for figure in (median, low, high, per_pass)):
        yield (
            f"answers {median:.2f} times as fast as full depth on the machine that calibrated it: the median of "
            f"{speed.get('num_answers')} held-out prompts, half of them {low:.2f} to {high:.2f}, {per_pass:.2f} tokens "
            "per pass"
        )
    if briers := list(_briers(as_mapping(calibration.get("joint")))):
        what = "Brier score of how sure it is of a guess, 0 is best (in brackets: of one proposer alone)"
        yield f"{what}: {', '.join(briers)}"
    for name, why in as_mapping(calibration.get("left_out")).items():
        yield f"without {name}: {why}"


def _briers(joint: Mapping[str, Any]) -> Iterator[str]:
    for situation, words in SITUATIONS.items():
        figures = as_mapping(joint.get(situation))
        joint_brier, alone, count = map(figures.get, ("brier", "brier_alone", "positions"))
        if not isinstance(count, int):
            continue
        if count < LEAST_POSITIONS_SHOWN:
            yield f"{words} not known (only {count} positions)"
        elif isinstance(joint_brier, float) and isinstance(alone, float):
            yield f"{words} {joint_brier:.3f} ({alone:.3f})"


def _agreements(proposers: Any) -> Iterator[tuple[str, float]]:
    for proposer in proposers if isinstance(proposers, list) else ():
        agreement = as_mapping(as_mapping(proposer).get("figures")).get("agreement")
        if isinstance(agreement, float):
            yield str(proposer.get("name")), agreement


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a part of a manifest; an empty one where it has another form."""
    return value if isinstance(value, Mapping) else {}
