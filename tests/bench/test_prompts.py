"""Benchmarks on a model without a chat template send plain text."""

import asyncio
import json

import pytest

from bench.decode_figures import EXACT, FULL, measure, summarise
from bench.load import chat
from bench.prompts import BenchPrompt, encode_turns, read_prompts, read_texts
from bench.streams import FINISHED, Stream, StreamClient
from neap_engine.evaluate.sides import neap
from shared.engine.engine import Engine
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import wrap_model
from shared.registry.factory import open_registry
from tests.worker import build_ladder, build_model, build_tokenizer, serving


def base_model():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    return wrap_model(build_model(), tokenizer, model_id="bench")


def test_turns_of_a_base_model_are_paragraphs():
    loaded = base_model()
    assert loaded.tokenizer.decode(encode_turns(loaded, ["one", "two", "three"])) == ("one\n\ntwo\n\nthree")
    loaded.tokenizer.chat_template = build_tokenizer().chat_template
    assert loaded.tokenizer.decode(encode_turns(loaded, ["one", "two", "three"])) == (
        "user: one\nassistant: two\nuser: three\nassistant:"
    )


def test_decode_measures_a_base_model():
    loaded = base_model()
    prompts = [BenchPrompt("QA", ("hello hello", "and then"))]
    with Engine(loaded, prefix_cache_bytes=0) as engine:
        sides = {
            FULL: neap(engine, DepthPolicy("full"), None, 4),
            EXACT: neap(engine, DepthPolicy("exact"), build_ladder(loaded), 4),
        }
        results = measure(loaded, sides, prompts)
    full, exact = results["QA"][FULL], results["QA"][EXACT]
    assert len(full) == 2
    assert [run.token_ids for run in full] == [run.token_ids for run in exact]
    assert summarise(results) == {}  # the answers are too short to time


def test_streams_of_a_base_model_go_as_plain_text(tmp_path, capsys):
    async def run(target):
        async with StreamClient(target) as client:
            request = chat("hello", "full", 2)
            refused = await client.run(request, Stream(0.0))
            await client.warm_up(request)
            later = await client.run(chat("hello", "full", 2), Stream(0.0))
            return refused, later

    registry = open_registry(str(tmp_path))
    with Engine(base_model()) as engine, serving(engine, registry) as worker:
        refused, later = asyncio.run(run(worker.target))
    registry.close()
    assert refused.outcome == "NO_CHAT_TEMPLATE"
    assert (later.outcome, later.num_prompt_tokens) == (FINISHED, 1)
    assert capsys.readouterr().out.count("plain text") == 1


def test_line_separators_within_a_prompt_end_no_record(tmp_path):
    path = tmp_path / "prompts.jsonl"
    record = {"category": "qa", "turns": ["a\u2028b\x85c"]}
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [prompt.turns for prompt in read_prompts(path)] == [("a\u2028b\x85c",)]


def test_prompts_are_spread_over_the_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [{"turns": ["a", "b"]}, {"prompt": "c"}, {"question": "d"}, {"prompt": "e"}]
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    assert read_texts(path, 2) == ["a", "d"]
    assert read_prompts(path)[:2] == [BenchPrompt("one kind", ("a", "b")), BenchPrompt("one kind", ("c",))]
    assert read_texts(path, 9) == ["a", "c", "d", "e"]
    path.write_text('{"answer": 1}\n')
    with pytest.raises(InvalidInput, match="without turns, prompt or question"):
        read_texts(path, 1)
