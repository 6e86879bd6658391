"""Steps of requests that live on the device, launched one ahead: while the device runs a step, the host handles the
results of the one before.

A step is three replays and two copies, whatever the number of requests: drafts, the pass, and what is accepted; what
the host says, and what it reads. A request whose answer ended in a step that the host has not seen yet is padding in
the next one. What the host ends itself, by a stop string or a cancellation, costs the next step's share.
"""

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from shared.engine.ahead.graphs import StepGraphs
from shared.engine.ahead.slots import Arrived, RowOfStep
from shared.engine.ahead.worth import Worth
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.speculation import Speculation
from shared.engine.failure import attempt, fail_all, non_finite_logits
from shared.engine.request.admission import PrefillRate
from shared.engine.request.request import TokenChunk
from shared.engine.request.sequence import DecodingSequence
from shared.engine.statistics import EngineStatistics
from shared.errors import NeapError
from shared.ladder.learned_ngrams import LearnedNgrams
from shared.model.paged_kv import as_paged
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import Work
from shared.ops import NO_TOKEN
from shared.ops.slots import MOST_ENDS, MOST_ROWS, NO_DRAFTER, ReadRow, Slot, read_row, row_bytes, write_ratios

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Place:
    """Where a request is on the device. `has_run`: whether a step with it has been handled. `has_states`: whether a
    head could draft for it in the last step."""

    slot: int
    has_states: bool
    has_run: bool = False


@dataclass
class Launched:
    """A step under way: its requests and where they were, whether anything was drafted for them, and when it was
    launched. `num_read`: tokens of prompts. `chunks`: what became final of each, once the step has been handled."""

    rows: list[tuple[DecodingSequence, Place]]
    num_read: int
    drafted: bool
    arrived: Arrived
    began_s: float
    chunks: dict[DecodingSequence, list[TokenChunk]] = field(default_factory=dict)


class Ahead:
    """The steps of one runner, by the engine's thread. `learned`: as of `Decoder`."""

    def __init__(
        self,
        runner: PagedRunner,
        statistics: EngineStatistics,
        prefill_rate: PrefillRate,
        learned: LearnedNgrams | None,
    ) -> None:
        self._runner, self._statistics, self._prefill_rate = runner, statistics, prefill_rate
        self.graphs = StepGraphs(runner, learned)
        self._places: weakref.WeakKeyDictionary[DecodingSequence, Place] = weakref.WeakKeyDictionary()
        self._worth = Worth()
        self._under_way: Launched | None = None
        self._handled_s = 0.0
        self._row_bytes = row_bytes()

    @property
    def is_under_way(self) -> bool:
        """Whether a step has been launched whose results have not been handled."""
        return self._under_way is not None

    @staticmethod
    def serves(sequence: DecodingSequence) -> bool:
        """Whether the device needs no word from the host to choose its tokens."""
        request, ladder = sequence.request, sequence.ladder
        policy, sampling = request.policy, request.sampling
        return (
            not (sampling.changes_scores or sampling.top_k or sampling.top_p < 1.0)
            and policy.name != "relaxed"
            and request.constraint is None
            and request.logprobs is None
            and request.prompt_logprobs is None
            and request.predicted is None
            and sequence.on_states is None
            and not (policy.max_drafts or policy.min_layers)
            and len(sequence.answer.end_token_ids) <= MOST_ENDS
            and (ladder is None or ladder.drafts_on_device)
        )

    def prepare(self, drafter: Drafter, seconds: Callable[[Work], float]) -> Iterator[None]:
        """Records what `drafter` drafts with, which `seconds` times. Yields between recordings."""
        if drafter.ladder is not None and drafter.ladder.drafts_on_device:
            yield from self.graphs.drafts_of(drafter).prepare(seconds)

    def will_have_ended(self, sequence: DecodingSequence) -> bool:
        """Whether its answer ends with the step under way, because every step gives a token."""
        if self._under_way is None or sequence.answer.num_left > 1:
            return False
        return any(sequence is each and self._places.get(each) is place for each, place in self._under_way.rows)

    # Launches.

    def launch(
        self, decoding: Sequence[DecodingSequence], parts: Sequence[Speculation], num_read: int
    ) -> list[Launched]:
        """Launches a step of requests that have been read but for their last token, behind the tokens of `parts`:
        pieces of prompts, and what the host has drafted. `num_read`: tokens of prompts. Returns the step before, if
        there is one, to be handled.

        If it raises, nothing has been launched, and the step before is still under way.
        """
        launched = self._launched(decoding, parts, num_read)
        before, self._under_way = self.finish(), launched
        return before

    def _launched(self, decoding: Sequence[DecodingSequence], parts: Sequence[Speculation], num_read: int) -> Launched:
        pool, began_s = self._runner.pool, time.monotonic()
        self._make_room(decoding)
        placed = [(sequence, attempt(sequence, self._place, sequence)) for sequence in decoding]
        rows = [(sequence, place) for sequence, place in placed if place is not None]
        decoding = [sequence for sequence, _ in rows]
        others = [
            (token, table, position)
            for part in parts
            for table in [pool.table_index(as_paged(part.sequence.cache))]
            for position, token in enumerate(part.tokens, part.base)
        ]
        graphs = {sequence: self.graphs.drafts_of(sequence.drafter) for sequence in decoding if _drafts(sequence)}
        of_ladders = dict.fromkeys(graphs.values())
        size, drafted = self._worth.choose(
            self._runner.pass_sizes,
            len(rows),
            len(graphs),
            len(others),
            self._runner.head_sizes[-1],
            (decoding or [part.sequence for part in parts])[0].drafter.pass_s,
            sum(each.seconds_of(len(rows)) for each in of_ladders),
        )
        self.graphs.memory.send(
            [
                RowOfStep(
                    place.slot,
                    pool.table_index(as_paged(sequence.cache)),
                    graphs[sequence].number if drafted and sequence in graphs else NO_DRAFTER,
                    partial(write_ratios, sequence.drafter.confidence(sequence.request).handle),
                )
                for sequence, place in rows
            ],
            others,
            size,
        )
        if drafted:
            if self.graphs.learned is not None:
                self.graphs.learned.update()
            for each in of_ladders:
                each.replay(len(rows))
        draws = not all(sequence.request.sampling.is_greedy for sequence in decoding)
        self.graphs.run(size, size - len(others) if drafted else len(rows), draws=draws)
        self._runner.counters.add(0, self._runner.num_layers, len(rows) + len(others))
        arrived = self.graphs.memory.read(len(rows))
        return Launched(rows, num_read, drafted, arrived, began_s)

    def _make_room(self, decoding: Sequence[DecodingSequence]) -> None:
        """Takes requests from the device that are in no step, such as paused ones, if there are too few slots."""
        new = [sequence for sequence in decoding if sequence not in self._places]
        num_missing = len(self._places) + len(new) - MOST_ROWS
        if num_missing <= 0:
            return
        busy = {*decoding}
        if self._under_way is not None:
            busy.update(sequence for sequence, _ in self._under_way.rows)
        for sequence in [each for each in self._places if each not in busy][:num_missing]:
            self.forget(sequence)

    def _place(self, sequence: DecodingSequence) -> Place:
        """Its place on the device. It gets one if it has none."""
        place = self._places.get(sequence)
        if place is None:
            taken = {each.slot for each in self._places.values()}
            states = sequence.settled_states if sequence.settled is not None and sequence.keeps_states else None
            place = Place(next(slot for slot in range(MOST_ROWS) if slot not in taken), states is not None)
            sequence.show_prompt(len(sequence.request.given_ids))
            ends = sorted(sequence.answer.end_token_ids)
            slot = Slot(
                num_tokens=len(sequence.tokens),
                num_left=sequence.answer.num_left,
                salt=sequence.learned.salt if sequence.learned else 0,
                is_open=1,
                num_ends=len(ends),
                temperature=sequence.request.sampling.temperature,
                least_share=sequence.request.sampling.min_p,
                seed=sequence.request.sampling.seed,
            )
            slot.ends[: len(ends)] = ends
            self.graphs.memory.fill(place.slot, slot, sequence.tokens, states)
            self._places[sequence] = place
        return place

    def forget(self, sequence: DecodingSequence) -> None:
        """Takes a request from the device. What a step under way makes of it is dropped."""
        self._places.pop(sequence, None)

    # Results.

    def finish(self) -> list[Launched]:
        """The step under way, if there is one, to be handled."""
        before, self._under_way = self._under_way, None
        return [before] if before else []

    def handle(self, launched: Launched) -> None:
        """Waits for a step, and makes its tokens final: `chunks` has them by request."""
        try:
            address = launched.arrived()
        except Exception as error:
            fail_all([sequence for sequence, _ in launched.rows], error, "a step failed for")
            return
        reaches: list[float] = []
        num_drafting = 0
        for number, (sequence, place) in enumerate(launched.rows):
            if self._places.get(sequence) is not place or sequence.failure or sequence.is_finished:
                continue
            row = attempt(sequence, self._commit, sequence, place, address + number * self._row_bytes, launched)
            if row is not None and _drafts(sequence) and (place.has_states or not sequence.keeps_states):
                reaches += row.reaches
                num_drafting += 1
            place.has_run = place.has_states = True
            if sequence.failure is not None or sequence.is_finished:
                self.forget(sequence)
        if launched.drafted and num_drafting:
            self._worth.record(reaches, num_drafting)
        now = time.monotonic()
        seconds = now - max(launched.began_s, self._handled_s)
        self._handled_s = now
        stepped = [sequence for sequence, _ in launched.rows]
        if launched.num_read and stepped:  # where nothing is read from the device, the time is not that of the pass
            self._prefill_rate.record(launched.num_read, now - launched.began_s)
        try:
            self._statistics.record_step(seconds, stepped, [launched.chunks.get(each, []) for each in stepped])
        except Exception:  # the tokens have been generated, counted or not
            logger.exception("a step could not be counted")

    def _commit(self, sequence: DecodingSequence, place: Place, address: int, launched: Launched) -> ReadRow:
        """Makes the tokens final that a request got in a step."""
        row = read_row(sequence.tables.handle, address)
        if row.num_tokens != len(sequence.tokens) or not row.choices:
            raise NeapError("the device and the host disagree about how far an answer is")
        num_layers, num_accepted = self._runner.num_layers, len(row.choices) - 1
        sequence.num_settled = row.num_tokens + num_accepted
        if place.has_run:  # else this is the pass of the prompt
            sequence.num_layer_executions += num_layers
            sequence.num_token_layers += num_layers * (1 + row.num_verified)
            sequence.num_verify_passes += 1
        sequence.num_drafted += row.num_verified
        sequence.num_accepted += num_accepted
        sequence.tables.record(row.choices)
        drafter: Drafter = sequence.drafter
        proposers = [drafter.names[number] for number in row.proposers]
        self._statistics.record_drafts(proposers, num_accepted, sequence.request.counted_version)
        is_sound = row.choices[-1] != NO_TOKEN
        tokens = drafter.generated(row.choices, row.proposers)
        launched.chunks[sequence] = sequence.emit(tokens if is_sound else tokens[:-1])
        if not is_sound and not sequence.is_finished:
            raise non_finite_logits()
        return row


def _drafts(sequence: DecodingSequence) -> bool:
    return sequence.ladder is not None and sequence.request.policy.name != "full"
