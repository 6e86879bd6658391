"""vLLM's dialect, beside our own service: the same answers, the same refusals, and what drift would change."""

import hashlib
import io
import zipfile
from types import SimpleNamespace

import grpc
import pytest
import transformers as hf
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from inference_service.vllm_convert import PARAMETERS, REQUEST, to_requests
from inference_service.vllm_servicer import _SERVICE, MAX_ABORTED, VllmServicer
from shared.engine.engine import Engine
from shared.engine.request.handle import GenerationHandle
from shared.registry.factory import open_registry
from shared.rpc.access import METHOD_ROLES
from tests.generation import answer
from tests.spans import recorded_spans
from tests.waiting import wait_until
from tests.worker import CONTEXT_LENGTH, serving

PROMPT = [72, 101, 108, 108, 111]
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def worker(loaded, tmp_path_factory):
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    with (
        Engine(loaded) as engine,
        serving(engine, registry, dialect=True) as worker,
        grpc.insecure_channel(worker.target) as channel,
    ):
        worker.channel = channel
        worker.theirs = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        worker.ours = inference_pb2_grpc.InferenceServiceStub(channel)
        yield worker
    registry.close()


def request_of(*, stream=False, text="", ids=PROMPT, **params):
    params = {"temperature": 0, "max_tokens": 12, **params}
    prompt = {"text": text} if text else {"tokenized": vllm.TokenizedInput(input_ids=ids)}
    return vllm.GenerateRequest(request_id="a", **prompt, stream=stream, sampling_params=vllm.SamplingParams(**params))


def asked(worker, request):
    """By index: ids of the chunks, and what completed it."""
    found: dict[int, SimpleNamespace] = {}
    for response in worker.theirs.Generate(request, timeout=60):
        part = getattr(response, response.WhichOneof("response"))
        one = found.setdefault(part.index, SimpleNamespace(chunks=[], ids=[], whole=None))
        assert one.whole is None
        if response.HasField("chunk"):
            assert part.completion_tokens == len(part.token_ids) > 0
            one.chunks.append(part)
            one.ids += part.token_ids
        else:
            one.whole = part
    return found


def load_of(worker):
    (load,) = worker.theirs.GetLoads(vllm.GetLoadsRequest()).loads
    return load


SAMPLED = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 3}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("params", "sampling", "more"),
    [
        ({}, {}, {}),
        (SAMPLED, SAMPLED, {}),
        (PENALTIES, PENALTIES, {}),
        ({"logit_bias": {65: 7.5}, "min_tokens": 3}, {"logit_bias": {65: 7.5}, "min_tokens": 3}, {}),
        ({"temperature": None, "seed": -1}, {"temperature": 1.0, "seed": 2**64 - 1}, {}),
        ({"regex": "[a-f]{4}"}, {}, {"constraint": pb.Constraint(regex="[a-f]{4}")}),
        ({"grammar": 'start: "yes"'}, {}, {"constraint": pb.Constraint(lark='start: "yes"')}),
        ({"json_schema": '{"const": 7}'}, {}, {"constraint": pb.Constraint(json_schema='{"const": 7}')}),
        ({"json_object": True}, {}, {"constraint": pb.Constraint(json_object=pb.JsonObject())}),
        (
            {"choice": vllm.ChoiceConstraint(choices=["ab", "cd"])},
            {},
            {"constraint": pb.Constraint(choice=pb.Choice(texts=["ab", "cd"]))},
        ),
    ],
)
def test_answers_are_those_of_our_own_service(worker, params, sampling, more):
    own = pb.GenerateRequest(
        model_id="tiny",
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.Sampling(**{"temperature": 0, **sampling}),
        stopping=pb.Stopping(max_tokens=12),
        **more,
    )
    _, tokens, _, finished = answer(worker.ours, own)
    ids = [token.id for token in tokens]
    (streamed,) = asked(worker, request_of(stream=True, **params)).values()
    (whole,) = asked(worker, request_of(**params)).values()
    assert (streamed.ids, list(streamed.whole.output_ids)) == (ids, [])
    assert (whole.ids, list(whole.whole.output_ids)) == ([], ids)
    for one in (streamed.whole, whole.whole):
        assert one.finish_reason == ("length" if finished.reason == pb.FINISH_REASON_LENGTH else "stop")
        assert (one.prompt_tokens, one.completion_tokens) == (len(PROMPT), finished.usage.num_completion_tokens)


def test_numbers_are_those_that_a_person_wrote(loaded):
    (own,) = to_requests(request_of(temperature=0.7, top_p=0.95, logit_bias={65: 0.1}), loaded)
    assert own.sampling == pb.Sampling(temperature=0.7, top_p=0.95, logit_bias={65: 0.1})


def test_a_text_is_a_prompt_and_stops_say_what_matched(worker):
    _, tokens, texts, _ = answer(worker.ours, pb.GenerateRequest(model_id="tiny", text="hello"))
    text, first, third = "".join(texts), tokens[0].id, tokens[2].id
    (one,) = asked(worker, request_of(text="hello", max_tokens=None, stop_token_ids=[third])).values()
    assert (one.whole.finish_reason, one.whole.matched_token_id) == ("stop", third)
    assert one.whole.output_ids[0] == first
    stop = next(letter for letter in text[3:] if letter.isascii())
    (one,) = asked(worker, request_of(text="hello", max_tokens=None, stop=[stop])).values()
    assert (one.whole.finish_reason, one.whole.matched_stop_str) == ("stop", stop)


def test_choices_have_seeds_of_their_own(worker):
    found = asked(worker, request_of(stream=True, n=3, **SAMPLED))
    alone = [asked(worker, request_of(stream=True, **{**SAMPLED, "seed": 3 + i}))[0].ids for i in range(3)]
    assert [found[i].ids for i in range(3)] == alone
    assert len({tuple(ids) for ids in alone}) > 1


def test_log_probabilities_of_answer_and_prompt(worker):
    for stream in (False, True):
        (one,) = asked(worker, request_of(stream=stream, logprobs=2, prompt_logprobs=1, max_tokens=3)).values()
        parts = [part.output_logprobs for part in one.chunks] or [one.whole.output_logprobs]
        ids, logprobs, tops = (
            [v for p in parts for v in getattr(p, n)] for n in ("token_ids", "token_logprobs", "top_logprobs")
        )
        assert ids == (one.ids or list(one.whole.output_ids))
        # Greedy: the first alternative is the token.
        assert [(top.token_ids[0], top.values[0]) for top in tops] == list(zip(ids, logprobs, strict=True))
        assert {len(top.values) for top in tops} == {2}
        prompt = (one.chunks[0] if stream else one.whole).input_logprobs
        assert list(prompt.token_ids) == PROMPT
        assert [value.HasField("value") for value in prompt.token_logprobs] == [False, True, True, True, True]


def test_abort_ends_the_callers_request_of_that_id(worker):
    call = worker.theirs.Generate(request_of(stream=True, max_tokens=CONTEXT_LENGTH - 10, ignore_eos=True), timeout=60)
    next(call)
    worker.theirs.Abort(vllm.AbortRequest(request_ids=["b"]))
    assert next(call).HasField("chunk")
    worker.theirs.Abort(vllm.AbortRequest(request_ids=["a", "b"]))
    *_, last = call
    assert last.complete.finish_reason == "abort"
    wait_until(lambda: load_of(worker).num_total_reqs == 0)


def test_abort_ends_a_request_whose_client_does_not_read(worker, monkeypatch):
    """gRPC has a message of the answer then, and takes no other before the client reads."""
    paused = []
    pause = GenerationHandle.pause
    monkeypatch.setattr(GenerationHandle, "pause", lambda handle: (pause(handle), paused.append(handle)))
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    with grpc.insecure_channel(worker.target, options=options) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = request_of(stream=True, n=3, max_tokens=CONTEXT_LENGTH - 10, ignore_eos=True, logprobs=20)
        call = stub.Generate(request, timeout=60)
        wait_until(lambda: len(paused) >= 3)
        stub.Abort(vllm.AbortRequest(request_ids=["a"]))
        assert [part.complete.finish_reason for part in call if part.HasField("complete")] == ["abort"] * 3
    wait_until(lambda: load_of(worker).num_total_reqs == 0)


def test_a_client_that_goes_ends_its_request(worker):
    spans = recorded_spans()
    call = worker.theirs.Generate(request_of(stream=True, n=2, max_tokens=2000, ignore_eos=True))
    next(call)
    wait_until(lambda: load_of(worker).num_running_reqs == 2)
    assert load_of(worker).num_waiting_reqs == 0 < load_of(worker).token_usage <= 1
    assert worker.theirs.GetServerInfo(vllm.GetServerInfoRequest()).active_requests == 2
    call.cancel()
    wait_until(lambda: load_of(worker).num_total_reqs == 0)
    spans.wait_for(lambda: spans.named(f"{_SERVICE.full_name}/Generate"))
    (span,) = spans.named(f"{_SERVICE.full_name}/Generate")
    assert span.attributes["rpc.response.status_code"] == "CANCELLED"


@pytest.mark.parametrize(
    ("request_", "reason", "said"),
    [
        (vllm.GenerateRequest(), "EMPTY_PROMPT", ""),
        (request_of(temperature=-1), "INVALID_INPUT", "temperature"),
        (request_of(logprobs=-1), "INVALID_INPUT", "logprobs"),
        (request_of(prompt_logprobs=99), "INVALID_INPUT", "prompt_logprobs"),
        (request_of(logit_bias={-1: 1}), "INVALID_INPUT", "logit_bias"),
        (request_of(stop=["a"] * 17), "INVALID_INPUT", "17 stop"),
        (request_of(n=129), "INVALID_INPUT", "n is 129"),
        (request_of(grammar='root ::= "yes"'), "CONSTRAINT_INVALID", ""),
        (request_of(structural_tag="{}"), "INVALID_INPUT", "sampling_params.structural_tag"),
        (request_of(truncate_prompt_tokens=5), "INVALID_INPUT", "sampling_params.truncate_prompt_tokens"),
        (vllm.GenerateRequest(media_refs=vllm.MediaRefs()), "INVALID_INPUT", "media_refs"),
        (vllm.GenerateRequest(mm_inputs=vllm.MultimodalInputs()), "INVALID_INPUT", "mm_inputs"),
        (vllm.GenerateRequest(kv_transfer_params_json="{}"), "INVALID_INPUT", "kv_transfer_params_json"),
        (vllm.GenerateRequest(data_parallel_rank=1), "INVALID_INPUT", "data_parallel_rank"),
    ],
)
def test_bad_requests_are_refused_with_the_reason_of_our_own(worker, request_, reason, said):
    with pytest.raises(grpc.RpcError) as caught:
        list(worker.theirs.Generate(request_, timeout=30))
    info = error_details_pb2.ErrorInfo()
    rpc_status.from_call(caught.value).details[0].Unpack(info)
    assert (caught.value.code(), info.reason) == (Code.INVALID_ARGUMENT, reason)
    assert said in caught.value.details()


def test_what_is_not_served_is_refused_by_name(worker):
    served = {"Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"}
    others = {"Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"}
    assert {method.name for method in _SERVICE.methods} == served | others
    for name in others:
        with pytest.raises(grpc.RpcError) as caught:
            list(worker.channel.unary_stream(f"/{_SERVICE.full_name}/{name}")(b"", timeout=30))
        assert (caught.value.code(), caught.value.details()) == (Code.UNIMPLEMENTED, f"{name} is not served here")
    with pytest.raises(grpc.RpcError) as caught:
        worker.theirs.Abort(vllm.AbortRequest(request_ids=["a"] * (MAX_ABORTED + 1)))
    assert caught.value.code() == Code.INVALID_ARGUMENT
    roles = {method for method in METHOD_ROLES if method.startswith("/vllm.")}
    assert roles == {f"/{_SERVICE.full_name}/{name}" for name in served}


def test_the_model_and_its_tokenizer_are_described(worker, loaded, tmp_path):
    info = worker.theirs.GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length, info.vocab_size) == ("tiny", CONTEXT_LENGTH, 263)
    assert list(info.eos_token_ids) == sorted(loaded.eos_token_ids)
    parts = list(worker.theirs.GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(part.data for part in parts)
    assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
    zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages) == loaded.tokenizer.apply_chat_template(messages)
    again = b"".join(part.data for part in worker.theirs.GetTokenizer(common.GetTokenizerRequest()))
    assert data == again


async def test_a_worker_that_does_not_serve_is_not_healthy(worker):
    assert worker.theirs.HealthCheck(vllm.HealthCheckRequest()).healthy
    servicer = VllmServicer(worker.servicer, "tiny", lambda: False, None)
    assert not (await servicer.HealthCheck(None, None)).healthy


def test_the_published_fields_are_those_that_were_read():
    """Fails where a release adds a field to requests: it is refused by name until somebody has read what it means."""
    refused = {"structural_tag", "truncate_prompt_tokens"}
    assert {field.name for field in vllm.SamplingParams.DESCRIPTOR.fields} == PARAMETERS | refused
    refused = {
        *("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs"),
        "data_parallel_rank",
    }
    assert {field.name for field in vllm.GenerateRequest.DESCRIPTOR.fields} == REQUEST | refused
