"""A tiny model on disk, and a worker that serves it over real gRPC on loopback, inside the test's process."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from neap_client.inference.v1 import inference_pb2_grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inference_service.metrics import WorkerMetrics
from inference_service.pools import Pools
from inference_service.routers import RouterStore
from inference_service.servicer import SERVICE_NAME, InferenceServicer
from inference_service.tap import Tap
from shared.engine.engine import Engine
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.model.loaded import LoadedModel
from shared.rpc.callers import Role
from shared.rpc.security import ServerSecurity
from shared.rpc.serving import RpcServer
from tests.server_settings import ServerSettings

CONTEXT_LENGTH = 2048
EOS = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def build_tokenizer(more_merges: Sequence[tuple[str, str]] = ()) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, an end-of-sequence token, a few merges, and more."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "h"), ("i", "n")]
    merges += more_merges
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    vocabulary["<eos>"] = EOS
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(seed: int = 0, vocabulary_size: int = 263, initializer_range: float = 0.3) -> hf.PreTrainedModel:
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return hf.AutoModelForCausalLM.from_config(config).eval().float()


def save_model(folder: Path, seed: int = 0, initializer_range: float = 0.3) -> Path:
    """A Hugging Face folder that `load_model` reads."""
    build_model(seed, initializer_range=initializer_range).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def build_ladder(loaded: LoadedModel, **identity: str) -> Ladder:
    """Prompt look-up that trusts every match; `identity` changes the model it claims to be for."""
    return Ladder(
        model=replace(ModelIdentity.of(loaded), **identity),
        lookup_confidence=TableConfidence(4.0, [[0.0] * size for size in SIZES]),
    )


@contextmanager
def serving(
    engine: Engine,
    registry: Any,
    *,
    max_active: int = 80,
    max_active_per_client: int | None = None,
    stall_timeout_s: float = 30.0,
    metrics: WorkerMetrics | None = None,
    security: ServerSecurity | None = None,
    priority_of_roles: dict[Role, int] | None = None,
    dialect: bool = False,
    tap: Tap | None = None,
    shares_prefixes_by_pool: bool = False,
    **store_options: Any,
) -> Iterator[SimpleNamespace]:
    """Yields target, servicer, store and loop of a worker that is ready. `dialect`: vLLM's, too."""
    state = SimpleNamespace(engine=engine, registry=registry)
    started = threading.Event()

    async def serve() -> None:
        state.loop, state.finish = asyncio.get_running_loop(), asyncio.Event()
        pools = Pools()
        state.store = RouterStore(registry, pools=pools, **store_options)
        state.servicer = InferenceServicer(
            state.store,
            stall_timeout_s=stall_timeout_s,
            metrics=metrics,
            pools=pools,
            priority_of_roles=priority_of_roles,
            tap=tap,
            shares_prefixes_by_pool=shares_prefixes_by_pool,
        )
        state.servicer.add_model(engine, max_active=max_active, max_active_per_client=max_active_per_client)
        state.servicer.set_ready()
        server = RpcServer(ServerSettings(), [SERVICE_NAME], security=security)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(state.servicer, server.grpc_server)
        if dialect:
            from inference_service.vllm_servicer import add_to

            add_to(server, state.servicer, engine.loaded.model_id, pools)
        state.target = f"127.0.0.1:{await server.start()}"
        await server.set_serving()
        started.set()
        await state.finish.wait()
        await server.grpc_server.stop(None)
        pools.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    try:
        yield state
    finally:
        state.loop.call_soon_threadsafe(state.finish.set)
        thread.join(60)
        assert not thread.is_alive()
