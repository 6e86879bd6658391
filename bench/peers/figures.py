"""From answers to figures, and from figures to the table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.peers.engines.serving import Answer
from bench.table import head
from bench.table import row as print_row

# Shorter answers are not timed.
MIN_TOKENS = 8
# Rounds, in each of them calls, in each of them answers.
Rounds = Sequence[Sequence[Sequence[Answer]]]


@dataclass(frozen=True)
class Row:
    """What one contender did.

    `base`: the names of the rows of our full and exact that it is compared with, where they were measured. `one`:
    tokens per second of one request while decoding. `several`: of several requests at once, from the call to the last
    token of all. `several_decoding`: the same while all of them are decoding. `same`, `compared`: answers that equal
    the reference, of how many. `ready_s`, `resident_bytes`: of its worker, which two contenders may share. NaN: not
    measured.
    """

    engine: str
    weights: str
    base: tuple[str, ...]
    one: float
    several: float
    several_decoding: float
    same: int
    compared: int
    ready_s: float
    resident_bytes: int

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"


def decoding_rate(calls: Sequence[Sequence[Answer]]) -> float:
    """Tokens per second over all calls of one prompt each, from each first token to each last. NaN if no answer has
    MIN_TOKENS tokens."""
    answers = [answer for (answer,) in calls if len(answer.token_ids) >= MIN_TOKENS]
    seconds = sum(answer.times_s[-1] - answer.times_s[0] for answer in answers)
    # Tokens that came together with the first are not counted either: their time is not.
    tokens = sum(at > answer.times_s[0] for answer in answers for at in answer.times_s)
    return tokens / seconds if seconds else float("nan")


def batch_rate(calls: Sequence[Sequence[Answer]]) -> float:
    """Tokens per second over all calls of several prompts each, prompts included: from the call to the last token of
    all answers."""
    tokens = sum(len(answer.token_ids) for answers in calls for answer in answers)
    seconds = sum(max(at for answer in answers for at in answer.times_s) for answers in calls)
    return tokens / seconds if seconds else float("nan")


def batch_decoding_rate(calls: Sequence[Sequence[Answer]]) -> float:
    """Tokens per second while all requests of a call are decoding: from the latest first token to the earliest last
    token."""
    tokens, seconds = 0, 0.0
    for answers in calls:
        if not all(answer.times_s for answer in answers):
            continue
        begin_s = max(answer.times_s[0] for answer in answers)
        end_s = min(answer.times_s[-1] for answer in answers)
        if end_s > begin_s:
            seconds += end_s - begin_s
            tokens += sum(begin_s < at <= end_s for answer in answers for at in answer.times_s)
    return tokens / seconds if seconds else float("nan")


def without_end(token_ids: Sequence[int], end_ids: Sequence[int]) -> list[int]:
    """The tokens up to the first end-of-sequence token, which some engines return and others do not."""
    ends = [index for index, token_id in enumerate(token_ids) if token_id in end_ids]
    return list(token_ids[: ends[0]] if ends else token_ids)


def num_same(calls: Sequence[Sequence[Answer]], reference: Sequence[Answer], end_ids: Sequence[int]) -> int:
    """How many calls of one prompt each were answered with the reference's tokens."""
    return sum(
        without_end(answer.token_ids, end_ids) == without_end(expected.token_ids, end_ids)
        for (answer,), expected in zip(calls, reference, strict=True)
    )


def rates(single: Rounds, several: Rounds) -> tuple[float, float, float]:
    """`one`, `several` and `several_decoding` of a row: medians over rounds."""
    found = (map(decoding_rate, single), map(batch_rate, several), map(batch_decoding_rate, several))  # fmt: skip
    one, whole, decoding = (statistics.median([*own] or [float("nan")]) for own in found)
    return one, whole, decoding


def print_table(rows: Sequence[Row], batch: int, reference: str) -> None:
    """Ratios above 1 say that ours is faster. "-" where ours was not measured with these weights.
    `reference`: the name of the row whose answers all are compared with."""
    known = {row.name: row for row in rows}
    ratios = [f"{ours} / it, {what}" for what in ("one", batch) for ours in ("full", "exact")]
    head("engine", "weights", "one request, decoding", f"{batch} at once", f"{batch} at once, decoding",
         f"same tokens as {reference}", "ready, s", "RSS, GB", *ratios)  # fmt: skip
    for row in rows:
        rates_of_row = map(_number, (row.one, row.several, row.several_decoding))
        cells = [row.engine, row.weights, *rates_of_row, f"{row.same} of {row.compared}"]
        cells += [_number(row.ready_s), f"{row.resident_bytes / 1e9:.2f}"]
        ours = [known.get(name) for name in row.base]
        cells += [_ratio(our.one, row.one) if our else "-" for our in ours]
        cells += [_ratio(our.several, row.several) if our else "-" for our in ours]
        print_row(*cells)


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if ours / theirs == ours / theirs else "-"
