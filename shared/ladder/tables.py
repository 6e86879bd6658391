"""The proposers that run no layer, as native objects: prompt look-up, the n-gram table, the learned one, a prediction.

Proposing what followed an earlier occurrence of the context is known as prompt lookup (LLMA, 2304.04487).
"""

from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_uint64, c_void_p, cast
from itertools import islice
from typing import TYPE_CHECKING, Any

from shared.ladder.confidence import Confidence, joint_numbers
from shared.ladder.learned_ngrams import ClientNgrams
from shared.ladder.ngram_table import MAX_ORDER
from shared.ladder.prediction import PredictedText
from shared.ladder.proposers import Draft, Match, numbered
from shared.ladder.table_confidence import TableConfidence
from shared.ops.drafting import Handle, address, doubles, functions, integers, tokens_of

if TYPE_CHECKING:
    from shared.ladder.ladder import Ladder

_NAMES = numbered(())


def native_ladder(
    ladder: "Ladder | None",
    vocabulary_size: int,
    verify: Sequence[float] = (1.0,),
    wide: Sequence[tuple[int, float]] = (),
    exits: Sequence[tuple[int, float, float, float, float, int]] = (),
) -> Handle:
    """A ladder as drafting reads it, with the costs of passes: see `PassCosts`. `exits`: of each its depth, agreement,
    seconds of a call, of a further chain and of a further draft, and the most drafts of a call."""
    lookup = ladder.lookup_confidence if ladder else None
    confidence = ladder.ngram_confidence if ladder else None
    table = ladder.ngrams if ladder and confidence else None
    columns = table.columns if table else []
    pointers: list[object] = [(c_void_p * MAX_ORDER)(*(part.ctypes.data for part in column)) for column in columns]
    pointers = pointers or [None] * 4
    return Handle(
        "ladder",
        _numbers(lookup),
        _numbers(confidence),
        *pointers,
        integers(len(keys) for keys in columns[0]) if columns else None,
        doubles(joint_numbers(ladder.joint_weights) if ladder else [0.0] * 12),
        doubles(verify),
        c_int64(len(verify)),
        integers(count for count, _ in wide),
        doubles(seconds for _, seconds in wide),
        c_int64(len(wide)),
        integers(depth for depth, *_ in exits),
        doubles(number for _, *numbers, _ in exits for number in numbers),
        integers(num_drafts for *_, num_drafts in exits),
        c_int64(len(exits)),
        c_int64(vocabulary_size),
        kept=table,
    )


def _numbers(confidence: TableConfidence | None) -> object:
    if confidence is None:
        return None
    return doubles([confidence.bias, *(weight for row in confidence.weights for weight in row)])


class SequenceTables:
    """What the tables of a native ladder know of one sequence, and its chain of drafts in the present step.

    `learned` drafts with the confidence of the n-gram table. The first `num_prompt_tokens` are no part of what a
    prediction is compared with. `script`, a `drafting.Script`, is one more proposer.
    """

    def __init__(
        self,
        ladder: Handle,
        confidence: Confidence,
        learned: ClientNgrams | None = None,
        predicted: PredictedText | None = None,
        num_prompt_tokens: int = 0,
        script: Any = None,
    ) -> None:
        self.handle = Handle(
            "sequence",
            ladder.address,
            confidence.handle.address,
            address(learned.table.handle if learned else None),
            c_uint64(learned.salt if learned else 0),
            address(predicted.handle if predicted else None),
            c_int64(num_prompt_tokens),
            cast(script, c_void_p) if script else None,
            kept=(ladder, confidence, learned, predicted, script),
        )

    def append(self, tokens: Sequence[int]) -> None:
        """Appends final tokens to the sequence."""
        pointer, count, _kept = tokens_of(tokens)
        functions().neap_sequence_append(self.handle.address, pointer, count)

    def record(self, tokens: Sequence[int]) -> None:
        """What a pass has shown: the full model's choices at the places of the step's chain, of which all but the last
        are accepted drafts."""
        pointer, count, _kept = tokens_of(tokens)
        functions().neap_sequence_record(self.handle.address, pointer, count)

    @property
    def num_predicted(self) -> int:
        """Tokens of the answer that the prediction had where the answer was expected to be in it."""
        count: int = functions().neap_sequence_num_predicted(self.handle.address)
        return count

    def matches(self, drafted: Sequence[int] = ()) -> tuple[Match | None, list[Match], list[Match]]:
        """What prompt look-up, n-gram table and learned table know after the sequence and `drafted`; of the tables the
        longest context first. The look-up's is the second opinion on each of these."""
        most = 1 + 2 * MAX_ORDER
        numbers, shares, counts = (c_int32 * (3 * most))(), (c_double * most)(), (c_int32 * 3)()
        pointer, length, _kept = tokens_of(drafted)
        functions().neap_sequence_matches(self.handle.address, pointer, length, numbers, shares, counts)
        columns = zip(numbers[::3], numbers[1::3], numbers[2::3], shares, strict=True)
        found = (Match(*column) for column in columns)
        lookup, ngrams, learned = ([*islice(found, count)] for count in counts)
        return next(iter(lookup), None), ngrams, learned

    def propose(self, drafted: Sequence[int] = ()) -> list[Draft]:
        """What the tables propose after the sequence and `drafted`."""
        most = 4 + 2 * MAX_ORDER
        tokens, proposers, probabilities = (c_int32 * most)(), (c_int32 * most)(), (c_double * most)()
        pointer, length, _kept = tokens_of(drafted)
        count = functions().neap_sequence_propose(
            self.handle.address, pointer, length, tokens, proposers, probabilities
        )
        found = [*zip(tokens, probabilities, proposers, strict=True)][:count]
        return [Draft(token, probability, _NAMES[number], 0) for token, probability, number in found]
