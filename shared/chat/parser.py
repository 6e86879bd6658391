"""Takes an answer apart as it is written: reasoning, text, and calls of tools."""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from shared.chat.formats import ID, NAME_CHARACTERS, NUM_ID_CHARACTERS, CallFormat

FENCE = "```"
# White space before tags that is dropped, at most: it is held back until the tag is there.
MAX_SPACE = 64


@dataclass(frozen=True)
class CallPart:
    """A piece of a call. The first has its `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class MessagePart:
    """What a piece of an answer brings."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class AnswerParser(ABC):
    """Reads an answer in states. Each takes what it can from the buffer, and returns whether another one goes on with
    the rest. `num_reasoning_tokens`: those of reasoning, with its tags or headers."""

    _state: Callable[[MessagePart], bool]

    def __init__(self) -> None:
        self._buffer, self._is_at_end = "", False
        self._num_tokens = self.num_reasoning_tokens = 0

    def push(self, texts: Sequence[str]) -> MessagePart:
        """The texts of some tokens."""
        part = MessagePart()
        for text in texts:
            self._num_tokens += 1
            self._read(text, part)
        return part

    def finish(self, text: str) -> MessagePart:
        """The last part of an answer that ends with `text`."""
        self._is_at_end = True
        part = MessagePart()
        self._read(text, part)
        return part

    def _read(self, text: str, part: MessagePart) -> None:
        self._buffer += text
        was_reasoning = self._is_in_reasoning()
        while self._state(part):
            pass
        self._count(was_reasoning or self._is_in_reasoning())

    @abstractmethod
    def _is_in_reasoning(self) -> bool: ...

    @abstractmethod
    def _count(self, is_reasoning: bool) -> None:
        """Counts the tokens up to here. `is_reasoning`: the last one is of reasoning."""


class MessageParser(AnswerParser):
    """`thinking`: the tags of reasoning, which has begun if `in_thought`. `calls`: how calls are written, if there may
    be any; the answer follows a grammar then (`shared.constraints.compiler`).

    White space around reasoning, and between text and a call, is dropped. What may yet become a part of a tag is held
    back, so `finish` returns the rest.
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None = None,
        *,
        in_thought: bool = False,
        calls: CallFormat | None = None,
        has_grammar: bool = False,
        bare_tools: Sequence[str] = (),
        may_repeat: bool = True,
    ) -> None:
        super().__init__()
        self._thinking = thinking or ("", "")
        self._calls = calls
        # What calls begin with within a text; empty if they are at its beginning or nowhere.
        self._tag = calls.tag if calls and not has_grammar else ""
        self._bare: Any = _bare_call(bare_tools) if bare_tools else None
        self._may_repeat = may_repeat
        # A bare call so far.
        self._held: list[str] = []
        self._bare_name, self._is_fenced, self._has_text = "", False, False
        self._state = self._opening
        if in_thought:
            self._state = self._reasoning
        elif thinking is None:
            self._state = self._text_begins
        # Whether white space is dropped until there is something else.
        self._skips_space = in_thought
        # Characters that come next, white space apart.
        self._expected: list[str] = []
        self._next: Callable[[MessagePart], bool] = self._rest
        self._num_calls = 0
        # The state of the arguments: open brackets, whether in a string, and after a backslash there.
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def _is_in_reasoning(self) -> bool:
        return self._state == self._reasoning

    def _count(self, is_reasoning: bool) -> None:
        if is_reasoning:  # which an answer begins with
            self.num_reasoning_tokens = self._num_tokens

    # States.

    def _opening(self, part: MessagePart) -> bool:
        """Where reasoning may begin."""
        rest, tag = self._without_space(), self._thinking[0]
        if rest.startswith(tag):
            self._buffer, self._skips_space = rest[len(tag) :], True
            self._state = self._reasoning
            return True
        if tag.startswith(rest) and not self._is_at_end:
            return False
        self._state = self._text_begins
        return True

    def _reasoning(self, part: MessagePart) -> bool:
        shown, has_ended = self._before(self._thinking[1])
        part.reasoning += shown
        if has_ended:
            self._buffer = self._buffer[len(self._thinking[1]) :]
            self._skips_space = True
            self._state = self._text_begins
        return has_ended

    def _text_begins(self, part: MessagePart) -> bool:
        """Where calls without a tag may begin."""
        if self._calls and not self._tag:
            rest, begin, tag = self._without_space(), self._calls.begin, self._calls.tag
            if rest.startswith(begin):
                return self._calls_begin()
            if begin.startswith(rest) and not self._is_at_end:
                return False
            if tag and rest.startswith(tag) and begin.startswith(rest):  # of a call that is cut
                return self._calls_begin()
        self._state = self._text
        return True

    def _text(self, part: MessagePart) -> bool:
        bare = self._bare.search(self._buffer, partial=not self._is_at_end) if self._bare else None
        tag = self._buffer.find(self._tag) if self._tag else -1
        if bare is None or bare.start() == len(self._buffer) or 0 <= tag < bare.end():
            shown, calls = self._before(self._tag)
            part.text += shown
            self._has_text |= bool(shown)
            return self._calls_begin() if calls else False
        before = self._shown(self._buffer[: bare.start()])
        part.text += before
        self._has_text |= bool(before)
        if bare.partial:
            self._buffer = self._buffer[bare.start() :]
            return False
        self._bare_name, self._is_fenced = bare["name"], bool(bare["fence"])
        # All but the bracket that opens the arguments.
        self._held, self._buffer = [bare[0][:-1]], self._buffer[bare.end() - 1 :]
        self._state = self._bare_arguments
        return True

    def _bare_arguments(self, part: MessagePart) -> bool:
        end = self._end_of_object()
        self._held.append(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not self._depth:
            self._state = self._bare_end
        elif self._is_at_end:
            self._depth, self._in_string = 0, False
            self._give_up_bare(part)
        else:
            return False
        return True

    def _bare_end(self, part: MessagePart) -> bool:
        rest = self._buffer.lstrip()
        if not rest and not self._is_at_end:
            return False
        arguments = "".join(self._held[1:])
        if not rest.startswith("}") or not _is_json(arguments):
            self._give_up_bare(part)
            return True
        call_id = new_call_id()
        part.calls += [
            CallPart(self._num_calls, call_id, self._bare_name),
            CallPart(self._num_calls, "", "", arguments),
        ]
        self._num_calls += 1
        self._buffer, self._skips_space = rest[1:], not self._has_text
        self._state = self._fence_end if self._is_fenced else self._text
        if not self._may_repeat:
            self._bare = None
        return True

    def _fence_end(self, part: MessagePart) -> bool:
        rest = self._buffer.lstrip()
        if FENCE.startswith(rest) and rest != FENCE and not self._is_at_end:
            return False
        self._buffer = rest.removeprefix(FENCE)
        self._state = self._text
        return True

    def _give_up_bare(self, part: MessagePart) -> None:
        """It is text."""
        part.text += self._shown("".join(self._held))
        self._state = self._text

    def _calls_begin(self) -> bool:
        assert self._calls is not None
        return self._expect(self._calls.begin, self._name)

    def _literal(self, part: MessagePart) -> bool:
        """The characters that are expected. If there are others, the calls have ended."""
        while self._expected:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
            char, expected = self._buffer[0], self._expected.pop(0)
            if not (char.isalnum() if expected == ID else char == expected):
                self._next = self._rest
                break
            self._buffer = self._buffer[1:]
        self._state = self._next
        return True

    def _name(self, part: MessagePart) -> bool:
        assert self._calls is not None
        match = re.match(rf"\s*((?:(?!{re.escape(self._calls.middle[0])}){NAME_CHARACTERS})*)", self._buffer)
        assert match is not None
        if match.end() == len(self._buffer):  # it may go on
            return False
        self._buffer = self._buffer[match.end() :]
        part.calls.append(CallPart(self._num_calls, new_call_id(), match[1]))
        return self._expect(self._calls.middle, self._arguments)

    def _arguments(self, part: MessagePart) -> bool:
        assert self._calls is not None
        if not self._depth:
            self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        end = self._end_of_object()
        part.calls.append(CallPart(self._num_calls, arguments=self._buffer[:end]))
        self._buffer = self._buffer[end:]
        if self._depth:
            return False
        self._num_calls += 1
        return self._expect(self._calls.between or "", self._name if self._calls.between else self._rest)

    def _rest(self, part: MessagePart) -> bool:
        """After the last call."""
        self._buffer = ""
        return False

    def _expect(self, text: str, then: Callable[[MessagePart], bool]) -> bool:
        self._expected = list("".join(text.split()).replace(ID, ID * NUM_ID_CHARACTERS))
        self._next, self._state = then, self._literal
        return True

    def _without_space(self) -> str:
        """The buffer, without what of white space at its beginning is dropped before tags."""
        return self._buffer[:MAX_SPACE].lstrip() + self._buffer[MAX_SPACE:]

    def _before(self, tag: str) -> tuple[str, bool]:
        """Takes what is before `tag`, or cannot be a part of it. Also returns whether the tag is next."""
        end = self._buffer.find(tag) if tag else -1
        has_tag = end >= 0
        if has_tag:
            near = max(0, end - MAX_SPACE)
            shown = self._buffer[:near] + self._buffer[near:end].rstrip()
        else:
            end = len(self._buffer)
            if tag and not self._is_at_end:
                first = max(0, end - MAX_SPACE - len(tag))
                end = next(i for i in range(first, end + 1) if tag.startswith(self._buffer[i:].lstrip()))
            shown = self._buffer[:end]
        self._buffer = self._buffer[end:]
        return self._shown(shown), has_tag

    def _shown(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text

    def _end_of_object(self) -> int:
        """Where the JSON object that the buffer goes on with ends; the buffer's length if it does not."""
        for place, char in enumerate(self._buffer):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return len(self._buffer)


def _bare_call(tools: Sequence[str]) -> Any:
    """How a call of one of the tools begins that is written as JSON alone, perhaps in a block of Markdown."""
    space, names = rf"\s{{0,{MAX_SPACE}}}", "|".join(map(regex.escape, sorted(tools, key=len, reverse=True)))
    colon = f"{space}:{space}"
    return regex.compile(
        rf'{space}(?P<fence>{FENCE}\w{{0,16}}{space})?\{{{space}"name"{colon}"(?P<name>{names})"{space},{space}'
        rf'"(?:arguments|parameters)"{colon}\{{'
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def new_call_id() -> str:
    return secrets.token_hex(NUM_ID_CHARACTERS)[:NUM_ID_CHARACTERS]
