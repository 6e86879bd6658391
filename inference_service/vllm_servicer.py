"""vLLM's dialect: `vllm.grpc.engine.VllmEngine` of PyPI's smg-grpc-proto, for gateways that speak it.

A request becomes one of neap.inference.v1 and goes through its servicer, so checks, limits, metrics and log lines are
those of our own calls. docs/gateways.md says what has no like here.
"""

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from neap_client.inference.v1 import inference_pb2 as pb
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from inference_service.pools import Pools
from inference_service.servicer import InferenceServicer
from inference_service.vllm_convert import Answer, to_requests
from shared.engine.engine import Engine
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel
from shared.rpc.callers import client_key
from shared.rpc.interceptors import STALL_TIMEOUT_S, write_response
from shared.rpc.serving import RpcServer

_SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
SERVICE_NAME: str = _SERVICE.full_name
# Requests of a call of Abort at most.
MAX_ABORTED = 1024
# The size of a message with a part of the tokenizer's files.
PART_BYTES = 64 << 10


class VllmServicer:
    """The dialect has no field for a model, so it is about one, `model_id`. `is_serving`: whether the process serves,
    and neither loads nor drains. `pools`: those of `inference`."""

    def __init__(
        self, inference: InferenceServicer, model_id: str, is_serving: Callable[[], bool], pools: Pools
    ) -> None:
        self._inference, self._model_id, self._is_serving, self._pools = inference, model_id, is_serving, pools
        self._began_s = time.monotonic()
        self._last_request_s = 0.0
        # Tasks of the calls that run, by client and request id.
        self._running: defaultdict[tuple[str, str], set[asyncio.Task[None]]] = defaultdict(set)
        self._tokenizer: bytes | None = None

    @property
    def _engine(self) -> Engine:
        return self._inference.engine(self._model_id)

    async def Generate(self, request: vllm.GenerateRequest, context: Any) -> None:  # noqa: N802
        self._last_request_s = time.time()
        wire = _Wire(context)
        requests = to_requests(request, self._engine.loaded)
        answers = [Answer(index, is_streamed=request.stream) for index in range(len(requests))]
        tasks = [
            asyncio.create_task(self._inference.Generate(one, _Context(wire, answer)))
            for one, answer in zip(requests, answers, strict=True)
        ]
        key = client_key(context), request.request_id
        self._running[key].update(tasks)
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the client is gone, or its deadline has passed
                raise
            for answer in answers:
                await write_response(wire, answer.aborted(), STALL_TIMEOUT_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            wire.close()
            self._running[key].difference_update(tasks)
            if not self._running[key]:
                del self._running[key]

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:  # noqa: N802
        """Ends calls of the same client, with `finish_reason` "abort". Ids that no call has are no error: it may have
        ended just before."""
        if len(request.request_ids) > MAX_ABORTED:
            raise InvalidInput(f"there are {len(request.request_ids)} request_ids; at most {MAX_ABORTED} are allowed")
        for request_id in request.request_ids:
            for task in self._running.get((client_key(context), request_id), ()):
                task.cancel()
        return vllm.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> vllm.HealthCheckResponse:  # noqa: N802
        if self._is_serving():
            return vllm.HealthCheckResponse(healthy=True, message="serving")
        return vllm.HealthCheckResponse(healthy=False, message="loading or draining")

    async def GetModelInfo(self, request: Any, context: Any) -> vllm.GetModelInfoResponse:  # noqa: N802
        loaded = self._engine.loaded
        config = loaded.model.config
        return vllm.GetModelInfoResponse(
            model_path=loaded.model_id,
            is_generation=True,
            max_context_length=loaded.context_length,
            max_req_input_len=loaded.context_length - 1,
            vocab_size=loaded.vocabulary_size,
            served_model_name=loaded.model_id,
            tokenizer_path=loaded.model_id,
            model_type=config.model_type,
            architectures=[loaded.architecture],
            eos_token_ids=sorted(loaded.eos_token_ids),
            bos_token_id=getattr(config, "bos_token_id", None),
            pad_token_id=getattr(config, "pad_token_id", None),
            default_sampling_params_json=json.dumps(dict(loaded.defaults.sampling)),
        )

    async def GetServerInfo(self, request: Any, context: Any) -> vllm.GetServerInfoResponse:  # noqa: N802
        engine = self._engine
        return vllm.GetServerInfoResponse(
            active_requests=engine.num_running + engine.num_waiting,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=time.monotonic() - self._began_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=engine.max_running,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: Any, context: Any) -> vllm.GetLoadsResponse:  # noqa: N802
        engine = self._engine
        running, waiting = engine.num_running, engine.num_waiting
        load = vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            token_usage=engine.kv_usage_ratio,
            utilization=running / engine.max_running,
            max_running_requests=engine.max_running,
        )
        return vllm.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[common.GetTokenizerChunk]:  # noqa: N802
        if self._tokenizer is None:
            self._tokenizer = await self._pools.requests.call(_tokenizer_files, self._engine.loaded)
        files = self._tokenizer
        for begin in range(0, len(files), PART_BYTES):
            is_last = begin + PART_BYTES >= len(files)
            digest = hashlib.sha256(files).hexdigest() if is_last else ""
            yield common.GetTokenizerChunk(data=files[begin : begin + PART_BYTES], sha256=digest)


def _refusal(name: str) -> Any:
    async def refuse(self: Any, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here")

    return refuse


for _method in _SERVICE.methods:
    if not hasattr(VllmServicer, _method.name):
        setattr(VllmServicer, _method.name, _refusal(_method.name))


def add_to(server: RpcServer, inference: InferenceServicer, model_id: str, pools: Pools) -> None:
    """Serves the dialect beside the calls of `inference`."""
    servicer = VllmServicer(inference, model_id, lambda: server.is_serving, pools)
    vllm_grpc.add_VllmEngineServicer_to_server(servicer, server.grpc_server)


class _Wire:
    """What the choices of a call write to, one message after another.

    A choice that Abort ends may wait for its client to read. gRPC still has that message then, and refuses the next one
    until the client has taken it. So a message goes on without the choice that wrote it, and the next one waits for it.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self._turn = asyncio.Lock()
        self._has_head = False
        self._sending: asyncio.Future[None] | None = None

    async def write(self, message: vllm.GenerateResponse | None) -> None:
        """None: the head alone, at once, so that nobody takes a long prompt for a silent worker."""
        async with self._turn:
            if self._sending is not None:
                await asyncio.shield(self._sending)
            self._sending = asyncio.ensure_future(self._send(message))
            await asyncio.shield(self._sending)

    async def _send(self, message: vllm.GenerateResponse | None) -> None:
        if not self._has_head:
            self._has_head = True
            await self.context.send_initial_metadata(())
        if message is not None:
            await self.context.write(message)

    def close(self) -> None:
        """The call ends; what its client has not taken is dropped."""
        if self._sending is not None:
            self._sending.cancel()


class _Context:
    """The context of a call of ours that is one choice of theirs."""

    def __init__(self, wire: _Wire, answer: Answer) -> None:
        self._wire, self._answer = wire, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire.context, name)

    async def write(self, response: pb.GenerateResponse) -> None:
        await self._wire.write(self._answer.message(response))


def _tokenizer_files(loaded: LoadedModel) -> bytes:
    """A zip of the files of the tokenizer in use, the same bytes at each worker. Raises InvalidInput (NO_TOKENIZER)."""
    if loaded.tokenizer is None:
        raise InvalidInput("this model has no tokenizer", reason="NO_TOKENIZER")
    packed = io.BytesIO()
    with TemporaryDirectory() as folder, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as files:
        loaded.tokenizer.save_pretrained(folder)
        loaded.model.config.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            files.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
