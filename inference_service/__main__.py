"""`python -m inference_service`: a worker that serves frozen models with published routers."""

import gc

if __name__ == "__main__":
    gc.disable()  # until the models are loaded: vocabularies are a million objects, and little of it is garbage

import os
import sys

from shared.cpus import size_thread_pools, usable_cpus
from shared.light_imports import import_transformers_lightly
from shared.memory import release_free_memory, share_heaps
from shared.rpc.logs import log_all_output

if __name__ == "__main__":  # before anything below imports torch
    log_all_output()
    size_thread_pools()
    share_heaps()
    is_shared_out = "NEAP_TENSOR_PARALLEL" in os.environ or any(a.startswith("--tensor-parallel") for a in sys.argv)
    import_transformers_lightly(shards=is_shared_out)

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from threading import Thread, get_native_id
from types import ModuleType

import structlog
import torch
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.blob_cache import BlobCache
from inference_service.engine_watch import EngineWatch, exit_at_once
from inference_service.metrics import ClientWaitsCollector, WorkerMetrics
from inference_service.pools import Pools
from inference_service.rank_processes import (
    RankProcesses,
    check_settings,
    follow_worker,
    ignore_signals,
    rank_of_this_process,
)
from inference_service.router_imports import import_routers
from inference_service.router_watch import RouterWatch
from inference_service.routers import MAX_WAITING, RouterStore, preload_routers
from inference_service.served_reports import ServedReports
from inference_service.servicer import SERVICE_NAME, InferenceServicer
from inference_service.tap import Tap
from shared.compile_cache import keep_compiled
from shared.config import make_settings
from shared.configured_model import load_configured
from shared.engine.drafting.costs import RememberingMeter
from shared.engine.engine import Engine
from shared.engine.memory.budget import MAX_RUNNING, card_budget
from shared.errors import InvalidInput, PreconditionFailed, Unavailable
from shared.exchange.signatures import verifier_of
from shared.model.load import check_device
from shared.model.loaded import LoadedModel
from shared.model.runners import make_runner
from shared.model.source import check_files
from shared.registry.factory import folder_of, open_registry
from shared.rpc.callers import Role
from shared.rpc.security import SecurityCollector, open_security
from shared.rpc.serving import RpcServer
from shared.security_settings import ClientSettings
from shared.service_main import run_service
from shared.service_metrics import serve_metrics
from shared.service_settings import ModelSource
from shared.traffic.traffic import open_traffic
from shared.worker_settings import WorkerSettings

log = structlog.get_logger("neap.worker")

_LEAST_PRIORITY = 19  # of a thread: the highest niceness

# Settings with three values, as arguments of `make_runner`.
SWITCH = {"auto": None, "on": True, "off": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM. Returns the process' exit status."""
    return run_service(WorkerSettings, "python -m inference_service", "neap-worker", serve, argv)


async def serve(settings: WorkerSettings) -> int:
    """Answers health checks at once, loads and warms up the models, loads routers, serves, and drains.
    Raises NeapError if it cannot start."""
    if not settings.models:
        raise InvalidInput("no model is named: give --model ID=SOURCE", reason="BAD_CONFIGURATION")
    check_settings(settings)
    for source in settings.models:  # before anything listens, so that nobody waits for a model that is not there
        check_files(source.source)
    num_threads = settings.threads or max(1, min(torch.get_num_threads(), usable_cpus()) // settings.tensor_parallel)
    torch.set_num_threads(num_threads)
    if rank_of_this_process():
        ignore_signals()
        return await asyncio.to_thread(follow_worker, settings)
    processes = RankProcesses(settings) if settings.tensor_parallel > 1 else None
    try:
        return await _serve(settings, num_threads, processes)
    finally:
        if processes is not None:
            processes.end()


async def _serve(settings: WorkerSettings, num_threads: int, processes: RankProcesses | None) -> int:
    if settings.device.startswith("cuda") and settings.start_cache_mb:
        keep_compiled(settings.data_dir / "compile-cache", settings.start_cache_mb << 20)
    check_device(settings.device, serves=True)
    log.info("threads", usable_cpus=usable_cpus(), model_threads=num_threads)
    security = open_security(settings, settings.listen)
    verifier = verifier_of(settings.require_signatures)
    registry = open_registry(settings.registry)
    metrics = WorkerMetrics()
    cache = BlobCache(settings.data_dir / "router-cache", registry.read_blob, max_bytes=settings.router_cache_mb << 20)
    # A registry in a folder needs no cache of its blobs on disk.
    is_remote = folder_of(settings.registry) is None and settings.router_cache_mb > 0
    pools = Pools()
    engines: list[Engine] = []
    tap = _tap(settings, metrics, engines)
    # Requests that wait for the registry leave at least half of the places to the others.
    max_waiting = min(MAX_WAITING, max(1, (settings.max_queue + (settings.max_running or MAX_RUNNING)) // 2))
    routers = RouterStore(
        registry,
        pools=pools,
        max_waiting=max_waiting,
        read_blob=cache.read_blob if is_remote else None,
        default_alias=settings.default_alias,
        verifier=verifier,
        on_stale=lambda model_id: metrics.stale_resolutions.labels(model_id).inc(),
        on_fallback=lambda *labels: metrics.router_fallbacks.labels(*labels).inc(),
    )
    report_security = make_settings(ClientSettings).client_security() if settings.report_to else None
    servicer = InferenceServicer(
        routers,
        stall_timeout_s=settings.stall_timeout_s,
        metrics=metrics,
        pools=pools,
        priority_of_roles={
            Role(role): int(number)
            for role, _, number in (entry.partition("=") for entry in settings.priority_of_roles)
        },
        chats_have_control_tokens=settings.chat_control_tokens,
        tap=tap,
        shares_prefixes_by_pool=settings.prefix_cache_scope == "pool",
    )
    dialect = _dialect(settings)
    names = [SERVICE_NAME, dialect.SERVICE_NAME] if dialect else [SERVICE_NAME]
    server = RpcServer(settings, names, security=security, hand_over=servicer.hand_over)
    metrics.registry.register(SecurityCollector(security))
    metrics.registry.register(ClientWaitsCollector(server.waits))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc_server)
    if dialect:
        dialect.add_to(server, servicer, settings.models[0].model_id, pools)
    engine_watch = EngineWatch(engines, settings.hang_timeout_s)
    watches: list[RouterWatch] = []
    reports = None
    if settings.report_to:
        reports = ServedReports(
            engines,
            settings.report_to,
            settings.report_interval_s,
            metrics=metrics,
            security=report_security,
            on_suspended=routers.suspend,
        )
    loop = asyncio.get_running_loop()
    stop_soon = partial(loop.call_soon_threadsafe, server.request_stop)
    if processes is not None:
        processes.on_lost = stop_soon

    async def preload(served: Sequence[LoadedModel]) -> None:
        aliases = settings.preload_aliases or None
        await preload_routers(routers, served, aliases, timeout_s=settings.preload_timeout_s)

    async def prepare() -> None:
        for number, source in enumerate(settings.models, 1):
            place = f"{source.model_id}, {number} of {len(settings.models)}"
            # If an engine fails, the worker drains and exits, so that it is restarted.
            engine = await asyncio.to_thread(
                _load_engine, source, settings, stop_soon, partial(servicer.set_loading, place), processes
            )
            engines.append(engine)
            watches.append(
                RouterWatch(
                    registry,
                    source.model_id,
                    partial(_refresh, loop, routers, engine.loaded),
                    on_error=partial(metrics.count_watch_error, source.model_id),
                )
            )
            servicer.add_model(
                engine,
                max_active=settings.max_queue + engine.max_running,
                max_active_per_client=settings.max_active_per_client,
            )
        if settings.routers:
            served = [engine.loaded for engine in engines]
            await asyncio.to_thread(
                import_routers, settings.routers, served, registry, settings.default_alias, verifier
            )
        identified = [engine.loaded for engine in engines if engine.loaded.identity.is_known]
        await preload(identified)
        gc.enable()
        servicer.set_ready()
        # The routers of the others follow, once it is known which ones they can have.
        later = [engine.loaded for engine in engines if engine.loaded not in identified]

        def on_identified() -> None:
            if not loop.is_closed():
                asyncio.run_coroutine_threadsafe(preload(later), loop)

        Thread(target=_complete, args=(engines, on_identified, stop_soon), name="neap-complete").start()

    with serve_metrics(settings.metrics_listen, metrics.registry):
        ready = await server.run(prepare)
    if not ready:
        # A thread may still be loading weights. There is nothing to finish or to save.
        log.info("stopped before it was ready")
        sys.stderr.flush()
        os._exit(0)
    if processes is not None and processes.is_lost:
        exit_at_once()  # the engine's thread may wait for the lost rank
    for watch in watches:
        watch.stop()
    if reports is not None:
        await asyncio.to_thread(reports.stop)
    for engine in engines:
        engine.loaded.identity.give_up()
        await asyncio.to_thread(engine.close)
    engine_watch.stop()
    if tap is not None:
        await asyncio.to_thread(tap.close)
    pools.close()
    await asyncio.to_thread(registry.close)
    return 0


def _tap(settings: WorkerSettings, metrics: WorkerMetrics, engines: Sequence[Engine]) -> Tap | None:
    """What keeps answers to learn from, if any are to be kept. Raises InvalidInput (BAD_TRAFFIC_KEY)."""
    if not settings.learn:
        return None
    shares = {pool: float(share) for pool, _, share in (entry.partition("=") for entry in settings.learn)}
    log.info("a share of the answers is kept to learn from", shares=shares, days=settings.traffic_days)
    return Tap(
        open_traffic(settings.registry, settings.traffic_key),
        shares,
        metrics,
        retention_s=settings.traffic_days * 24 * 3600,
        is_idle=lambda: not any(engine.num_running for engine in engines),
    )


def _dialect(settings: WorkerSettings) -> ModuleType | None:
    """What serves vLLM's dialect, if it is to be served. Raises InvalidInput (BAD_CONFIGURATION)."""
    if not settings.vllm_dialect:
        return None
    if len(settings.models) > 1:
        raise InvalidInput(
            "requests of vLLM's dialect name no model: --vllm-dialect needs exactly one --model",
            reason="BAD_CONFIGURATION",
        )
    try:
        return import_module("inference_service.vllm_servicer")
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "--vllm-dialect needs an extra: pip install 'neap-server[smg]'", reason="BAD_CONFIGURATION"
        ) from error


def _refresh(loop: asyncio.AbstractEventLoop, routers: RouterStore, loaded: LoadedModel) -> None:
    """Refreshes the routers. A watch's thread calls it, and gets the error of a refresh that fails."""
    asyncio.run_coroutine_threadsafe(routers.refresh(loaded), loop).result()


def _load_engine(
    source: ModelSource,
    settings: WorkerSettings,
    on_failure: Callable[[], object],
    say: Callable[[str], object],
    processes: RankProcesses | None = None,
) -> Engine:
    say("reading")
    loaded = load_configured(source, settings) if processes is None else processes.load(source)
    gc.freeze()  # no later collection looks at the model
    budget = None if settings.kv_budget_mb is None else settings.kv_budget_mb << 20
    if budget is None and loaded.device.type == "cuda" and len(settings.models) == 1:
        budget = card_budget(loaded.device, settings.gpu_memory_share)
    prefix_cache = None if settings.prefix_cache_mb is None else settings.prefix_cache_mb << 20
    engine = Engine(
        loaded,
        max_running=settings.max_running,
        max_queue=settings.max_queue,
        max_queue_tokens=settings.max_queue_tokens,
        ladder_bytes=None if settings.router_memory_mb is None else settings.router_memory_mb << 20,
        kv_budget_bytes=budget,
        prefix_cache_bytes=prefix_cache,
        learned_bytes=settings.learned_table_mb << 20,
        on_failure=on_failure,
        cost_meter=RememberingMeter(),
        runner_of=partial(
            make_runner, record=SWITCH[settings.record_passes], compile_layers=SWITCH[settings.compile_layers]
        ),
    )
    if settings.require_exact and not engine.promise.is_exact:
        engine.close()
        raise PreconditionFailed(
            f"exact may differ from full for {source.model_id}: {engine.promise.why_not}",
            reason="EXACT_NOT_PROMISED",
            metadata={"model_id": source.model_id},
        )
    release_free_memory()  # of the checks
    say("warming up")
    engine.warm_up(constraints=False)
    release_free_memory()
    log.info(
        "model warm",
        model_id=source.model_id,
        max_running=engine.max_running,
        kv_budget_mb=engine.kv_budget_bytes >> 20,
        kv_budget_tokens=engine.kv_budget_bytes // engine.kv_token_bytes,
        router_memory_mb=engine.ladders.max_bytes >> 20,
    )
    return engine


def _complete(
    engines: Sequence[Engine],
    on_identified: Callable[[], object] = lambda: None,
    on_failure: Callable[[], object] = lambda: None,
) -> None:
    """What can follow while requests are served: finds out the models' fingerprints, for which routers wait, writes
    what the next start will not find out again, whereupon this one gives back its own copy of it, reads the tokenizer
    for constraints, and measures costs. Writing comes before what takes memory."""
    for engine in engines:
        if not _identify(engine):
            on_failure()
            return
    on_identified()
    for engine in engines:
        _yielding_to_others(engine.loaded.facts.keep)
        try:
            engine.warm_up()
            engine.measure_costs()
        except Unavailable:  # it is closed
            pass
        except Exception:
            log.exception(
                "constraints or costs are not prepared: requests go on without", model_id=engine.loaded.model_id
            )
        _yielding_to_others(engine.loaded.facts.keep)
        release_free_memory()
        log.info("the start is complete", model_id=engine.loaded.model_id)


def _identify(engine: Engine) -> bool:
    """Whether the model's fingerprint is known now. The log says why not, unless the worker ends."""
    loaded = engine.loaded

    def find() -> None:
        with suppress(Exception):  # whoever asks gets it
            loaded.identity.find()

    if loaded.identity.is_known:
        return True
    _yielding_to_others(find)
    release_free_memory()
    if loaded.identity.is_known:
        known = {"fingerprint": loaded.fingerprint, "numerics_id": engine.numerics.id}
        log.info("the model is identified", model_id=loaded.model_id, **known)
        return True
    if not loaded.identity.is_given_up:
        log.error("the model is not identified", model_id=loaded.model_id, exc_info=loaded.identity.found.exception())
    return False


def _yielding_to_others(work: Callable[[], object]) -> None:
    """Runs work in a thread of the least priority: requests that run meanwhile go first."""

    def run() -> None:
        if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _LEAST_PRIORITY)
        work()

    thread = Thread(target=run, name="neap-remember")
    thread.start()
    thread.join()


if __name__ == "__main__":
    gc.freeze()  # no collection looks at what was imported
    sys.exit(main())
