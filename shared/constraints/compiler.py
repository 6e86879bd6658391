"""Compiles constraints for one model."""

import json
from collections import OrderedDict
from contextlib import suppress
from copy import copy
from sys import getsizeof
from threading import Lock
from typing import Any

import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from transformers import PreTrainedTokenizerFast

from shared.constraints.constraint import Constraint, MessageConstraint, invalid
from shared.constraints.message import message_grammar
from shared.constraints.state import DEAD_END, ConstraintState
from shared.constraints.trials import Trials
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

log = structlog.get_logger("neap.constraints")

# Compiled constraints and refusals are kept up to this size, each counted with its text and OVERHEAD_BYTES.
MAX_KEPT_BYTES = 64 << 20
OVERHEAD_BYTES = 64 << 10
# Of one compiled constraint.
MAX_COMPILED_BYTES = 32 << 20
# What ambiguous grammars take at a token grows with the cube of these items, what regular expressions keep with the
# lexer's states, at one or two kilobytes each. Schemas of Kubernetes need a tenth.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "step_max_items": 10_000,
    "max_lexer_states": 10_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
}
# JSON in one line, as most models write it. If they could choose between kinds of white space, hardly any token would
# be forced, and some models would go on with white space for ever.
JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_REASON_CHARACTERS = 400

_AnyConstraint = Constraint | MessageConstraint


class ConstraintCompiler:
    """Thread-safe. A constraint is compiled in a process of its own first, where it can harm nobody, and here only if
    it stays within the limits (`trial_process`). This takes milliseconds to seconds, so it is not for the engine's
    thread. Compiled constraints and refusals are kept by their content."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock, self._reading = Lock(), Lock()
        self._libraries: tuple[LLTokenizer, Trials] | None = None
        # The least recently used first, with its size.
        self._kept: OrderedDict[_AnyConstraint, tuple[LLMatcher | InvalidInput, int]] = OrderedDict()

    def start(self, constraint: _AnyConstraint) -> ConstraintState:
        """The state of an answer without tokens.

        Raises `InvalidInput` (reasons CONSTRAINT_INVALID with its place, CONSTRAINT_TOO_COMPLEX, NO_TOKENIZER,
        CONSTRAINTS_NOT_SUPPORTED), `Unavailable`.
        """
        loaded = self._loaded
        matcher = self.compiled(constraint).deep_copy()
        return ConstraintState(matcher, self._libraries_of_model()[0], loaded.vocabulary_size, loaded.eos_token_ids)

    def compiled(self, constraint: _AnyConstraint) -> LLMatcher:
        """Compiles it, unless it is kept. Raises as `start` does."""
        with self._lock:
            known, num_bytes = self._kept.pop(constraint, (None, 0))
            if known is not None:
                self._kept[constraint] = known, num_bytes
        if known is None:
            try:
                known, num_bytes = self._compile(constraint)
            except InvalidInput as error:
                known, num_bytes = error, 0
            self._keep(constraint, known, num_bytes + OVERHEAD_BYTES + _num_bytes(constraint))
        if isinstance(known, InvalidInput):
            # A new one each time, because a traceback is added to what is raised.
            raise InvalidInput(known.message, reason=known.reason, metadata=known.metadata)
        return known

    def _keep(self, constraint: _AnyConstraint, compiled: LLMatcher | InvalidInput, num_bytes: int) -> None:
        with self._lock:
            self._kept[constraint] = compiled, num_bytes
            sizes = sum(size for _, size in self._kept.values())
            while sizes > MAX_KEPT_BYTES:
                _, (_, size) = self._kept.popitem(last=False)
                sizes -= size

    def _compile(self, constraint: _AnyConstraint) -> tuple[LLMatcher, int]:
        """The compiled constraint, and the bytes that it takes."""
        tokenizer, trials = self._libraries_of_model()
        try:
            if isinstance(constraint, MessageConstraint):
                grammar = message_grammar(constraint, grammar_of, self._special_tokens(tokenizer))
            else:
                grammar = grammar_of(constraint)
        except ValueError as error:
            raise invalid(_shortened(str(error)), constraint.field) from error
        verdict = trials.attempt(grammar=grammar, schemas=constraint.schemas, limits=LIMITS, json_options=JSON_OPTIONS)
        if verdict is None or verdict.num_bytes > MAX_COMPILED_BYTES:
            raise InvalidInput(
                f"{constraint.field}: to compile it takes too much time or memory",
                reason="CONSTRAINT_TOO_COMPLEX",
                metadata={"field": constraint.field},
            )
        if verdict.error is not None:
            if verdict.error.startswith(DEAD_END):
                raise invalid("no text fulfils it", constraint.field)
            place = f"{verdict.place}: " if verdict.place else ""
            raise invalid(_shortened(f"{place}{verdict.error}"), verdict.field or constraint.field)
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        # Copies know what the first tokens may be.
        matcher.compute_logit_bias()
        return matcher, verdict.num_bytes

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
    backend = copy(loaded.tokenizer.backend_tokenizer)
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


def _not_supported(why: str) -> InvalidInput:
    return InvalidInput(f"answers of this model cannot be constrained: {why}", reason="CONSTRAINTS_NOT_SUPPORTED")


def grammar_of(constraint: Constraint) -> str:
    """The constraint in the library's own format. Raises ValueError for a schema that is no JSON."""
    if constraint.choice is not None:
        return grammar_from("choice", json.dumps(constraint.choice, ensure_ascii=False))
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.lark is not None:
        return LLMatcher.grammar_from_lark(constraint.lark)
    schema = '{"type": "object"}' if constraint.json_schema is None else constraint.json_schema
    return LLMatcher.grammar_from_json_schema(schema, JSON_OPTIONS)


def _num_bytes(constraint: _AnyConstraint) -> int:
    """Of its texts, which are kept with it."""
    if isinstance(constraint, MessageConstraint):
        return sum(getsizeof(schema) for _, schema in constraint.schemas)
    texts = constraint.choice or [constraint.json_schema or constraint.regex or constraint.lark or ""]
    return sum(map(getsizeof, texts))


def _shortened(why: str) -> str:
    why = why.removesuffix("<non-verbose/>").rstrip()
    return why if len(why) <= MAX_REASON_CHARACTERS else f"{why[:MAX_REASON_CHARACTERS]}…"
