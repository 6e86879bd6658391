"""Compiles constraints for one model."""

import json
from functools import lru_cache
from threading import Lock

import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from shared.constraints.constraint import Constraint, MessageConstraint, invalid
from shared.constraints.message import message_grammar
from shared.constraints.schema_place import place_of_error
from shared.constraints.state import DEAD_END, ConstraintState
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

log = structlog.get_logger("neap.constraints")

# Compiled constraints that are kept.
MAX_KEPT = 32
# A state of the lexer takes one or two kilobytes. The other limits are the library's, which bound compilation to a
# second and a step to milliseconds.
MAX_LEXER_STATES = 50_000
MAX_REASON_CHARACTERS = 400


class ConstraintCompiler:
    """Thread-safe. Compilation takes milliseconds to a second, so it is not for the engine's thread. The last
    `MAX_KEPT` compiled constraints are kept, by their content."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(MAX_KEPT)(self._compile)

    def start(self, constraint: Constraint | MessageConstraint) -> ConstraintState:
        """The state of an answer without tokens.

        Raises `InvalidInput` (reasons CONSTRAINT_INVALID with its place, NO_TOKENIZER, CONSTRAINTS_NOT_SUPPORTED).
        """
        loaded = self._loaded
        matcher = self._compiled(constraint).deep_copy()
        return ConstraintState(matcher, self._tokenizer_of_model(), loaded.vocabulary_size, loaded.eos_token_ids)

    def _compile(self, constraint: Constraint | MessageConstraint) -> LLMatcher:
        tokenizer = self._tokenizer_of_model()
        try:
            if isinstance(constraint, MessageConstraint):
                grammar = message_grammar(constraint, grammar_of, self._special_tokens(tokenizer))
            else:
                grammar = grammar_of(constraint)
        except ValueError as error:
            raise invalid(_shortened(str(error)), constraint.field) from error
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        # What the first tokens may be can take longer than the rest, and fail. Copies know it.
        if not matcher.is_error():
            matcher.compute_logit_bias()
        if matcher.is_error():
            why = matcher.get_error()
            if why.startswith(DEAD_END):
                raise invalid("no text fulfils it", constraint.field)
            for where, schema in constraint.schemas:
                if problem := self._error_of_schema(schema):
                    place = place_of_error(schema, problem, self._error_of_schema)
                    raise invalid(_shortened(f"{place}: {problem}"), where)
            raise invalid(_shortened(why), constraint.field)
        return matcher

    def _error_of_schema(self, schema: str) -> str:
        grammar = grammar_of(Constraint(json_schema=schema))
        limits = LLParserLimits(verbose_errors=False)
        return LLMatcher(self._tokenizer_of_model(), grammar, log_level=0, limits=limits).get_error()

    def _special_tokens(self, tokenizer: LLTokenizer) -> dict[str, int]:
        """Those that the library tells apart from the text that they stand for."""
        assert self._loaded.tokenizer is not None
        added = self._loaded.tokenizer.get_added_vocab()
        return {text: token for text, token in added.items() if tokenizer.is_special_token(token)}

    def _tokenizer_of_model(self) -> LLTokenizer:
        """Made at the first use, which takes about a second."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._loaded)
            return self._tokenizer


def _tokenizer(loaded: LoadedModel) -> LLTokenizer:
    if loaded.tokenizer is None:
        raise InvalidInput("this model has no tokenizer, so its answers cannot be constrained", reason="NO_TOKENIZER")
    if not isinstance(loaded.tokenizer, PreTrainedTokenizerFast):
        raise _not_supported(f"its tokenizer is a {type(loaded.tokenizer).__name__}")
    if not loaded.eos_token_ids:
        raise _not_supported("it has no end-of-sequence token")
    try:
        return from_tokenizer(loaded.tokenizer, n_vocab=loaded.vocabulary_size, eos_token=sorted(loaded.eos_token_ids))
    except Exception as error:  # the library's own, of any kind
        log.warning("a tokenizer cannot be used", model_id=loaded.model_id, why=str(error))
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
    # JSON in one line, as most models write it. If they could choose between kinds of white space, hardly any token
    # would be forced, and some models would go on with white space for ever.
    return LLMatcher.grammar_from_json_schema(
        schema, {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )


def _shortened(why: str) -> str:
    why = why.removesuffix("<non-verbose/>").rstrip()
    return why if len(why) <= MAX_REASON_CHARACTERS else f"{why[:MAX_REASON_CHARACTERS]}…"
