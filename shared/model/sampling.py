"""How a request wants its next token to be chosen. The choice is repeatable.

Every position of a sequence has its own uniform number, drawn from (seed, position). So a token depends only on the
logits, the tokens before it and the seed, whichever pass computed the logits. To verify a draft, a token is sampled
from the full model's distribution; the draft is accepted if it is that token. A draft of a single token is thus
accepted with probability p(draft), and otherwise the result follows the residual distribution. This is speculative
rejection sampling (Leviathan et al., 2211.17192) coupled to the plain sampler.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidInput
from shared.field_types import check_limits, check_types
from shared.ops.drafting import functions

if TYPE_CHECKING:
    from shared.model.context_counts import ContextCounts

# Each text of a request is tokenised in two ways. Each step looks at all of them.
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 64


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy decoding. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the defaults of
    the fields after the seed switch the respective rule off.

    `presence_penalty` is subtracted from the logits of all tokens that the answer has already, `frequency_penalty` as
    many times as it has them. `logit_bias` maps token ids to what is added to their logits. The first `min_tokens`
    tokens of the answer are none that end it. `bad_words` are token sequences that the answer does not complete, even
    if the prompt begins one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.seed < 2**64:
            raise InvalidInput(f"seed is {self.seed}; it must be in [0, 2^64)")
        try:
            biases = {index(token): float(bias) for token, bias in self.logit_bias.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidInput("logit_bias must map token ids to numbers") from error
        object.__setattr__(self, "logit_bias", biases)  # frozen from here on; this is still construction
        check_limits(self, "Sampling")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidInput(f"{len(self.bad_words)} bad_words; at most {MAX_BAD_WORDS} are allowed")
        if not all(0 < len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words):
            raise InvalidInput(f"each of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens")

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """Greedy, and the choice is the most probable token of the model itself."""
        return self.is_greedy and not self.changes_scores

    @cached_property
    def changes_scores(self) -> bool:
        """Whether other tokens may become the most probable ones."""
        return self.repetition_penalty != 1.0 or bool(
            self.presence_penalty or self.frequency_penalty or self.logit_bias or self.min_tokens or self.bad_words
        )

    @cached_property
    def bad_endings(self) -> Mapping[int | None, Sequence[tuple[list[int], int]]]:
        """What stands before the last token of each bad word, and that token, by the token before it. None: there is
        none."""
        endings: dict[int | None, list[tuple[list[int], int]]] = {}
        for *before, last in self.bad_words:
            endings.setdefault(before[-1] if before else None, []).append((before, last))
        return endings

    @cached_property
    def forbids_tokens(self) -> bool:
        """Whether `forbidden_after` may ever find any."""
        return bool(self.min_tokens or self.bad_words)

    def forbidden_after(self, before: Sequence[int], num_answered: int, end_token_ids: Collection[int]) -> set[int]:
        """The tokens that `min_tokens` and `bad_words` forbid after those before, of which the last MAX_BAD_WORD_TOKENS
        are enough; the answer has `num_answered` so far."""
        forbidden = set(end_token_ids) if num_answered < self.min_tokens else set()
        endings = self.bad_endings
        for words in (endings.get(None, ()), endings.get(before[-1], ()) if before else ()):
            forbidden.update(last for word, last in words if [*before[len(before) - len(word) :]] == word)
        return forbidden


def uniform_at(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one position of a sequence, from the counter-based generator Philox: see
    csrc/draft/slots.h."""
    number: float = functions().neap_uniform_at(seed, position)
    return number


class AllowedTokens(Protocol):
    """The tokens that a constraint allows at each row of a trial. All three say the same; `forced` and `allows` take a
    small part of the time of `mask`. A row is asked for only if all drafts before it are allowed."""

    def forced(self, row: int) -> int | None:
        """The only token that is allowed. None: there is a choice, or finding out takes a mask."""

    def allows(self, row: int, token: int) -> bool:
        """Whether a token of the vocabulary is allowed."""

    def mask(self, row: int) -> npt.NDArray[np.bool_]:
        """[V]. Not to be changed."""


@dataclass(frozen=True)
class Trial:
    """The rows of logits of one sequence: one per draft and one more.
    Row i predicts the token after `context` and drafts [0, i).

    Row i counts only if all drafts before it are accepted.
    In that case it is the row that plain decoding would compute.

    A draft is accepted if it is the choice of its row, and under policy relaxed also if the log-probability of the
    choice exceeds its own by at most `margin`, or if its probability in `probabilities`, one per draft, is at least
    `threshold`. None: these do not count. Only plain greedy trials have a margin.

    The answer begins after `num_prompt_tokens` of the context. `end_token_ids` end it. `allowed`: the tokens that a
    constraint allows at each row. None: all. `counts`: what penalties count of the context; None: it is counted when
    they are applied.
    """

    sampling: SamplingParams
    context: Sequence[int]
    drafts: Sequence[int] = ()
    margin: float | None = None
    num_prompt_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()
    allowed: AllowedTokens | None = None
    counts: "ContextCounts | None" = None
    threshold: float | None = None
    probabilities: Sequence[float] = ()

    @property
    def num_rows(self) -> int:
        return len(self.drafts) + 1

    @property
    def is_relaxed(self) -> bool:
        """Whether a draft may be accepted that is not the choice."""
        return self.margin is not None or self.threshold is not None

    def is_sure(self, row: int) -> bool:
        """Whether the draft that row `row` judges is accepted whatever the choice is."""
        return self.threshold is not None and self.probabilities[row] >= self.threshold

    def uniform(self, row: int) -> float:
        """The uniform number of the position that row `row` predicts."""
        return uniform_at(self.sampling.seed, len(self.context) + row)

    def forbidden(self) -> list[tuple[int, int]]:
        """(row, token) of all tokens that `min_tokens` and `bad_words` forbid."""
        if not self.sampling.forbids_tokens:
            return []
        # The place in the answer that row 0 predicts.
        first = len(self.context) - self.num_prompt_tokens
        before = [*self.context[-MAX_BAD_WORD_TOKENS:], *self.drafts]
        num_before = len(before) - len(self.drafts)
        return [
            (row, token)
            for row in range(self.num_rows)
            for token in self.sampling.forbidden_after(before[: num_before + row], first + row, self.end_token_ids)
        ]
