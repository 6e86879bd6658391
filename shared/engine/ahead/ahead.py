"""Steps of requests that live on the device, launched one ahead: while the device runs a step, the host handles the
results of the one before.

A step is three replays and two copies, whatever the number of requests: drafts, the pass, and what is accepted; what
the host says, and what it reads. A request whose answer ended in a step that the host has not seen yet is padding in
the next one. What the host ends itself, by a stop string or a cancellation, costs the next step's share.
"""

import logging
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shared.engine.ahead.graphs import DraftGraphs, StepGraphs
from shared.engine.ahead.lane import PromptLane
from shared.engine.ahead.slots import Arrived, RowOfStep
from shared.engine.ahead.worth import Worth
from shared.engine.drafting.drafter import FULL, Drafter
from shared.engine.drafting.speculation import Speculation
from shared.engine.failure import attempt, fail_all, non_finite_logits
from shared.engine.request.admission import PrefillRate
from shared.engine.request.answer import TokenBytes
from shared.engine.request.request import Exit, TokenChunk
from shared.engine.request.sequence import DecodingSequence
from shared.engine.statistics import EngineStatistics
from shared.errors import NeapError
from shared.ladder.learned_ngrams import LearnedNgrams
from shared.ladder.proposers import exit_name, numbered
from shared.model.paged_kv import BlockPool, as_paged
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import Work
from shared.ops import NO_TOKEN
from shared.ops.slots import MOST_ENDS, MOST_ROWS, NO_DRAFTER, NUM_PROPOSERS, PLACES, RowReader, Slot

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Place:
    """Where a request is on the device, and what does not change from step to step. `row`: as steps are told of it.
    `graphs` make its drafts, if it has any. `draws`: whether its tokens are drawn. `has_states`: whether a head could
    draft for it in the last step."""

    row: RowOfStep
    graphs: DraftGraphs | None
    draws: bool
    has_states: bool


Row = tuple[DecodingSequence, Place]
# The chunks that became final, by sequence.
Results = list[tuple[DecodingSequence, list[TokenChunk]]]
# Names of all that drafts on the device, by number.
PROPOSERS = numbered((exit_name(0),))
PLACE_OF = attrgetter("place")
_NOTHING = array("d", bytes(8 * PLACES))


class Company:
    """What follows from who the requests of a step are, by their `places`: as long as the same ones run on, no request
    is asked. `num_drafting` of them have drafts, which `ladders` make. `fresh`: the numbers of those for which no head
    could draft yet. `groups`: of each, the place of its version in `versions`. `sent`: their rows, with the block
    tables that they had when so many had been given."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.places = [place for _, place in rows]
        drafting = [place.graphs for place in self.places if place.graphs is not None]
        self.ladders, self.num_drafting = dict.fromkeys(drafting), len(drafting)
        self.draws = any(place.draws for place in self.places)
        heads = [place.graphs is not None and sequence.keeps_states for sequence, place in rows]
        self.fresh = [number for number, place in enumerate(self.places) if heads[number] and not place.has_states]
        counted = [sequence.request.counted_version for sequence, _ in rows]
        self.versions = [*dict.fromkeys(counted)]
        self.groups = array("i", map(self.versions.index, counted))
        self.sent: list[RowOfStep] = []
        self._num_given = -1

    def find_tables(self, rows: Sequence[Row], pool: BlockPool) -> None:
        if self._num_given != pool.num_given:
            self._num_given = pool.num_given
            self.sent = [
                place.row._replace(table=pool.table_index(as_paged(sequence.cache))) for sequence, place in rows
            ]


@dataclass
class Launched:
    """A step under way: its requests, whether anything was drafted for them, and when it was launched. `num_read`:
    tokens of prompts; `num_sequences`: of all in its pass."""

    rows: list[Row]
    company: Company
    num_read: int
    num_sequences: int
    drafted: bool
    arrived: Arrived
    began_s: float


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
        self.lane = PromptLane(runner)
        self._places: weakref.WeakKeyDictionary[DecodingSequence, Place] = weakref.WeakKeyDictionary()
        self._worth = Worth()
        self._under_way: Launched | None = None
        self._handled_s = 0.0
        # The requests of the last step, and the least number of tokens that one of them may still get; 0: or more.
        self._company, self.least_left = Company(), 0
        self._reader, self._num_layers = RowReader(), runner.num_layers
        self._exits = [*(Exit(0, name) for name in PROPOSERS), Exit(self._num_layers, FULL)]
        tokenizer = runner.loaded.tokenizer
        decoded = None if tokenizer is None else TokenBytes.of(tokenizer)
        self._texts = None if decoded is None else decoded.texts

    @property
    def is_under_way(self) -> bool:
        """Whether a step has been launched whose results have not been handled."""
        return self._under_way is not None

    @staticmethod
    def serves(sequence: DecodingSequence) -> bool:
        """Whether the device needs no word from the host to choose its tokens."""
        if sequence.place is not None:
            return True
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

    def without_ending(self, sequences: Sequence[DecodingSequence]) -> Sequence[DecodingSequence]:
        """Those whose answers do not end with the step under way, which gives each of its requests a token."""
        last = [sequence for sequence in sequences if sequence.answer.num_tokens + 1 >= sequence.answer.max_tokens]
        if self._under_way is None or not last:
            return sequences
        ending = {sequence for sequence, place in self._under_way.rows if sequence.place is place}.intersection(last)
        return [sequence for sequence in sequences if sequence not in ending]

    # Launches.

    def has_just(self, sequences: Sequence[DecodingSequence]) -> bool:
        """Whether these are the requests of the last step, at the places that they had."""
        return self._company.places == [*map(PLACE_OF, sequences)]

    def launch(
        self,
        decoding: Sequence[DecodingSequence],
        parts: Sequence[Speculation],
        num_read: int,
        chunk: Speculation | None = None,
    ) -> list[Launched]:
        """Launches a step of requests that have been read but for their last token, behind the tokens of `parts`:
        pieces of prompts, and what the host has drafted. `num_read`: tokens of prompts. `chunk`: one of a long prompt,
        whose pass comes first. Returns the step before, if there is one, to be handled.

        If it raises, nothing has been launched, and the step before is still under way.
        """
        launched = self._launched(decoding, parts, num_read, chunk)
        before, self._under_way = self.finish(), launched
        return before

    def _launched(
        self,
        decoding: Sequence[DecodingSequence],
        parts: Sequence[Speculation],
        num_read: int,
        chunk: Speculation | None,
    ) -> Launched:
        pool, began_s = self._runner.pool, time.monotonic()
        company = self._company
        if self.has_just(decoding):
            rows = [*zip(decoding, company.places, strict=True)]
        else:
            rows = self._placed(decoding)
            company, self.least_left = Company(rows), 0
            self._company = company
        if chunk is not None:
            self.lane.read(chunk)
        if not rows and not parts:  # then the host waits for the chunk alone
            return Launched(rows, company, num_read, 1, False, self.graphs.memory.read(0), began_s)
        pass_s = (rows[0][0] if rows else parts[0].sequence).drafter.pass_s
        others = [
            (token, table, position)
            for part in parts
            for table in [pool.table_index(as_paged(part.sequence.cache))]
            for position, token in enumerate(part.tokens, part.base)
        ]
        company.find_tables(rows, pool)
        size, drafted = self._worth.choose(
            self._runner.pass_sizes,
            len(rows),
            company.num_drafting,
            len(others),
            self._runner.head_sizes[-1],
            pass_s,
            sum(each.seconds_of(len(rows)) for each in company.ladders),
        )
        self.graphs.memory.send(company.sent, others, size, drafts=drafted)
        if drafted:
            if self.graphs.learned is not None:
                self.graphs.learned.update()
            for each in company.ladders:
                each.replay(len(rows))
        self.graphs.run(size, size - len(others) if drafted else len(rows), draws=company.draws)
        self._runner.counters.add(0, self._runner.num_layers, len(rows) + len(others))
        arrived = self.graphs.memory.read(len(rows))
        self.lane.passed(pass_s(size))
        read = [*parts, chunk] if chunk else parts
        # Most steps read no prompt.
        num_sequences = len({*dict(rows), *(part.sequence for part in read)}) if read else len(rows)
        return Launched(rows, company, num_read, num_sequences, drafted, arrived, began_s)

    def _placed(self, decoding: Sequence[DecodingSequence]) -> list[Row]:
        """The requests with their places on the device, but for those that fail to get one."""
        self._make_room(decoding)
        for sequence in decoding:
            if sequence.place is None:
                attempt(sequence, self._place, sequence)
        return [(sequence, sequence.place) for sequence in decoding if sequence.place is not None]

    def _make_room(self, decoding: Sequence[DecodingSequence]) -> None:
        """Takes requests from the device that are in no step, such as paused ones, if there are too few slots."""
        num_new = sum(sequence.place is None for sequence in decoding)
        num_missing = len(self._places) + num_new - MOST_ROWS
        if num_missing <= 0:
            return
        busy = {*decoding}
        if self._under_way is not None:
            busy.update(sequence for sequence, _ in self._under_way.rows)
        for sequence in [each for each in self._places if each not in busy][:num_missing]:
            self.forget(sequence)

    def _place(self, sequence: DecodingSequence) -> None:
        """Gives it a place on the device."""
        taken = {each.row.slot for each in self._places.values()}
        slot_number = next(slot for slot in range(MOST_ROWS) if slot not in taken)
        states = sequence.settled_states if sequence.settled is not None and sequence.keeps_states else None
        request, drafter = sequence.request, sequence.drafter
        graphs = None if sequence.ladder is None or request.policy.name == "full" else self.graphs.drafts_of(drafter)
        number = NO_DRAFTER if graphs is None else graphs.number
        row = RowOfStep(slot_number, 0, number, drafter.confidence(request).handle.address.value or 0)
        place = Place(row, graphs, not request.sampling.is_greedy, states is not None)
        ends = sorted(sequence.answer.end_token_ids)
        slot = Slot(
            num_tokens=len(sequence.tokens),
            num_left=sequence.answer.num_left,
            salt=sequence.learned.salt if sequence.learned else 0,
            is_open=1,
            num_ends=len(ends),
            temperature=request.sampling.temperature,
            least_share=request.sampling.min_p,
            seed=request.sampling.seed,
        )
        slot.ends[: len(ends)] = ends
        self.graphs.memory.fill(slot_number, slot, sequence.tokens, states)
        self._places[sequence] = sequence.place = place

    def forget(self, sequence: DecodingSequence) -> None:
        """Takes a request from the device. What a step under way makes of it is dropped."""
        self._places.pop(sequence, None)
        sequence.place = None

    # Results.

    def finish(self) -> list[Launched]:
        """The step under way, if there is one, to be handled."""
        before, self._under_way = self._under_way, None
        return [before] if before else []

    def handle(self, launched: Launched) -> Results:
        """Waits for a step, and makes its tokens final. Returns the chunks of its requests."""
        rows, company, results = launched.rows, launched.company, Results()
        try:
            address = launched.arrived()
        except Exception as error:
            fail_all([sequence for sequence, _ in rows], error, "a step failed for")
            return [(sequence, []) for sequence, _ in rows]
        going = [
            place.row.confidence
            if sequence.place is place and sequence.failure is None and sequence.answer.end is None
            else 0
            for sequence, place in rows
        ]
        read = self._reader.read(going, company.groups, len(company.versions), address)
        self.least_left = read.least_left if company is self._company else 0
        # All tokens of a step at once.
        num_layers, tokens, exits = self._num_layers, read.tokens, [*map(self._exits.__getitem__, read.makers)]
        texts = [] if self._texts is None else [*map(self._texts.__getitem__, tokens)]
        num_drafting, first = company.num_drafting, 0
        for (sequence, place), goes, numbers in zip(rows, going, read.numbers, strict=True):
            chunks: list[TokenChunk] = []
            if not goes:
                num_drafting -= place.graphs is not None
                results.append((sequence, chunks))
                continue
            num_before, num_new, num_verified, num_left = numbers
            end = first + num_new
            try:
                if num_before != len(sequence.tokens) or not num_new:
                    raise NeapError("the device and the host disagree about how far an answer is")
                sequence.num_settled = num_before + num_new - 1
                if num_before - 1 > sequence.read_until:  # else this is the pass of the prompt
                    sequence.num_layer_executions += num_layers
                    sequence.num_token_layers += num_layers * (1 + num_verified)
                    sequence.num_verify_passes += 1
                if num_verified:
                    sequence.num_drafted += num_verified
                    sequence.num_accepted += num_new - 1
                if num_left:
                    chunks = sequence.emit(tokens[first:end], exits[first:end], (), texts[first:end])
                else:
                    sound = end if tokens[end - 1] != NO_TOKEN else end - 1
                    chunks = sequence.emit(tokens[first:sound], exits[first:sound])
                    if sound < end and sequence.answer.end is None:
                        raise non_finite_logits()
            except Exception as error:
                fail_all([sequence], error, "a request failed")
            first = end
            if sequence.failure is not None or sequence.answer.end is not None:
                self.forget(sequence)
            results.append((sequence, chunks))
        for number in company.fresh:
            if going[number] and not rows[number][1].has_states:
                read.reaches[number * PLACES : (number + 1) * PLACES] = _NOTHING
                num_drafting -= 1
                rows[number][1].has_states = True
        company.fresh = []
        if launched.drafted:
            for version, numbers in zip(company.versions, read.drafts, strict=True):
                verified, accepted = numbers[:NUM_PROPOSERS], numbers[NUM_PROPOSERS:]
                self._statistics.record_drafts(zip(PROPOSERS, verified, accepted, strict=True), version)
        if launched.drafted and num_drafting:
            self._worth.record(read.reaches, num_drafting)
        now = time.monotonic()
        seconds = now - max(launched.began_s, self._handled_s)
        self._handled_s = now
        if launched.num_read and rows:  # where nothing is read from the device, the time is not that of the pass
            self._prefill_rate.record(launched.num_read, now - launched.began_s)
        try:
            self._statistics.record_step(seconds, results, launched.num_sequences)
        except Exception:  # the tokens have been generated, counted or not
            logger.exception("a step could not be counted")
        return results
