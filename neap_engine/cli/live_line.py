"""The live line of `neap up`: what the worker has done, and how many times as fast as full depth its answers are.

Both sides of that are measured. Workers count what answers of `exact` take; after such answers, while nothing runs, the
line asks for a few tokens at full depth itself, of the least priority and for at most SHARE of the time. What the costs
of passes say of full depth is not shown: they are wrong where the machine was busy as they were measured.
"""

import statistics
import time
import urllib.request
from collections import deque
from contextlib import suppress

from neap_client import NeapClient, generate_request
from prometheus_client.parser import text_string_to_metric_families

from neap_engine.cli.generate import seconds
from shared.errors import NeapError

METRICS = {
    "neap_generation_tokens_total": "tokens",
    "neap_request_success_total": "answers",
    "neap_layer_executions_total": "executions",
    "neap_layer_executions_saved_total": "saved",
    "neap_layer_executions_extra_total": "extra",
    "neap_num_requests_running": "running",
    "neap_num_requests_waiting": "waiting",
    "neap_exact_tokens_total": "exact_tokens",
    "neap_exact_seconds_total": "exact_s",
}
# Answers beside others are no part of the comparison: full depth is asked alone.
ALONE = {"neap_exact_tokens_total", "neap_exact_seconds_total"}
SCRAPE_TIMEOUT_S = 1.0
SHARE, LEAST_INTERVAL_S = 0.02, 10.0
PROBE = "The tide comes in, and the tide goes out."
PROBE_TOKENS = 13  # the first comes of the prompt
# Tokens of `exact` that are compared with a probe, all of the last seconds.
LEAST_TOKENS, WINDOW_S = 64, 30.0
# What is shown is the median of the last comparisons, of so many at least.
NUM_RATIOS, LEAST_RATIOS = 5, 3


class Comparison:
    """How many times as fast as full depth answers of `exact` are, by comparisons within WINDOW_S."""

    def __init__(self, client: NeapClient, model_id: str) -> None:
        self._client, self._model_id = client, model_id
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self._marks: deque[tuple[float, float, float]] = deque()  # when, tokens, seconds
        # Seconds per token of `exact`, of full depth, and the worker's tokens after the probe if no other came between.
        self._probed: tuple[float, float, float] | None = None
        self._next_s = 0.0
        self.num_tokens = self.num_answers = 0  # of probes

    def begin_again(self) -> None:
        """Another router serves."""
        self._ratios.clear()
        self._marks.clear()
        self._probed = None

    def look(self, sums: dict[str, float]) -> None:
        """Takes what the worker's metrics say now, and asks for full depth where that is due."""
        now_s = time.monotonic()
        if self._probed is not None:
            exact_s, full_s, num_tokens = self._probed
            if sums["tokens"] == num_tokens:  # nothing ran beside it
                self._ratios.append(full_s / exact_s)
            self._probed = None
        self._marks.append((now_s, sums["exact_tokens"], sums["exact_s"]))
        while self._marks[0][0] < now_s - WINDOW_S:
            self._marks.popleft()
        num_tokens, exact_s = (sums[name] - self._marks[0][n] for n, name in ((1, "exact_tokens"), (2, "exact_s")))
        is_idle = not sums["running"] and not sums["waiting"]
        if num_tokens >= LEAST_TOKENS and is_idle and now_s >= self._next_s:
            with suppress(NeapError):  # a worker that does not answer is said elsewhere
                self._probe(exact_s / num_tokens, sums["tokens"])
            self._next_s = time.monotonic() + max(LEAST_INTERVAL_S, (time.monotonic() - now_s) / SHARE)
            self._marks.clear()

    def _probe(self, exact_s: float, num_tokens: float) -> None:
        request = generate_request(
            self._model_id,
            PROBE,
            raw=True,
            policy="full",
            max_tokens=PROBE_TOKENS,
            ignore_eos=True,
            temperature=0.0,
            priority=100,
            learn="never",
        )
        answer = self._client.answer(request)
        self.num_answers += 1
        self.num_tokens += len(answer.token_ids)
        full_s = seconds(answer.finished.timing.decode) / max(len(answer.token_ids) - 1, 1)
        self._probed = exact_s, full_s, num_tokens + len(answer.token_ids)

    def text(self) -> str:
        return f", exact {statistics.median(self._ratios):.2f}x full" if len(self._ratios) >= LEAST_RATIOS else ""


class View:
    """Sums up what a worker has done, from its metrics at an address, without what `comparison` has asked for."""

    def __init__(self, address: str, comparison: Comparison) -> None:
        self._address, self._comparison = address, comparison
        self._before = (time.monotonic(), 0.0)
        self._rate = 0.0

    def begin_again(self) -> None:
        """Another router may serve."""
        self._comparison.begin_again()

    def line(self) -> str:
        try:
            with urllib.request.urlopen(f"http://{self._address}/metrics", timeout=SCRAPE_TIMEOUT_S) as reply:
                sums = summed(reply.read().decode())
        except OSError:
            return "the worker does not answer"
        num_answers, num_tokens = (
            sums["answers"] - self._comparison.num_answers,
            sums["tokens"] - self._comparison.num_tokens,
        )
        (then_s, before), now_s = self._before, time.monotonic()
        self._before = now_s, num_tokens
        if num_tokens > before:
            self._rate = (num_tokens - before) / (now_s - then_s)
        self._comparison.look(sums)
        line = f"{num_answers:,.0f} answers, {num_tokens:,.0f} tokens"
        if sums["running"] or sums["waiting"]:
            line += f", {sums['running']:.0f} running, {sums['waiting']:.0f} waiting"
        if self._rate:
            line += f", {self._rate:,.0f} tokens/s"
        if sums["executions"]:
            full = sums["executions"] + sums["saved"] - sums["extra"]
            line += f", {full / sums['executions']:.2f} tokens a pass"
        return line + self._comparison.text()


def summed(exposition: str) -> dict[str, float]:
    """The METRICS of all models."""
    sums = dict.fromkeys(METRICS.values(), 0.0)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in METRICS and (sample.name not in ALONE or sample.labels["load"] == "0"):
                sums[METRICS[sample.name]] += sample.value
    return sums
