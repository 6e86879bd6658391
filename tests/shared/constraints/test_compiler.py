import threading
from dataclasses import replace

import pytest

from shared.constraints import compiler as module
from shared.constraints.compiler import MAX_KEPT, ConstraintCompiler
from shared.constraints.constraint import MAX_BYTES, Constraint
from shared.errors import InvalidInput
from tests.constrained import CONSTRAINTS, build_loaded
from tests.worker import EOS


@pytest.fixture(scope="module")
def loaded():
    return build_loaded()


@pytest.fixture
def compiler(loaded):
    return ConstraintCompiler(loaded)


def fits(compiler, loaded, constraint, text):
    """Whether the whole text fulfils the constraint."""
    state = compiler.start(constraint)
    for token in [*loaded.tokenizer(text)["input_ids"], EOS]:
        if not state.allowed()[token]:
            return False
        state.push(token)
    return True


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (
            CONSTRAINTS["object"],
            ['{"hello": "é", "kind": "é😀", "list": []}'],
            ['{"hello": "é", "kind": "é😀"}', '{"hello":"é","kind":"thin","list":[]}'],
        ),
        (Constraint(json_object=True), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{"]),
        (Constraint(regex="a+|é"), ["a", "aaa", "é"], ["", "ab", "ba", "éé"]),
        (Constraint(lark='start: "(" start? ")"'), ["()", "((()))"], ["(()", "()()", ""]),
        (CONSTRAINTS["choice"], ["hell", "é😀", 'a "quoted" text\\', ""], ["hel", "é", "hello"]),
        (Constraint(json_schema='{"enum": ["é😀", "\\u0000"]}'), ['"é😀"'], ['"é"', '"\x00"']),
    ],
)
def test_every_form_allows_its_texts_and_no_others(compiler, loaded, constraint, good, bad):
    assert [fits(compiler, loaded, constraint, text) for text in good] == [True] * len(good)
    assert [fits(compiler, loaded, constraint, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("constraint", "place"),
    [
        (Constraint(json_schema='{"type": "objekt"}'), "schema: #: Invalid type: objekt"),
        (
            Constraint(
                json_schema='{"$defs": {"one": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/one"}, '
                '"b": {"items": {"anyOf": [{"type": "null"}, {"pattern": "(", "type": "string"}]}}}}'
            ),
            "schema: #/properties/b/items/anyOf/1: regex",
        ),
        (Constraint(json_schema='{"type": "string",\n "min'), "line 2"),
        (Constraint(json_schema='{"properties": {"a": {"not": {}}}}'), '#/properties/a: Unimplemented keys: ["not"]'),
        (Constraint(json_schema='{"$ref": "https://example.com/schema"}'), "https://example.com"),
        (Constraint(json_schema='{"items": ' * 3000 + "{}" + "}" * 3000), "recursion"),
        (Constraint(regex="a(b"), "unclosed group"),
        (Constraint(lark='start: "a" b\nc: "x"'), "1(8)"),
        (Constraint(lark=f'start: {"(" * 9000}"a"{")" * 9000}'), "nested"),
        # Nobody can satisfy these.
        (Constraint(json_schema='{"type": "object", "properties": {"a": false}, "required": ["a"]}'), "'a'"),
        (Constraint(json_schema='{"type": "integer", "minimum": 3, "maximum": 2}'), "minimum (3)"),
        (Constraint(json_schema='{"enum": []}'), "nsatisfiable"),
        (Constraint(lark="start: start"), "no text"),
    ],
)
def test_a_bad_constraint_is_refused_with_the_place(compiler, constraint, place):
    with pytest.raises(InvalidInput) as caught:
        compiler.start(constraint)
    error = caught.value
    assert error.reason == "CONSTRAINT_INVALID"
    assert error.metadata == {"field": f"constraint.{constraint.form}"}
    assert place in error.message
    assert len(error.message) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "lark": "b"},
        {"choice": ()},
        {"regex": "a" * (MAX_BYTES + 1)},
        {"choice": ("é" * (MAX_BYTES // 2), "a")},
    ],
)
def test_one_form_of_a_bounded_size_is_needed(fields):
    with pytest.raises(InvalidInput) as caught:
        Constraint(**fields)
    assert caught.value.reason == "CONSTRAINT_INVALID"


def test_compiled_constraints_are_kept_by_content_and_bounded(compiler, monkeypatch):
    compiled = []
    own = module.LLMatcher

    class Counting:
        grammar_from_regex = own.grammar_from_regex

        def __new__(cls, tokenizer, grammar, **options):
            compiled.append(grammar)
            return own(tokenizer, grammar, **options)

    monkeypatch.setattr(module, "LLMatcher", Counting)
    regexes = ["a" * length for length in range(1, MAX_KEPT + 2)]
    for regex in [*regexes[:-1], *regexes[:-1]]:
        compiler.start(Constraint(regex="".join(regex)))
    assert len(compiled) == MAX_KEPT
    compiler.start(Constraint(regex=regexes[-1]))
    compiler.start(Constraint(regex=regexes[0]))  # the oldest has given way
    assert len(compiled) == MAX_KEPT + 2


def test_answers_with_the_same_constraint_have_states_of_their_own(compiler):
    constraint = CONSTRAINTS["choice"]
    one, other = compiler.start(constraint), compiler.start(constraint)
    before = other.allowed().copy()
    one.push(int(one.allowed().argmax()))
    assert (compiler.start(constraint).allowed() == before).all()
    other.push(int(before.nonzero()[0][-1]))
    assert (other.allowed() != one.allowed()).any()


def test_threads_may_compile_at_once(compiler):
    states, threads = [], []
    for number in range(8):
        constraint = Constraint(regex=f"a{{{number % 3 + 1}}}")
        threads.append(threading.Thread(target=lambda own: states.append(compiler.start(own)), args=[constraint]))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(states) == 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer": None}, "NO_TOKENIZER"),
        ({"tokenizer": object()}, "CONSTRAINTS_NOT_SUPPORTED"),
        ({"eos_token_ids": frozenset()}, "CONSTRAINTS_NOT_SUPPORTED"),
    ],
)
def test_a_model_that_cannot_be_constrained_says_so(loaded, changes, reason):
    with pytest.raises(InvalidInput) as caught:
        ConstraintCompiler(replace(loaded, **changes)).start(CONSTRAINTS["choice"])
    assert caught.value.reason == reason


def test_a_tokenizer_that_the_library_cannot_read_is_refused(loaded, monkeypatch):
    def failing(*_, **__):
        raise ValueError("unknown")

    monkeypatch.setattr(module, "from_tokenizer", failing)
    with pytest.raises(InvalidInput) as caught:
        ConstraintCompiler(loaded).start(CONSTRAINTS["choice"])
    assert caught.value.reason == "CONSTRAINTS_NOT_SUPPORTED"
    assert "unknown" not in caught.value.message
