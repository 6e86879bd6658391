"""Answers that are several messages, each with a header that names its channel, as gpt-oss writes them:

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>arguments

The source of the format is OpenAI's "harmony response format". Prompts end with the beginning of a header.
"""

import re

from shared.chat.parser import AnswerParser, CallPart, MessagePart, new_call_id
from shared.chat.template import has_template
from shared.model.loaded import LoadedModel

START, CHANNEL, CONSTRAIN, MESSAGE, END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END)
ROLE, RECIPIENT, FUNCTIONS = "assistant", "to=", "functions."
REASONING, REMARK, FINAL = "analysis", "commentary", "final"
# The latter two end an answer, so they are seen only where a model goes on after them.
_CLOSING = (END, "<|call|>", "<|return|>")
# What a body ends with.
_ENDS = (*_CLOSING, START, CHANNEL)
# Between bodies of one kind.
_GAP = "\n\n"
# What is longer is no header.
_MAX_HEADER = 512


def has_channels(loaded: LoadedModel) -> bool:
    """Whether the model's template writes messages so, with tokens of its own."""
    tokenizer = loaded.tokenizer
    if tokenizer is None or not has_template(tokenizer):
        return False
    template = str(tokenizer.chat_template)
    return CHANNEL in template and MESSAGE in template and tokenizer.get_added_vocab().keys() >= {*TOKENS}


class ChannelParser(AnswerParser):
    """Takes such an answer apart, as `MessageParser` does others. `has_tools`: there are tools that could be called;
    without, messages to others are reasoning. `in_text`: the prompt ends within a text.

    An answer that begins with something else than a header is text.
    """

    def __init__(self, *, has_tools: bool = False, in_text: bool = False) -> None:
        super().__init__()
        self._has_tools = has_tools
        self._state = self._body if in_text else self._header
        # What the body is, and whether nothing of it has been shown.
        self._is_reasoning = self._is_call = self._begins = False
        # Whether what has been shown is reasoning: of both kinds, perhaps.
        self._shown: set[bool] = set()
        self._num_calls = 0
        # All tokens but those of a header that is not complete yet.
        self._num_counted = 0

    def _is_in_reasoning(self) -> bool:
        return self._state == self._body and self._is_reasoning

    def _count(self, is_reasoning: bool) -> None:
        if is_reasoning:
            self.num_reasoning_tokens += self._num_tokens - self._num_counted
        if is_reasoning or self._state == self._body:
            self._num_counted = self._num_tokens

    # States.

    def _header(self, part: MessagePart) -> bool:
        rest = self._buffer.lstrip()
        for optional in (START, ROLE):
            if optional.startswith(rest) and not self._is_at_end:
                return False
            rest = rest.removeprefix(optional).lstrip()
        begins = (CHANNEL, RECIPIENT, MESSAGE)
        header, found, body = rest.partition(MESSAGE)
        if not rest.startswith(begins) or len(header) > _MAX_HEADER:
            if any(begin.startswith(rest) for begin in begins):  # with nothing left, too
                return False
            if self._buffer.lstrip().startswith((START, CHANNEL)):  # a body would end with it
                self._buffer = rest.removeprefix(CHANNEL)
            self._begin(part)
            return True
        if not found:
            return False
        self._buffer = body
        recipient = re.search(rf"{RECIPIENT}([^\s<]+)", header)
        channel = re.search(rf"{re.escape(CHANNEL)}\s*(\w*)", header)
        self._begin(part, recipient[1] if recipient else "", channel[1] if channel else FINAL)
        return True

    def _begin(self, part: MessagePart, recipient: str = "", channel: str = FINAL) -> None:
        """A body begins."""
        self._is_call = bool(recipient) and self._has_tools
        self._is_reasoning = not self._is_call and (bool(recipient) or channel == REASONING)
        self._begins, self._state = True, self._body
        if self._is_call:
            part.calls.append(CallPart(self._num_calls, new_call_id(), recipient.removeprefix(FUNCTIONS)))
            self._num_calls += 1

    def _body(self, part: MessagePart) -> bool:
        places = [place for end in _ENDS if (place := self._buffer.find(end)) >= 0]
        end = min(places, default=len(self._buffer))
        if not places and not self._is_at_end:
            first = max(0, end - max(map(len, _ENDS)))
            end = next(i for i in range(first, end + 1) if any(each.startswith(self._buffer[i:]) for each in _ENDS))
        self._show(self._buffer[:end], part)
        self._buffer = self._buffer[end:]
        if places:
            for token in _CLOSING:  # the others belong to the next header
                self._buffer = self._buffer.removeprefix(token)
            self._state = self._header
        return bool(places)

    def _show(self, text: str, part: MessagePart) -> None:
        if not text:
            return
        if self._is_call:
            part.calls.append(CallPart(self._num_calls - 1, arguments=text))
            return
        gap = _GAP if self._begins and self._is_reasoning in self._shown else ""
        if self._is_reasoning:
            part.reasoning += gap + text
        else:
            part.text += gap + text
        self._shown.add(self._is_reasoning)
        self._begins = False
