"""The decoder of a runner that records passes: requests live on the device, and steps are launched one ahead."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shared.engine.ahead.ahead import Ahead, Launched, Results
from shared.engine.ahead.graphs import MAX_ROWS
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.speculation import Speculation, have_passed
from shared.engine.failure import attempt, fail_all
from shared.engine.memory.prefixes import Prefixes
from shared.engine.request.admission import MIN_PREFILL_TOKENS
from shared.engine.request.request import TokenChunk
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import MAX_COPIED_TOKENS, Decoder
from shared.ladder.learned_ngrams import LearnedNgrams
from shared.model.inference import inference
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import Work
from shared.model.runner import Runner, captured_depths


def make_decoder(runner: Runner, prefixes: Prefixes, learned: LearnedNgrams | None) -> Decoder:
    """The decoder that fits the runner: steps cannot be launched ahead where nothing is recorded, nor where angles or
    embeddings depend on what the host knows."""
    if not isinstance(runner, PagedRunner) or not runner.records:
        return Decoder(runner, prefixes, learned)
    if runner.regimes.are_several or not runner.embedding_is_direct:
        return Decoder(runner, prefixes, learned)
    return AheadDecoder(runner, prefixes, learned)


class AheadDecoder(Decoder):
    """A `Decoder` whose turns launch a step and return the chunks of the one before. Where the host has to choose the
    tokens of a request (see `Ahead.serves`), it rides in the same pass, and the turn waits for that.

    At most MAX_ROWS sequences share a turn, and no more than rows go through the head at once.
    """

    def __init__(self, runner: PagedRunner, prefixes: Prefixes, learned: LearnedNgrams | None) -> None:
        super().__init__(runner, prefixes, learned)
        self._paged = runner
        self._ahead = Ahead(runner, self.statistics, self.prefill_rate, learned)
        self._first = 0
        depths = captured_depths(runner.num_layers)
        self._states = {depth: runner.left_at(depth) for depth in (*depths, runner.num_layers)}

    def prepare(self, seconds: Callable[[Work], float]) -> Iterator[None]:
        yield from self._ahead.graphs.prepare()
        yield from self._ahead.lane.prepare(seconds, self.prefill_rate)

    def prepare_drafter(self, drafter: Drafter, seconds: Callable[[Work], float]) -> Iterator[None]:
        yield from self._ahead.prepare(drafter, seconds)

    @property
    def is_under_way(self) -> bool:
        return self._ahead.is_under_way

    def admit(self, *arguments: Any, **named: Any) -> DecodingSequence:
        sequence = super().admit(*arguments, **named)
        sequence.shows_tokens = not self._ahead.serves(sequence)  # look-up on the device reads its tokens there
        return sequence

    def put_back(self, sequence: DecodingSequence) -> None:
        self._ahead.forget(sequence)
        super().put_back(sequence)

    @inference
    def turn(self, sequences: Sequence[DecodingSequence]) -> Results:
        """As `Decoder.turn`. Nothing that counts is returned of a sequence that the caller has ended since its launch.
        Without sequences: what is under way."""
        if sequences and self._ahead.has_just(sequences):
            return self._go_on(sequences)
        sequences = self._chosen(sequences)
        if sequences and all(map(self._ahead.serves, sequences)):
            return self._launch(sequences, [])
        # What the host drafts comes after what it knows.
        results = self._handled(self._ahead.finish())
        going = [sequence for sequence in sequences if sequence.failure is None and not sequence.is_finished]
        if not going:
            return results
        on_host = [sequence for sequence in going if not self._ahead.serves(sequence)]
        try:
            results += self._launch([sequence for sequence in going if sequence not in on_host], on_host)
        except Exception as error:  # what others have got already is theirs
            fail_all(going, error, "a step failed for")
            results += [(sequence, []) for sequence in going]
        return _merged(results + self._handled(self._ahead.finish()))

    def _chosen(self, sequences: Sequence[DecodingSequence]) -> Sequence[DecodingSequence]:
        """Those of this turn. If there are too many, they take turns."""
        most = min(MAX_ROWS, self._paged.head_sizes[-1])
        if len(sequences) <= most:
            return sequences
        first = self._first % len(sequences)
        self._first = first + most
        return [*sequences[first:], *sequences[:first]][:most]

    def _launch(self, on_device: Sequence[DecodingSequence], on_host: Sequence[DecodingSequence]) -> Results:
        """Launches a step, and finishes the part of `on_host` in it."""
        sequences = [*on_device, *on_host]
        # What has a place has been read.
        new = [sequence for sequence in sequences if sequence.place is None]
        if new:
            self.statistics.record_starts(new)
        for sequence in new:
            # The step in which a request decodes first reads the last token.
            if sequence.is_reading and sequence.read_until == len(sequence.tokens) and sequence not in on_host:
                sequence.read_until -= 1
        reading = [sequence for sequence in new if sequence.is_reading]
        num_decoding = len(sequences) - len(reading)
        in_lane = [sequence for sequence in reading if self._ahead.lane.takes(sequence)]
        reading = [sequence for sequence in reading if sequence not in in_lane]
        chunk = self._next_chunk(in_lane, sequences, num_decoding)
        room = max(self._paged.pass_sizes[-1] - len(sequences), MIN_PREFILL_TOKENS)
        pieces = self._prefill(reading, sequences, num_decoding, room) if reading else []
        decoding = [sequence for sequence in on_host if not sequence.is_reading]
        num_read = sum(len(piece.tokens) for piece in pieces)
        parts = self._drafting.draft(decoding, num_read + len(on_device)) if decoding else []
        parts += [piece for piece in pieces if piece.sequence in on_host]
        pieces = [piece for piece in pieces if piece.sequence in on_device]
        # Those whose prompt ends here decode in the same pass, behind it.
        ready = on_device
        if new:
            last = {piece.sequence for piece in pieces if piece.num_logits}
            if chunk is not None and chunk.base + len(chunk.tokens) == chunk.sequence.read_until:
                last.add(chunk.sequence)
            ready = [each for each in on_device if each.failure is None and (not each.is_reading or each in last)]
        num_tokens = len(ready) + sum(len(part.tokens) for part in (*parts, *pieces))
        shares = num_tokens <= self._paged.pass_sizes[-1]
        ready = self._ahead.without_ending(ready)
        shared = [*parts, *pieces] if shares else pieces
        if chunk is not None:
            num_read += len(chunk.tokens)
            pieces = [*pieces, chunk]
        results, is_launched = self._launched(ready, pieces, num_read, shared, chunk)
        for piece in pieces:
            piece.sequence.num_settled = piece.base + len(piece.tokens)
        if parts:
            # The first tokens of the pass are these, or they have one of their own.
            passed = partial(self._taken, parts) if shares and is_launched else None
            num_read = sum(len(part.tokens) for part in parts if part.is_prefill)
            start_s = time.monotonic()
            self._verify_and_commit(parts, num_read, passed)
            seconds = None if is_launched else time.monotonic() - start_s
            self.statistics.record_step(seconds, [(part.sequence, part.chunks) for part in parts])
        chunks_of = {part.sequence: part.chunks for part in parts}
        results += [(sequence, chunks_of.get(sequence, [])) for sequence in on_host]
        return self._with_failed(on_device, results)

    def _go_on(self, sequences: Sequence[DecodingSequence]) -> Results:
        """A step of those that were in the last one."""
        ready = sequences if self._ahead.least_left > 1 else self._ahead.without_ending(sequences)
        return self._with_failed(sequences, self._launched(ready, [], 0)[0])

    def _launched(
        self,
        ready: Sequence[DecodingSequence],
        pieces: Sequence[Speculation],
        num_read: int,
        shared: Sequence[Speculation] = (),
        chunk: Speculation | None = None,
    ) -> tuple[Results, bool]:
        """Launches a step of `ready` and `pieces`, if there are any. Returns what the one before gave, and whether one
        has been launched."""
        if ready or pieces:
            try:
                return self._handled(self._ahead.launch(ready, shared, num_read, chunk)), True
            except Exception as error:
                fail_all([*ready, *(piece.sequence for piece in pieces)], error, "a step could not be launched for")
        return self._handled(self._ahead.finish()), False

    @staticmethod
    def _with_failed(on_device: Sequence[DecodingSequence], results: Results) -> Results:
        failed: Results = [(sequence, []) for sequence in on_device if sequence.failure is not None]
        return _merged(results + failed) if failed else results

    def _next_chunk(
        self, in_lane: Sequence[DecodingSequence], running: Sequence[DecodingSequence], num_decoding: int
    ) -> Speculation | None:
        """The chunk of this step, of the first long prompt that is not copied from others first."""
        lane, copies = self._ahead.lane, MAX_COPIED_TOKENS
        for sequence in in_lane if lane.is_open(num_decoding) else ():
            num_settled = sequence.num_settled
            piece = attempt(sequence, self._prefill_piece, sequence, running, (), lane.size, copies)
            copies = max(copies - sequence.num_settled + num_settled, 0)
            if piece is not None:
                lane.cut(piece)
                if piece.tokens:
                    return piece
        return None

    def _taken(self, parts: Sequence[Speculation]) -> Tensor:
        """The states [T, D] that the pass launched last has left of the parts."""
        count = sum(len(part.tokens) for part in parts)
        states = {depth: left[None, :count].clone() for depth, left in self._states.items()}
        have_passed(parts, states, self._paged.num_layers)
        return states[self._paged.num_layers][0]

    def _handled(self, launched: Sequence[Launched]) -> Results:
        return [result for step in launched for result in self._ahead.handle(step)]


def _merged(results: Results) -> Results:
    """One entry for each sequence, which may have been in two steps."""
    found: dict[DecodingSequence, list[TokenChunk]] = {}
    for sequence, chunks in results:
        found.setdefault(sequence, []).extend(chunks)
    return [*found.items()]
