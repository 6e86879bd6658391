"""Runs trials and prints what they showed as a table."""

from collections.abc import Callable, Iterable

from shared.errors import NeapError


def run_trials(trials: Iterable[tuple[str, Callable[[], str]]]) -> int:
    """Runs each (name, trial), which returns what was seen. Returns the exit status: 1 if a trial raised AssertionError or NeapError."""
    status = 0
    print("| trial | outcome |\n|---|---|", flush=True)
    for name, trial in trials:
        try:
            outcome = trial()
        except (AssertionError, NeapError) as error:
            status, outcome = 1, f"**{type(error).__name__}: {error}**"
        print(f"| {name} | {outcome} |", flush=True)
    return status
