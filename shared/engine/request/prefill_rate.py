"""How fast prompts are read, as a lower bound of the time that a prompt takes."""

# A pass beside which nothing else happens may be so much faster than the fastest pass so far.
SHARE_OF_FASTEST = 0.5
# So often a request goes on whose deadline seems too short.
# A figure from a busy moment would otherwise refuse it for ever.
TRIAL_INTERVAL_S = 60.0


class PrefillRate:
    """Learns from passes. The engine's thread records them, and any thread may ask."""

    def __init__(self) -> None:
        self._token_s = float("inf")
        self._tried_s: float | None = None

    def record(self, num_tokens: int, seconds: float) -> None:
        """A pass with so many tokens of prompts took so long.
        The fastest counts: a slow one may tell of a busy machine."""
        if num_tokens:
            self._token_s = min(self._token_s, seconds / num_tokens)

    def least_s(self, num_tokens: int) -> float:
        """A lower bound of the time to read so many tokens; 0 before a pass has been recorded."""
        if self._token_s == float("inf"):
            return 0.0
        return SHARE_OF_FASTEST * self._token_s * num_tokens

    def may_refuse(self, now_s: float) -> bool:
        """Whether a request may be refused whose time is below the bound. False once per TRIAL_INTERVAL_S: its passes
        are the next to be recorded."""
        if self._tried_s is not None and now_s - self._tried_s >= TRIAL_INTERVAL_S:
            self._tried_s = now_s
            return False
        self._tried_s = now_s if self._tried_s is None else self._tried_s
        return True
