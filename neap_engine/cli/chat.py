"""`neap chat`: a conversation with a worker's model in the terminal."""

import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from neap_client import ChatMessage, GenerationStream, NeapClient, generate_request
from neap_client.inference.v1 import inference_pb2 as pb

from neap_engine.cli.connection import calls_service, connect, say
from neap_engine.cli.console import DEFAULT_WORKER, ServedModel, Worker, err, error_line, out
from neap_engine.cli.generate import print_text, say_inexact, served_model
from neap_engine.cli.interruption import interruptible
from neap_engine.cli.request_flags import takes_request_flags
from shared.errors import NeapError

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


PROMPT = ">>> "
HELP = "/exit or Ctrl-D ends the conversation, /clear begins a new one, Ctrl-C ends an answer"
ANSWER_TOKENS = 256  # what a worker generates at most if a request does not say
TOO_LONG = ("PROMPT_TOO_LONG", "MAX_TOKENS_TOO_LARGE")


@calls_service
@takes_request_flags
def chat(
    worker: Worker = DEFAULT_WORKER,
    model: ServedModel = "",
    system: Annotated[str, typer.Option("--system", help="System message of the chat. Default: none.")] = "",
    show_depth: Annotated[
        bool,
        typer.Option(
            "--show-depth",
            help="Colour each token by the depth at which it left. A legend and statistics go to standard error.",
        ),
    ] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Hold a conversation: each line of input is a message, and the answers are streamed.

    /exit or Ctrl-D ends the conversation, /clear begins a new one. Ctrl-C ends an answer, which stays in the
    conversation as far as it went. If the context is full, the oldest turns are forgotten, and a line says so.
    """
    is_interactive = is_terminal()
    with connect(worker) as client:
        served = served_model(client, model)
        answer_tokens = min(options["max_tokens"] or ANSWER_TOKENS, served.context_length // 2)
        conversation = Conversation(served.context_length, answer_tokens, system)
        session = Session(client, served.model_id, served.num_layers, conversation, options, show_depth)
        if is_interactive:
            say(f"{served.model_id} on {worker}. {HELP}.")
        while (line := read_line(PROMPT if is_interactive else "")) is not None:
            command = line.strip()
            if command == "/exit":
                return
            if command == "/clear":
                conversation.clear()
            elif command.startswith("/"):
                say(HELP)
            elif command:
                try:
                    session.ask(line)
                except NeapError as error:
                    if not is_interactive:
                        raise
                    err.print(error_line(error))


class Session:
    """Asks questions one after the other and prints the answers."""

    def __init__(
        self,
        client: NeapClient,
        model_id: str,
        num_layers: int,
        conversation: Conversation,
        options: dict[str, Any],
        shows_depth: bool,
    ) -> None:
        self._client = client
        self._model_id = model_id
        self._num_layers = num_layers
        self._conversation = conversation
        self._options = options
        self._shows_depth = shows_depth

    def ask(self, question: str) -> None:
        """Stream the answer and add the turn to the conversation.
        Raises NeapError, and the conversation is then as before."""
        self._say_forgotten(self._conversation.make_room(question))
        while True:
            try:
                return self._ask(question)
            except NeapError as error:
                if error.reason not in TOO_LONG or not self._conversation.turns:
                    raise
                self._conversation.forget_oldest()
                self._say_forgotten(1)

    def _ask(self, question: str) -> None:
        conversation = self._conversation
        request = generate_request(self._model_id, conversation.messages(question), **self._options)
        opened: list[GenerationStream] = []
        is_over = threading.Event()

        def events() -> Iterator[pb.GenerateResponse]:
            opened.append(self._client.generate(request))
            if is_over.is_set():
                opened[0].close()
            yield from opened[0]

        try:
            print_text(
                interruptible(events()), self._num_layers, coloured=self._shows_depth, with_statistics=self._shows_depth
            )
        except KeyboardInterrupt:
            out.print()
        finally:
            is_over.set()
            for stream in opened:
                stream.close()
        for stream in opened:
            if stream.started is not None:
                num_tokens = stream.started.num_prompt_tokens + len(stream.token_ids)
                conversation.add(question, stream.text, num_tokens)
            say_inexact(stream)

    def _say_forgotten(self, num_turns: int) -> None:
        if num_turns:
            say(f"the context is full: the oldest {num_turns} of the turns are forgotten")


def is_terminal() -> bool:
    """Return whether a person types. Lines can be edited then."""
    if not sys.stdin.isatty():
        return False
    import readline  # noqa: F401 (`input` uses it)

    return True


def read_line(prompt: str) -> str | None:
    """Return a line of input, "" after Ctrl-C, None at the end of the input."""
    try:
        return input(prompt)
    except KeyboardInterrupt:
        out.print()
        return ""
    except EOFError:
        if prompt:
            out.print()
        return None
