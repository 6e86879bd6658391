"""Compiles constraints for one model."""

import re
from collections import OrderedDict
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from sys import getsizeof
from threading import Lock
from typing import Any

import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from transformers import PreTrainedTokenizerFast

from shared.constraints.constraint import Constraint, MessageConstraint, invalid
from shared.constraints.message_grammar import message_grammar
from shared.constraints.state import DEAD_END, Compiled, ConstraintState
from shared.constraints.trials import Trials
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

log = structlog.get_logger("neap.constraints")

# What is known of constraints is kept up to this size, each counted with its text and OVERHEAD_BYTES.
MAX_KEPT_BYTES = 64 << 20
OVERHEAD_BYTES = 64 << 10
# The size of one compiled constraint at most.
MAX_COMPILED_BYTES = 32 << 20
# What a lexer keeps of a second's work at most. The library does not say how much it keeps.
GROWTH_PER_S = 256 << 20
# What ambiguous grammars take at a token grows with the cube of these items, what regular expressions keep with the
# lexer's states, at one or two kilobytes each. Schemas of Kubernetes need a tenth.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "step_max_items": 4_000,
    "max_lexer_states": 10_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
}
# Those of a client's own grammar, which may be ambiguous from a late place on.
LARK_LIMITS = LIMITS | {"max_items_in_row": 500}
# JSON in one line, as most models write it. If they could choose between kinds of white space, hardly any token would
# be forced, and some models would go on with white space for ever.
JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_REASON_CHARACTERS = 400

_AnyConstraint = Constraint | MessageConstraint


@dataclass
class _Known:
    """Why a constraint is refused, or that it may be compiled to `compiled_bytes`. `compiled`: None once its place was
    needed."""

    text_bytes: int
    refusal: InvalidInput | None = None
    compiled_bytes: int = 0
    compiled: Compiled | None = None

    @property
    def num_bytes(self) -> int:
        grown = 0 if self.compiled is None else self.compiled_bytes + int(GROWTH_PER_S * self.compiled.spent_s)
        return OVERHEAD_BYTES + self.text_bytes + grown


class ConstraintCompiler:
    """Thread-safe. A constraint is compiled in a process of its own first, where it can harm nobody, and here only if
    it stays within the limits (`trial_process`). This takes milliseconds to seconds, so it is not for the engine's
    thread. Compiled constraints and refusals are kept by their content."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock, self._reading = Lock(), Lock()
        self._libraries: tuple[LLTokenizer, Trials] | None = None
        # The least recently used first.
        self._known: OrderedDict[_AnyConstraint, _Known] = OrderedDict()

    def start(self, constraint: _AnyConstraint) -> ConstraintState:
        """The state of an answer without tokens.

        Raises `InvalidInput` (reasons CONSTRAINT_INVALID with its place, CONSTRAINT_TOO_COMPLEX, NO_TOKENIZER,
        CONSTRAINTS_NOT_SUPPORTED), `Unavailable`.
        """
        loaded, compiled = self._loaded, self.compiled(constraint)
        return ConstraintState(compiled, self._libraries_of_model()[0], loaded.vocabulary_size, loaded.eos_token_ids)

    def compiled(self, constraint: _AnyConstraint) -> Compiled:
        """Compiles it, unless it is kept. Raises as `start` does."""
        known = self._find(constraint)
        if known is None:
            text_bytes = _num_bytes(constraint)
            try:
                known = _Known(text_bytes, compiled_bytes=self._try(constraint))
            except InvalidInput as error:
                known = _Known(text_bytes, error)
        if known.refusal is not None:
            self._keep(constraint, known)
            # A new one each time, because a traceback is added to what is raised.
            raise InvalidInput(known.refusal.message, reason=known.refusal.reason, metadata=known.refusal.metadata)
        if (compiled := known.compiled) is None:
            compiled = known.compiled = self._compile(constraint)
        self._keep(constraint, known)
        return compiled

    def has(self, constraint: _AnyConstraint) -> bool:
        """Whether `compiled` need not compile."""
        known = self._find(constraint)
        return known is not None and (known.refusal or known.compiled) is not None

    def _find(self, constraint: _AnyConstraint) -> _Known | None:
        """What is known, without a lexer that answers have made too large or brought to its limit."""
        with self._lock:
            known = self._known.get(constraint)
            compiled = known.compiled if known else None
            if known and compiled and (compiled.has_failed or known.num_bytes > MAX_COMPILED_BYTES):
                known.compiled = None
            return known

    def _keep(self, constraint: _AnyConstraint, known: _Known) -> None:
        with self._lock:
            self._known[constraint] = known
            self._known.move_to_end(constraint)
            sizes = sum(each.num_bytes for each in self._known.values())
            for other, each in [*self._known.items()]:
                if sizes <= MAX_KEPT_BYTES:
                    return
                sizes -= each.num_bytes
                each.compiled = None
                sizes += each.num_bytes
                if sizes > MAX_KEPT_BYTES:
                    del self._known[other]
                    sizes -= each.num_bytes

    def _try(self, constraint: _AnyConstraint) -> int:
        """The bytes that it takes when it is compiled. Raises as `start` does."""
        grammar, trials = self._grammar(constraint), self._libraries_of_model()[1]
        limits, schemas = _limits(constraint), constraint.schemas
        verdict = trials.attempt(grammar=grammar, schemas=schemas, limits=limits, json_options=JSON_OPTIONS)
        if verdict is None or verdict.num_bytes > MAX_COMPILED_BYTES:
            raise _too_complex("to compile it takes too much time or memory", constraint.field)
        if verdict.error is None:
            return verdict.num_bytes
        if verdict.error.startswith(DEAD_END):
            raise invalid("no text fulfils it", constraint.field)
        place = f"{verdict.place}: " if verdict.place else ""
        error = _too_complex if verdict.is_limit else invalid
        raise error(_shortened(f"{place}{verdict.error}"), verdict.field or constraint.field)

    def _compile(self, constraint: _AnyConstraint) -> Compiled:
        """Compiles here what has been tried."""
        limits = LLParserLimits(**_limits(constraint), verbose_errors=False)
        tokenizer = self._libraries_of_model()[0]
        matcher = LLMatcher(tokenizer, self._grammar(constraint), log_level=0, limits=limits)
        # Copies know what the first tokens may be.
        matcher.compute_logit_bias()
        return Compiled(matcher)

    def _grammar(self, constraint: _AnyConstraint) -> str:
        try:
            if isinstance(constraint, MessageConstraint):
                special = self._special_tokens(self._libraries_of_model()[0])
                return message_grammar(constraint, grammar_of, special)
            return grammar_of(constraint)
        except ValueError as error:
            raise invalid(_shortened(str(error)), constraint.field) from error

    def _special_tokens(self, tokenizer: LLTokenizer) -> dict[str, int]:
        """Those that the library tells apart from the text that they stand for."""
        assert self._loaded.tokenizer is not None
        added = self._loaded.tokenizer.get_added_vocab()
        return {text: token for text, token in added.items() if tokenizer.is_special_token(token)}

    def warm_up(self) -> None:
        """Reads the tokenizer, if the model can be constrained, which would stop all threads for a part of a second."""
        with suppress(InvalidInput):
            self._libraries_of_model()

    def _libraries_of_model(self) -> tuple[LLTokenizer, Trials]:
        with self._reading:
            if self._libraries is None:
                described = _described(self._loaded)
                self._libraries = _tokenizer(self._loaded.model_id, described), Trials(described)
            return self._libraries


def _described(loaded: LoadedModel) -> dict[str, Any]:
    """The arguments of the library's tokenizer."""
    if loaded.tokenizer is None:
        raise InvalidInput("this model has no tokenizer, so its answers cannot be constrained", reason="NO_TOKENIZER")
    if not isinstance(loaded.tokenizer, PreTrainedTokenizerFast):
        raise _not_supported(f"its tokenizer is a {type(loaded.tokenizer).__name__}")
    if not loaded.eos_token_ids:
        raise _not_supported("it has no end-of-sequence token")
    # The library's `from_tokenizer` does the same, but keeps the text to itself.
    backend = loaded.tokenizer.backend_tokenizer
    if backend.padding is not None or backend.truncation is not None:
        backend = copy(backend)  # takes four times as long as its text
        backend.no_padding()
        backend.no_truncation()
    return {
        "tokenizer": backend.to_str(),
        "n_vocab": loaded.vocabulary_size,
        "eos_token": sorted(loaded.eos_token_ids),
    }


def _tokenizer(model_id: str, described: dict[str, Any]) -> LLTokenizer:
    try:
        return LLTokenizer(**described)
    except Exception as error:  # the library's own, of any kind
        log.warning("a tokenizer cannot be used", model_id=model_id, why=str(error))
        raise _not_supported("llguidance does not know its tokenizer") from error


def _too_complex(why: str, field: str) -> InvalidInput:
    return InvalidInput(f"{field}: {why}", reason="CONSTRAINT_TOO_COMPLEX", metadata={"field": field})


def _not_supported(why: str) -> InvalidInput:
    return InvalidInput(f"answers of this model cannot be constrained: {why}", reason="CONSTRAINTS_NOT_SUPPORTED")


def grammar_of(constraint: Constraint) -> str:
    """The constraint in the library's own format. Raises ValueError for a schema that is no JSON."""
    if constraint.choice is not None:
        # One lexeme: as a rule of Lark each text would be an item of the parser, which may have a thousand.
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, constraint.choice)))
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.lark is not None:
        return LLMatcher.grammar_from_lark(constraint.lark)
    schema = '{"type": "object"}' if constraint.json_schema is None else constraint.json_schema
    return LLMatcher.grammar_from_json_schema(schema, JSON_OPTIONS)


def _limits(constraint: _AnyConstraint) -> dict[str, Any]:
    own = constraint.answer if isinstance(constraint, MessageConstraint) else constraint
    return LIMITS if own is None or own.lark is None else LARK_LIMITS


def _num_bytes(constraint: _AnyConstraint) -> int:
    """The size of its texts, which are kept with it."""
    texts = [*constraint.unenforced, *(schema for _, schema in constraint.schemas)]
    if isinstance(constraint, Constraint):
        texts += constraint.choice or [constraint.regex or constraint.lark or ""]
    return sum(map(getsizeof, texts))


def _shortened(why: str) -> str:
    why = why.removesuffix("<non-verbose/>").rstrip()
    return why if len(why) <= MAX_REASON_CHARACTERS else f"{why[:MAX_REASON_CHARACTERS]}…"
