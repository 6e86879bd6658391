"""A gateway to a worker whose tiny model has tools, for clients of every kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from shared.registry.factory import open_registry
from tests.chats import IN_THOUGHT, build_chat_model
from tests.fixed_costs import fixed_cost_engine
from tests.gateways import gateway_to
from tests.generation import publish
from tests.worker import serving


@contextmanager
def chat_gateway(template: str, folder: Path) -> Iterator[SimpleNamespace]:
    """Yields what `gateway_to` yields, with `bias`, a logit_bias by which the model calls at once and ends its
    reasoning, and `thinks`. `folder`: of the registry."""
    registry = open_registry(str(folder))
    loaded = build_chat_model(template, own_tokens=True)
    with fixed_cost_engine(loaded) as engine:
        publish(registry, engine)
        with serving(engine, registry) as worker, gateway_to(worker.target) as gateway:
            gateway.thinks = template is IN_THOUGHT
            vocabulary = loaded.tokenizer.get_added_vocab()
            tags = vocabulary.keys() & {"<tool_call>", "</think>"}
            gateway.bias = {str(vocabulary[tag]): 100 for tag in tags}
            yield gateway
    registry.close()
