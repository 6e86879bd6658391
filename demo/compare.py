"""Runs the same prompts in several ways on a worker, in turn, and sums up the figures of each way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neap_client import Answer, NeapClient, generate_request
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import Policy

from demo.figures import PolicyFigures
from neap_engine.cli.console import out
from neap_engine.cli.generate import NO_CHAT_TEMPLATE, PLAIN_TEXT_NOTE, DepthView, statistics_line
from shared.errors import NeapError

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Side:
    """One way to run the prompts. `router`: a version or an alias; empty means the worker's default."""

    name: str
    policy: Policy
    router: str = ""


FULL = Side("full", "full")


def compare(
    worker: NeapClient,
    model_id: str,
    sides: Sequence[Side],
    prompts: Mapping[str, str],
    max_tokens: int,
    *,
    streams: bool = True,
) -> list[PolicyFigures]:
    """Run every prompt on every side, the sides in turn, with greedy decoding.
    `streams`: print the answers as they arrive."""
    num_layers = worker.get_model(model_id).num_layers
    figures = {side: PolicyFigures(side.name) for side in sides}
    is_chat = has_chat_template(worker, model_id)
    for side in sides:
        # The first request of each side includes loading and warm-up, so it is not counted.
        worker.answer(request_for(model_id, "Hello", side, WARM_UP_TOKENS, is_chat))
    for name, prompt in prompts.items():
        for side in sides:
            request = request_for(model_id, prompt, side, max_tokens, is_chat)
            if streams:
                out.print(f"\n[bold]{name}[/] under [bold]{side.name}[/]")
                answer = stream(worker, request, num_layers)
            else:
                answer = worker.answer(request)
            figures[side].add(name, answer.token_ids, answer.finished)
    return list(figures.values())


def stream(worker: NeapClient, request: pb.GenerateRequest, num_layers: int) -> Answer:
    """Print an answer as it arrives, its tokens coloured by depth, and return it."""
    view = DepthView(out, num_layers, coloured=True)
    with worker.generate(request) as events:
        for event in events:
            view.show(event)
        answer = events.answer()
    out.print()
    out.print(view.legend())
    out.print(statistics_line(answer.finished), style="dim", markup=False)
    return answer


def request_for(model_id: str, prompt: str, side: Side, max_tokens: int, is_chat: bool) -> pb.GenerateRequest:
    """Build a request with greedy decoding."""
    return generate_request(
        model_id,
        prompt,
        raw=not is_chat,
        policy=side.policy,
        router="" if side.policy == "full" else side.router,
        max_tokens=max_tokens,
    )


def has_chat_template(worker: NeapClient, model_id: str) -> bool:
    """Return whether the model has a chat template. Prints a note if it has none, as a base model may."""
    try:
        worker.answer(request_for(model_id, "Hi", FULL, 1, True))
    except NeapError as error:
        if error.reason != NO_CHAT_TEMPLATE:
            raise
        out.print(f"   {PLAIN_TEXT_NOTE}", markup=False)
        return False
    return True
