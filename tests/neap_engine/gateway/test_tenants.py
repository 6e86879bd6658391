"""A router for each tenant: chosen by the request, several in one batch, off by request, its figures in answers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shared.ladder.artefact import pack_ladder
from shared.ladder.table_confidence import TableConfidence
from shared.model.loaded import wrap_model
from shared.registry.factory import open_registry
from tests.fixed_costs import fixed_cost_engine
from tests.gateways import chat_body, gateway_to
from tests.generation import publish
from tests.worker import build_ladder, build_model, build_tokenizer, serving

LENGTH = 300


def test_tenants_share_a_batch_and_have_the_tokens_of_full(tmp_path):
    loaded = wrap_model(build_model(), build_tokenizer(), model_id="tiny", accelerate=True)
    registry = open_registry(str(tmp_path))
    with fixed_cost_engine(loaded) as engine:
        publish(registry, engine)
        ladder = build_ladder(loaded)
        confidence = TableConfidence(3.0, ladder.lookup_confidence.weights)
        manifest, blobs = pack_ladder(replace(ladder, lookup_confidence=confidence), {})
        registry.publish("tiny", manifest, blobs, request_id="two", aliases=["tenant-b"])
        with serving(engine, registry) as worker, gateway_to(worker.target) as gateway, ThreadPoolExecutor(4) as pool:

            def ask(neap):
                body = chat_body(neap=neap, temperature=0, max_tokens=LENGTH, ignore_eos=True)
                answer = gateway.http.post("/v1/chat/completions", json=body).json()
                return answer["choices"][0], answer["usage"]["neap"]

            tenants = [{"router_version": 1}, {"router_alias": "tenant-b"}, {"policy": "full"}]
            for tenant in tenants:  # both are loaded now
                ask(tenant)
            steps = engine.statistics.step_sequences.counts
            before = steps[2]
            for _ in range(20):  # on a busy machine they need not meet at once
                found = list(pool.map(ask, tenants))
                if steps[2] > before:
                    break
            assert steps[2] > before, "steps of three"
        assert [choice["neap"]["router_version"] for choice, _ in found] == [1, 2, 0]
        assert len({choice["message"]["content"] for choice, _ in found}) == 1
        assert [bool(figures["drafted_tokens"]) for _, figures in found] == [True, True, False]
        assert all(figures["accepted_tokens"] <= figures["drafted_tokens"] for _, figures in found)
    registry.close()
