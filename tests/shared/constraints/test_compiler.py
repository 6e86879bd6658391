import functools
import gc
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from shared.chat.formats import CallFormat
from shared.constraints import compiler as module
from shared.constraints import trials
from shared.constraints.compiler import ConstraintCompiler
from shared.constraints.constraint import MAX_BYTES, Constraint, MessageConstraint
from shared.errors import InvalidInput, Unavailable
from tests.constrained import CONSTRAINTS, build_loaded
from tests.reasons import raises
from tests.waiting import wait_until
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
        (Constraint(choice=("a.b", "[/\n", " #")), ["a.b", "[/\n", " #"], ["a-b", "[/", "#"]),
        (Constraint(choice=tuple(f"{number:04d}" for number in range(8000))), ["0000", "7999"], ["8000", "799"]),
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
        (
            Constraint(json_schema='{"properties": {"a": {"not": {}}}}', strict=True),
            '#/properties/a: Unimplemented keys: ["not"]',
        ),
        (Constraint(json_schema='{"$ref": "https://example.com/schema"}', strict=True), "https://example.com"),
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
    with raises(InvalidInput, "CONSTRAINT_INVALID"):
        Constraint(**fields)


class CountingTrials:
    """Trials of a real process, counted. `num_bytes`: what they say of memory, if anything."""

    def __init__(self, compiler, num_bytes=None):
        tokenizer, self._trials = compiler._libraries_of_model()
        compiler._libraries = tokenizer, self
        self.num_bytes, self.count = num_bytes, 0

    def attempt(self, **request):
        self.count += 1
        verdict = self._trials.attempt(**request)
        return verdict if self.num_bytes is None else replace(verdict, num_bytes=self.num_bytes)


def test_constraints_are_kept_by_content_up_to_a_size(compiler, monkeypatch):
    trials = CountingTrials(compiler, num_bytes=0)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", int(4.5 * module.OVERHEAD_BYTES))
    first, second, third, fourth, large = (Constraint(regex=text) for text in "abcde")
    for constraint in [first, second, third, fourth] * 2:
        compiler.start(constraint)
    assert trials.count == 4
    trials.num_bytes = module.OVERHEAD_BYTES
    compiler.start(large)
    assert trials.count == 5
    compiler.start(third)
    compiler.start(fourth)
    assert trials.count == 5
    compiler.start(second)  # the two used longest ago have given way
    compiler.start(first)
    assert trials.count == 7


def test_what_answers_have_added_to_a_lexer_counts(compiler, monkeypatch):
    trials, regex, other = CountingTrials(compiler, num_bytes=0), Constraint(regex="a+"), Constraint(regex="b+")
    first, kept = compiler.compiled(regex), compiler.compiled(other)
    walked = compiler.start(regex)
    for token in [int(walked.allowed().argmax())] * 3:
        walked.push(token)
    assert first.spent_s > 0.0
    assert compiler.compiled(regex) is first
    first.spent_s = 2.0 * module.MAX_COMPILED_BYTES / module.GROWTH_PER_S
    assert not compiler.has(regex)
    second = compiler.compiled(regex)
    assert second is not first
    assert compiler.has(regex)
    # What is used gives way to no other, and is not tried again.
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 3 * module.OVERHEAD_BYTES)
    kept.spent_s = 2.0 * module.OVERHEAD_BYTES / module.GROWTH_PER_S
    assert compiler.compiled(regex) is second
    assert not compiler.has(other)
    assert compiler.compiled(other) is not kept
    assert trials.count == 2


def test_an_answer_that_brings_the_lexer_to_its_limit_harms_no_later_one(compiler, monkeypatch):
    """Answers share it. One that runs beside it ends, too, and for the same reason."""
    monkeypatch.setitem(module.LIMITS, "max_lexer_states", 60)
    constraint = Constraint(regex="(a?b?c?.?){40}(x|y){20,40}")
    costly, beside = compiler.start(constraint), compiler.start(constraint)
    token = int(beside.allowed().argmax())

    def go_on(state):
        for _ in range(100):
            state.push(int(state.allowed().argmax()))

    with raises(InvalidInput, "CONSTRAINT_TOO_COMPLEX"):
        go_on(costly)
    with raises(InvalidInput, "CONSTRAINT_TOO_COMPLEX"):
        beside.push(token)
    compiler.start(constraint).push(token)


def chain(num_links, link):
    definitions = {f"a{i}": link(f"#/$defs/a{i + 1}") for i in range(num_links)}
    last = {f"a{num_links}": {"type": "null"}}
    return Constraint(json_schema=json.dumps({"$defs": definitions | last, "$ref": "#/$defs/a0"}))


def nested(schema, _):
    return {"anyOf": [schema]}


# What ends the process that compiles it, without the limits perhaps this one.
HARMFUL = {
    "references in a chain": chain(1400, lambda to: {"$ref": to}),
    "nested anyOf in a chain": chain(
        110, lambda to: functools.reduce(lambda a, _: {"anyOf": [a]}, range(30), {"$ref": to})
    ),
    "rules in a chain": Constraint(
        lark="start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4000)) + '\na4000: "x"'
    ),
    "tools with such parameters": MessageConstraint(
        calls=CallFormat("<call>", ":", None, "</call>", "<call>", False),
        tools=(("one", '{"type": "object"}'), ("two", chain(1400, lambda to: {"items": {"$ref": to}}).json_schema)),
    ),
}


@pytest.mark.parametrize("constraint", HARMFUL.values(), ids=HARMFUL)
def test_what_ends_the_process_that_compiles_is_refused_and_remembered(compiler, constraint):
    trials = CountingTrials(compiler)
    for _ in range(2):
        with raises(InvalidInput, "CONSTRAINT_TOO_COMPLEX") as caught:
            compiler.start(constraint)
        assert caught.value.metadata == {"field": constraint.field}
    assert trials.count == 1
    compiler.start(CONSTRAINTS["choice"])


def changed_program(folder, pattern, text):
    program = folder / "shared" / "constraints" / trials.PROGRAM.name
    program.parent.mkdir(parents=True)
    program.write_text(re.sub(pattern, text, trials.PROGRAM.read_text()))
    return program


@pytest.mark.parametrize(("limit", "value"), [("COMPILE_S", 1e-6), ("MEMORY_BYTES", 1)])
def test_the_process_that_compiles_has_limits_of_time_and_memory(loaded, tmp_path, monkeypatch, limit, value):
    program = changed_program(tmp_path, rf"(?m)^{limit} = .*$", f"{limit} = {value}")
    monkeypatch.setattr(trials, "PROGRAM", program)
    monkeypatch.setenv("PYTHONPATH", str(Path(module.__file__).parents[2]))
    with raises(InvalidInput, "CONSTRAINT_TOO_COMPLEX"):
        ConstraintCompiler(loaded).start(Constraint(regex="(" * 9 + "a" + "{9})" * 9 + "{9}"))


def test_a_constraint_that_would_take_much_memory_is_refused(compiler, monkeypatch):
    large = Constraint(choice=tuple(f"{number:05d}" for number in range(8000)))
    compiler.start(large)
    monkeypatch.setattr(module, "MAX_COMPILED_BYTES", 1 << 20)
    other = ConstraintCompiler(compiler._loaded)
    with raises(InvalidInput, "CONSTRAINT_TOO_COMPLEX"):
        other.start(large)
    other.start(Constraint(regex="a+"))


def test_the_process_that_compiles_is_started_again_when_it_has_died_and_ends_with_its_compiler(loaded):
    gc.collect()
    others, compiler = children(), ConstraintCompiler(loaded)
    compiler.start(Constraint(regex="a"))
    [first] = children() - others
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: children() == others)
    compiler.start(Constraint(regex="b"))
    [second] = children() - others
    assert first != second
    assert not Path(f"/proc/{first}").exists(), "it is a zombie"
    del compiler
    gc.collect()
    assert children() == others


def children():
    """The processes that compile for this one and have not ended."""
    running = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            command = (stat.parent / "cmdline").read_bytes()
            if int(parent) == os.getpid() and state != "Z" and trials.PROGRAM.name.encode() in command:
                running.add(int(stat.parent.name))
    return running


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Constraint(lark="start: (" + " | ".join(f'"w{i}"' for i in range(700)) + ")+"), "703 items"),
        (Constraint(regex="((a{100}){100}){100}"), "too many expressions"),
    ],
)
def test_what_no_answer_could_begin_within_the_limits_of_a_token_is_refused(compiler, constraint, why):
    with raises(InvalidInput, "CONSTRAINT_TOO_COMPLEX", match=why):
        compiler.start(constraint)


def test_schemas_and_choices_may_be_large(compiler):
    properties = {f"k{i}": {"type": "integer"} for i in range(240)}
    schema = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
    tools = tuple((f"tool_{i}", json.dumps({"type": "object", "properties": {"a": {}}})) for i in range(300))
    calls = CallFormat("<call>", ":", None, "</call>", "<call>", False)
    lark = "start: " + " | ".join(f'"w{i}"' for i in range(450))
    for large in (Constraint(json_schema=schema), Constraint(lark=lark), MessageConstraint(calls=calls, tools=tools)):
        state = compiler.start(large)
        state.push(int(state.allowed().argmax()))


def test_a_process_that_ends_before_it_has_begun_refuses_nothing(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "PROGRAM", changed_program(tmp_path, "request = json.load", "os._exit(1); json.load"))
    monkeypatch.setenv("PYTHONPATH", str(Path(module.__file__).parents[2]))
    compiler = ConstraintCompiler(loaded)
    with raises(Unavailable, "CONSTRAINTS_NOT_COMPILED"):
        compiler.start(Constraint(regex="a"))
    assert not compiler.has(Constraint(regex="a"))


def test_what_a_process_took_that_was_ending_is_asked_of_the_next(loaded, tmp_path, monkeypatch):
    """A process that is killed still takes what is sent to it, as long as it is not gone."""
    ended = f"Path({str(tmp_path / 'ended')!r})"
    once = f"{ended}.exists() or ({ended}.touch(), os._exit(1))\n        with socket.socket(fileno=channels"
    monkeypatch.setattr(trials, "PROGRAM", changed_program(tmp_path, r"with socket.socket\(fileno=channels", once))
    monkeypatch.setenv("PYTHONPATH", str(Path(module.__file__).parents[2]))
    ConstraintCompiler(loaded).start(Constraint(regex="a"))
    assert (tmp_path / "ended").exists()


def test_a_process_that_does_not_answer_is_an_error_that_is_not_remembered(compiler, monkeypatch):
    compiler.warm_up()
    monkeypatch.setattr(trials, "PROGRAM", Path("/nowhere"))
    with raises(Unavailable, "CONSTRAINTS_NOT_COMPILED"):
        compiler.start(Constraint(regex="a"))
    monkeypatch.undo()
    compiler.start(Constraint(regex="a"))


def test_the_search_for_a_place_ends(compiler):
    """Each part of a schema is compiled with all definitions, so the work grows with the square of its size."""
    definitions = {
        f"d{i}": {"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(12)}} for i in range(90)
    }
    parts = {f"q{i}": {"$ref": f"#/$defs/d{i % 90}"} for i in range(300)}
    schema = json.dumps({"$defs": definitions, "type": "object", "properties": parts | {"last": {"not": {}}}})
    with raises(InvalidInput, "CONSTRAINT_INVALID") as caught:
        compiler.start(Constraint(json_schema=schema, strict=True))
    assert "Unimplemented keys" in caught.value.message


def test_answers_with_the_same_constraint_have_states_of_their_own(compiler):
    constraint = CONSTRAINTS["choice"]
    one, other = compiler.start(constraint), compiler.start(constraint)
    before = other.allowed().copy()
    one.push(int(one.allowed().argmax()))
    assert (compiler.start(constraint).allowed() == before).all()
    other.push(int(before.nonzero()[0][-1]))
    assert (other.allowed() != one.allowed()).any()


def test_threads_may_compile_at_once(compiler):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compiler.start, [Constraint(regex=f"a{{{number % 3 + 1}}}") for number in range(8)]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer": None}, "NO_TOKENIZER"),
        ({"tokenizer": object()}, "CONSTRAINTS_NOT_SUPPORTED"),
        ({"eos_token_ids": frozenset()}, "CONSTRAINTS_NOT_SUPPORTED"),
    ],
)
def test_a_model_that_cannot_be_constrained_says_so(loaded, changes, reason):
    with raises(InvalidInput, reason):
        ConstraintCompiler(replace(loaded, **changes)).start(CONSTRAINTS["choice"])


def test_a_tokenizer_that_the_library_cannot_read_is_refused(loaded, monkeypatch):
    def failing(*_, **__):
        raise ValueError("unknown")

    monkeypatch.setattr(module, "LLTokenizer", failing)
    with raises(InvalidInput, "CONSTRAINTS_NOT_SUPPORTED") as caught:
        ConstraintCompiler(loaded).start(CONSTRAINTS["choice"])
    assert "unknown" not in caught.value.message
