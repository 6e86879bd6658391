"""Converts between vLLM's dialect (`vllm.grpc.engine` of PyPI's smg-grpc-proto) and neap.inference.v1."""

from collections.abc import Iterable
from typing import Any

from neap_client.fields import FIELDS
from neap_client.inference.v1 import inference_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from inference_service.convert import check_items, check_num_ids
from shared.constraints.constraint import MAX_BYTES
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

MAX_CHOICES = 128
UINT64 = 2**64 - 1

# Fields of a request that have their like here. `request_id` is what Abort names, `stream` how an answer is written.
REQUEST = {"request_id", "tokenized", "text", "sampling_params", "stream"}
# Fields of SamplingParams: those with the same name in Sampling, those with a like in Stopping and in Constraint.
SAMPLING = {name for name in FIELDS["Sampling"] if name in vllm.SamplingParams.DESCRIPTOR.fields_by_name} - {
    *("seed", "logit_bias"),
}
STOPPING = {"max_tokens": "max_tokens", "ignore_eos": "ignore_eos"}
STOPPING_LISTS = {"stop": "stop_strings", "stop_token_ids": "stop_token_ids"}
TEXT_FORMS = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark"}
LOGPROBS = ("logprobs", "prompt_logprobs")
OTHERS = {"n", "seed", "logit_bias", "json_object", "choice", *LOGPROBS}
# What is about text, which the gateway makes of the tokens, and what holds here in any case.
WITHOUT_EFFECT = {
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    "grammar_from_first_token",
}
PARAMETERS = {*SAMPLING, *STOPPING, *STOPPING_LISTS, *TEXT_FORMS, *OTHERS, *WITHOUT_EFFECT}

_REASONS = {pb.FINISH_REASON_LENGTH: "length"}  # all others are "stop"


def to_requests(request: vllm.GenerateRequest, loaded: LoadedModel) -> list[pb.GenerateRequest]:
    """One request for each of the `n` choices. A field that is set and has no like here is refused by its name; what
    the values may be is checked where our own requests are. Raises InvalidInput and PromptTooLong."""
    params = request.sampling_params
    _refuse_others(request, REQUEST, "")
    _refuse_others(params, PARAMETERS, "sampling_params.")
    if params.n > MAX_CHOICES:
        raise InvalidInput(f"n is {params.n}; at most {MAX_CHOICES} are allowed", metadata={"field": "n"})
    shared = pb.GenerateRequest(
        model_id=loaded.model_id, sampling=_sampling(params), stopping=_stopping(params), model_defaults=True
    )
    if request.WhichOneof("input") == "text":
        shared.text = request.text
    else:
        check_num_ids(len(request.tokenized.input_ids), loaded)
        shared.token_ids.ids.extend(request.tokenized.input_ids)
    for name in LOGPROBS:
        if params.HasField(name):
            setattr(shared, name, _not_negative(getattr(params, name), name))
    if params.WhichOneof("constraint"):
        shared.constraint.CopyFrom(_constraint(params))
    requests = []
    for index in range(max(1, params.n)):
        requests.append(choice := pb.GenerateRequest())
        choice.CopyFrom(shared)
        if params.HasField("seed"):  # choices with the same seed would be the same
            choice.sampling.seed = (params.seed + index) & UINT64
    return requests


def _refuse_others(message: Any, known: set[str], prefix: str) -> None:
    for field, _ in message.ListFields():
        if field.name not in known:
            raise InvalidInput(f"{prefix}{field.name} is not supported here", metadata={"field": field.name})


def _not_negative(value: int, name: str) -> int:
    if value < 0:
        raise InvalidInput(f"{name} is {value}; it must not be negative", metadata={"field": name})
    return value


def _sampling(params: vllm.SamplingParams) -> pb.Sampling:
    # 0.7 is 0.7 then, as it is in a body of HTTP, and not the float nearest to it.
    fields: dict[str, Any] = {
        field.name: float(f"{value:.7g}") if isinstance(value, float) else value
        for field, value in params.ListFields()
        if field.name in SAMPLING
    }
    bias = {_not_negative(key, "logit_bias"): float(f"{value:.7g}") for key, value in params.logit_bias.items()}
    return pb.Sampling(**fields, logit_bias=bias)


def _stopping(params: vllm.SamplingParams) -> pb.Stopping:
    stopping = pb.Stopping(**{STOPPING[f.name]: value for f, value in params.ListFields() if f.name in STOPPING})
    for name, ours in STOPPING_LISTS.items():
        check_items(ours, getattr(params, name), name)
        getattr(stopping, ours).extend(getattr(params, name))
    return stopping


def _constraint(params: vllm.SamplingParams) -> pb.Constraint:
    form = params.WhichOneof("constraint")
    if form == "choice":
        return pb.Constraint(choice=pb.Choice(texts=params.choice.choices[: MAX_BYTES + 1]))
    if form == "json_object":
        return pb.Constraint(json_object=pb.JsonObject())
    return pb.Constraint(**{TEXT_FORMS[form]: getattr(params, form)})


class Answer:
    """Makes the messages of one choice from our events. With `is_streamed` its tokens come as they are made, else all
    in its last message."""

    def __init__(self, index: int, *, is_streamed: bool) -> None:
        self._index, self._is_streamed = index, is_streamed
        self._prompt = vllm.InputLogProbs()
        self._whole = vllm.GenerateComplete(index=index)

    def message(self, response: pb.GenerateResponse) -> vllm.GenerateResponse | None:
        """None for an event that has none."""
        match response.WhichOneof("event"):
            case "started":
                self._whole.prompt_tokens = response.started.num_prompt_tokens
            case "chunk":
                return self._chunk(response.chunk)
            case "finished":
                return vllm.GenerateResponse(complete=self._complete(response.finished))
        return None

    def aborted(self) -> vllm.GenerateResponse:
        """The last message of a choice that Abort ends."""
        self._whole.finish_reason = "abort"
        return vllm.GenerateResponse(complete=self._whole)

    def _chunk(self, chunk: pb.TokenChunk) -> vllm.GenerateResponse | None:
        for token in chunk.prompt_tokens:
            value = self._prompt.token_logprobs.add()
            if token.HasField("logprob"):
                value.value = token.logprob
        _add_tokens(self._prompt, chunk.prompt_tokens)
        if not chunk.tokens:
            return None
        ids = [token.id for token in chunk.tokens]
        logprobs = vllm.OutputLogProbs()
        if chunk.tokens[0].HasField("logprob"):
            logprobs.token_logprobs.extend(token.logprob for token in chunk.tokens)
            _add_tokens(logprobs, chunk.tokens)
        if not self._is_streamed:
            self._whole.output_ids.extend(ids)
            self._whole.output_logprobs.MergeFrom(logprobs)
            return None
        made = vllm.GenerateStreamChunk(
            token_ids=ids,
            prompt_tokens=self._whole.prompt_tokens,
            completion_tokens=len(ids),
            output_logprobs=logprobs if logprobs.token_ids else None,
            input_logprobs=self._taken_prompt(),
            index=self._index,
        )
        return vllm.GenerateResponse(chunk=made)

    def _complete(self, finished: pb.Finished) -> vllm.GenerateComplete:
        whole, usage = self._whole, finished.usage
        whole.finish_reason = _REASONS.get(finished.reason, "stop")
        whole.prompt_tokens, whole.completion_tokens = usage.num_prompt_tokens, usage.num_completion_tokens
        whole.cached_tokens = usage.num_cached_tokens
        whole.spec_draft_tokens, whole.spec_accepted_tokens = finished.depth.num_drafted, finished.depth.num_accepted
        if finished.reason == pb.FINISH_REASON_STOP_TOKEN:
            whole.matched_token_id = int(finished.stop_match)
        elif finished.reason == pb.FINISH_REASON_STOP_STRING:
            whole.matched_stop_str = finished.stop_match
        if (prompt := self._taken_prompt()) is not None:
            whole.input_logprobs.CopyFrom(prompt)
        return whole

    def _taken_prompt(self) -> vllm.InputLogProbs | None:
        """The log-probabilities of the prompt, once."""
        prompt, self._prompt = self._prompt, vllm.InputLogProbs()
        return prompt if prompt.token_ids else None


def _add_tokens(logprobs: Any, tokens: Iterable[pb.Token]) -> None:
    for token in tokens:
        logprobs.token_ids.append(token.id)
        top = logprobs.top_logprobs.add()
        top.token_ids.extend(alternative.id for alternative in token.alternatives)
        top.values.extend(alternative.logprob for alternative in token.alternatives)
