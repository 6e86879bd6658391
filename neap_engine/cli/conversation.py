"""The turns of a conversation, as many as a model's context has room for."""

from collections import deque
from dataclasses import dataclass, field

from neap_client import ChatMessage

# Fewer bytes per token than text has, so that the next question's number of tokens is not underestimated.
BYTES_PER_TOKEN = 2


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str
    num_tokens: int


@dataclass
class Conversation:
    """`context_length`: most tokens of prompt and answer together.
    `answer_tokens`: how many of them an answer should find free."""

    context_length: int
    answer_tokens: int
    system: str = ""
    num_tokens: int = 0
    turns: deque[Turn] = field(default_factory=deque)

    def messages(self, question: str) -> list[ChatMessage]:
        """Return the prompt of the next turn."""
        history = [("system", self.system)] if self.system else []
        for turn in self.turns:
            history += [("user", turn.question), ("assistant", turn.answer)]
        return [ChatMessage(role=role, content=text) for role, text in (*history, ("user", question))]

    def add(self, question: str, answer: str, num_tokens: int) -> None:
        """Add a turn. `num_tokens`: those of the whole conversation, its answer included."""
        self.turns.append(Turn(question, answer, num_tokens - self.num_tokens))
        self.num_tokens = num_tokens

    def forget_oldest(self) -> None:
        self.num_tokens -= self.turns.popleft().num_tokens

    def make_room(self, question: str) -> int:
        """Forget the oldest turns until question and answer have room. Returns how many were forgotten."""
        needed = len(question.encode()) // BYTES_PER_TOKEN + self.answer_tokens
        before = len(self.turns)
        while self.turns and self.num_tokens + needed > self.context_length:
            self.forget_oldest()
        return before - len(self.turns)

    def clear(self) -> None:
        self.turns.clear()
        self.num_tokens = 0
