"""From answers to figures, and from figures to the table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.peers.engines.serving import Answer

# Shorter answers are not timed.
MIN_TOKENS = 8
# Rounds, in each of them calls, in each of them answers.
Rounds = Sequence[Sequence[Sequence[Answer]]]


@dataclass(frozen=True)
class Figures:
    """What one contender did.

    `one`: tokens per second of one request while decoding. `several`: of several requests at once, from the call to the last token of
    all. `several_decoding`: the same while all of them are decoding. `same`, `compared`: answers that equal the reference, of how many.
    `ready_s`, `resident_bytes`: of its worker, which two contenders may share. NaN: not measured.
    """

    one: float
    several: float
    several_decoding: float
    same: int
    compared: int
    ready_s: float
    resident_bytes: int


@dataclass(frozen=True)
class Row:
    """`base`: the names of the rows of our full and exact that it is compared with, where they were measured."""

    engine: str
    weights: str
    figures: Figures
    base: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"


def decoding_rate(calls: Sequence[Sequence[Answer]]) -> float:
    """Tokens per second over all calls of one prompt each, from each first token to each last. NaN if no answer has MIN_TOKENS tokens."""
    answers = [answer for (answer,) in calls if len(answer.token_ids) >= MIN_TOKENS]
    seconds = sum(answer.times_s[-1] - answer.times_s[0] for answer in answers)
    # Tokens that came together with the first are not counted either: their time is not.
    tokens = sum(at > answer.times_s[0] for answer in answers for at in answer.times_s)
    return tokens / seconds if seconds else float("nan")


def batch_rate(calls: Sequence[Sequence[Answer]]) -> float:
    """Tokens per second over all calls of several prompts each, prompts included: from the call to the last token of all answers."""
    tokens = sum(len(answer.token_ids) for answers in calls for answer in answers)
    seconds = sum(max(at for answer in answers for at in answer.times_s) for answers in calls)
    return tokens / seconds if seconds else float("nan")


def batch_decoding_rate(calls: Sequence[Sequence[Answer]]) -> float:
    """Tokens per second while all requests of a call are decoding: from the latest first token to the earliest last token."""
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


def num_same(
    calls: Sequence[Sequence[Answer]], reference: Sequence[Answer], end_ids: Sequence[int]
) -> int:
    """How many calls of one prompt each were answered with the reference's tokens."""
    return sum(
        without_end(answer.token_ids, end_ids) == without_end(expected.token_ids, end_ids)
        for (answer,), expected in zip(calls, reference, strict=True)
    )


def figures(
    single: Rounds,
    several: Rounds,
    reference: Sequence[Answer],
    end_ids: Sequence[int],
    ready_s: float,
    resident_bytes: int,
) -> Figures:
    """Medians over rounds. Answers of all rounds are compared with `reference`, one answer per prompt."""
    return Figures(
        one=_median([decoding_rate(calls) for calls in single]),
        several=_median([batch_rate(calls) for calls in several]),
        several_decoding=_median([batch_decoding_rate(calls) for calls in several]),
        same=sum(num_same(calls, reference, end_ids) for calls in single),
        compared=sum(len(calls) for calls in single),
        ready_s=ready_s,
        resident_bytes=resident_bytes,
    )


def table(rows: Sequence[Row], batch: int) -> list[str]:
    """Lines of a Markdown table. Ratios above 1 say that ours is faster. "-" where ours was not measured with these weights."""
    known: Mapping[str, Figures] = {row.name: row.figures for row in rows}
    head = [
        "engine",
        "weights",
        "one request, decoding",
        f"{batch} at once",
        f"{batch} at once, decoding",
        "same tokens as HF float32",
        "ready, s",
        "RSS, GB",
    ]
    head += [f"{ours} / it, {what}" for what in ("one", str(batch)) for ours in ("full", "exact")]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        mine = row.figures
        cells = [row.engine, row.weights, *map(_number, (mine.one, mine.several))]
        cells += [_number(mine.several_decoding), f"{mine.same} of {mine.compared}"]
        cells += [_number(mine.ready_s), f"{mine.resident_bytes / 1e9:.2f}"]
        ours = [known.get(name) for name in row.base]
        cells += [_ratio(our.one, mine.one) if our else "-" for our in ours]
        cells += [_ratio(our.several, mine.several) if our else "-" for our in ours]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if ours / theirs == ours / theirs else "-"
