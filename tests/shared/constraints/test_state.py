"""A state says of every path what a matcher says that has consumed it and nothing else."""

import itertools
import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from shared.constraints import state as module
from shared.constraints.compiler import ConstraintCompiler
from shared.constraints.constraint import Constraint
from shared.constraints.state import ConstraintState
from shared.errors import InvalidInput
from tests.constrained import CONSTRAINTS, VOCABULARY_SIZE, build_loaded
from tests.reasons import raises
from tests.tiers import tiered
from tests.worker import EOS

NUM_WALKS = 30
# A token of the text "12".
OTHER = 276


@pytest.fixture(scope="module")
def loaded():
    return build_loaded()


@pytest.fixture(scope="module")
def compiler(loaded):
    return ConstraintCompiler(loaded)


def after(compiler: ConstraintCompiler, constraint: Constraint, tokens: list[int]) -> np.ndarray:
    """What the library's mask allows after these tokens."""
    if EOS in tokens:
        return np.ones(VOCABULARY_SIZE, np.bool_)
    matcher = compiler.compiled(constraint).matcher.deep_copy()
    assert matcher.consume_tokens(tokens)
    return np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0


def one_by_one(state: ConstraintState, path: list[int]) -> list[bool]:
    return [state.allows(path, token) for token in range(VOCABULARY_SIZE)]


def walk(state: ConstraintState, rng: random.Random, num_tokens: int) -> list[int]:
    path: list[int] = []
    while len(path) < num_tokens and path[-1:] != [EOS]:
        path.append(rng.choice(np.flatnonzero(state.allowed(path)).tolist()))
    return path


@pytest.mark.parametrize("name", tiered(CONSTRAINTS, {"object", "lark"}))
def test_what_it_allows_depends_on_the_tokens_alone(compiler, name):
    """After drafts of all kinds, right ones and wrong ones, one chain after another."""
    rng, constraint = random.Random(name), CONSTRAINTS[name]
    state, final = compiler.start(constraint), []
    for _ in range(NUM_WALKS):
        paths = [walk(state, rng, rng.randint(0, 6)) for _ in range(3)]
        rng.shuffle(paths)
        for path in [p[: rng.randint(0, len(p))] for p in paths] + paths:
            expected = after(compiler, constraint, [*final, *path])
            np.testing.assert_array_equal(one_by_one(state, path), expected)
            np.testing.assert_array_equal(state.allowed(path), expected)
            [only, *others] = np.flatnonzero(expected).tolist()
            assert state.forced(path) == (only if not others else None)
        # Some of a path becomes final, and then another token.
        kept = rng.choice(paths)[: rng.randint(0, 3)]
        for token in kept:
            state.push(token)
        other = walk(state, rng, 1)
        state.push(*other)
        final += [*kept, *other]
        if EOS in final:
            state, final = compiler.start(constraint), []


def test_a_row_belongs_to_the_drafts_before_it(compiler):
    state = compiler.start(CONSTRAINTS["pairs"])
    path = walk(state, random.Random(1), 2)
    drafts = walk(state, random.Random(2), 7)[len(path) :]
    rows = state.rows(drafts)
    for number in range(len(drafts) + 1):
        np.testing.assert_array_equal(rows.mask(number), state.allowed(drafts[:number]))
        expected = one_by_one(state, drafts[:number])
        assert [rows.allows(number, token) for token in range(VOCABULARY_SIZE)] == expected
        assert rows.forced(number) == state.forced(drafts[:number])
    assert len({rows.mask(number).tobytes() for number in range(len(drafts) + 1)}) > 1


def test_tokens_without_text_are_never_allowed(compiler):
    for constraint in CONSTRAINTS.values():
        assert not compiler.start(constraint).allowed()[263 + 14 :].any()


def test_the_end_is_allowed_where_the_text_is_complete_and_nothing_counts_after_it(compiler):
    state = compiler.start(Constraint(choice=("ab", "abab")))
    ab = int(np.flatnonzero(state.allowed())[-1])
    assert not state.allowed()[EOS]
    assert np.flatnonzero(state.allowed([ab])).tolist().count(EOS) == 1
    assert state.forced([ab, ab]) == EOS
    assert state.allowed([ab, EOS]).all()
    assert state.forced([ab, ab]) == EOS, "the end is no part of the matcher's path"
    for token in (ab, EOS):
        state.push(token)
    assert state.allowed().all()


def test_each_of_several_ends_is_allowed_and_none_is_forced(compiler):
    ends = frozenset({EOS, OTHER})
    several = ConstraintCompiler(replace(build_loaded(), eos_token_ids=ends))
    for regex, before in [("ab", 1), ("(ab)+", 2), ("ab|abab", 1)]:
        state = several.start(Constraint(regex=regex))
        ab = int(np.flatnonzero(state.allowed())[-1])
        for path in ([], [ab], [ab] * before):
            np.testing.assert_array_equal(one_by_one(state, path), state.allowed(path))
            is_forced = state.allowed(path).sum() == 1
            assert (state.forced(path) is not None) == is_forced
        assert all(state.allows([ab], end) for end in ends)


def test_what_begins_forced_text_is_known_where_other_tokens_begin_it_too(compiler):
    tokenizer = build_loaded().tokenizer
    x, quote, colon, longer = tokenizer.convert_tokens_to_ids(["x", '"', ":", '":'])
    state = compiler.start(Constraint(regex='x?x"(:|[a-z])'))
    assert state.begun() == x == state.forced()
    assert state.begun([x]) is None, "two letters may follow"
    assert np.flatnonzero(state.allowed([x, x])).tolist() == sorted([quote, longer])
    assert state.forced([x, x]) is None
    assert state.begun([x, x]) == quote
    assert state.begun([x, x, longer]) is None
    assert state.begun([x, x, longer, EOS]) is None
    for token in (x, x, quote):
        state.push(token)
    assert state.begun() is None
    assert state.allows([], colon)


def test_a_token_that_is_not_allowed_is_refused(compiler):
    state = compiler.start(CONSTRAINTS["object"])
    for token in (EOS, 1, VOCABULARY_SIZE - 1):
        with raises(InvalidInput, "CONSTRAINT_BROKEN"):
            state.push(token)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint(lark='start: "b" more\nmore: more'), "CONSTRAINT_INVALID"),
        (Constraint(regex="((a{100}){100}){100}"), "CONSTRAINT_TOO_COMPLEX"),
    ],
)
def test_a_place_that_leads_nowhere_and_one_that_takes_too_much_work_are_errors(compiler, constraint, reason):
    def go_on() -> None:
        state = compiler.start(constraint)
        for number in range(3):
            state.push(*walk(state, random.Random(number), 1))

    with raises(InvalidInput, reason):
        go_on()


@pytest.mark.parametrize(
    ("slow", "asks_masks", "why"),
    [
        ({"thread_time"}, True, "CONSTRAINT_TOO_COMPLEX"),
        ({"thread_time", "perf_counter"}, False, "CONSTRAINT_TOO_COMPLEX"),
        ({"perf_counter"}, True, None),
    ],
)
def test_a_grammar_that_takes_too_long_ends_its_answer(compiler, monkeypatch, slow, asks_masks, why):
    """Whatever the library's limits allow. Waits for other threads and other processes are none of its work."""
    tokens = walk(compiler.start(CONSTRAINTS["any object"]), random.Random(1), 20)
    assert len(tokens) == 20
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(module, clock, itertools.count(0.0, 0.1 if clock in slow else 0.0).__next__)
    state = compiler.start(CONSTRAINTS["any object"])

    def go_on() -> None:
        for token in tokens:
            if asks_masks:
                state.allowed()
            state.push(token)

    with raises(InvalidInput, why) if why else nullcontext():
        go_on()


MANY = "".join(f"\na{i}: a{i * 7 % 9} many | /a/ | " for i in range(9))


@pytest.mark.parametrize(
    ("lark", "text"),
    [
        ('start: x\nx: x x | x x x | "(" x ")" | /[a-z]/ | ', "a"),
        ('start: e\ne: e e | e e e | /[a-z ]{1,3}/ | ""', "a b"),
        ("start: many\nmany: many many | " + "".join(f"a{i} | " for i in range(9)) + MANY, "a"),
    ],
)
def test_the_library_bounds_what_a_token_takes(compiler, loaded, lark, text):
    """Without limits each token of an ambiguous grammar takes longer than the one before, cubically."""
    tokens = loaded.tokenizer(text * 600, add_special_tokens=False)["input_ids"]

    def consume() -> None:
        state = compiler.start(Constraint(lark=lark))
        for token in tokens:
            state.push(token)
            state.allowed()

    with pytest.raises(InvalidInput) as caught:
        consume()
    assert caught.value.reason in ("CONSTRAINT_TOO_COMPLEX", "CONSTRAINT_INVALID")


@pytest.mark.parametrize("ends", [{EOS, 40}, {40, 41}, {40}])
def test_an_end_token_that_is_text_ends_the_answer_and_is_no_part_of_it(loaded, ends):
    compiler = ConstraintCompiler(replace(loaded, eos_token_ids=frozenset(ends)))
    state = compiler.start(Constraint(json_object=True))
    for is_complete, text in ((False, '{"n": "'), (True, '"}')):
        for token in loaded.tokenizer(text)["input_ids"]:
            state.push(token)
        allowed = state.allowed().tolist()
        assert allowed == one_by_one(state, [])
        assert [allowed[token] for token in ends] == [is_complete] * len(ends)
    word = loaded.tokenizer.decode([40])
    state = compiler.start(Constraint(choice=(word, "x")))
    assert not state.allowed()[40]
    with raises(InvalidInput, "CONSTRAINT_INVALID"):  # only that token could write it
        compiler.start(Constraint(choice=(word,))).allowed()
