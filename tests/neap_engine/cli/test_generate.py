import json

import pytest
from neap_client.inference.v1 import inference_pb2 as pb
from rich.console import Console

from neap_engine.cli.generate import FULL_STYLE, SHADES, DepthView, proposer_colour


def test_streams_text_to_stdout_and_statistics_to_stderr(service, neap):
    result = neap("generate", "hi", "--worker", service.address)
    assert result.stdout == "Héllo there\n"
    assert "3 + 2 tokens (length)" in result.stderr
    assert "1/1 drafts accepted" in result.stderr


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_says_where_an_answer_went_on_inexactly(service, neap, flags):
    said = "after 1 tokens another worker went on"
    assert said not in neap("generate", "hi", "--worker", service.address, *flags).stderr
    service.inference.is_interrupted = True
    result = neap("generate", "hi", "--worker", service.address, *flags)
    assert said in result.stderr
    if not flags:
        assert result.stdout == "Héllo there\n"


def test_control_characters_in_generated_text_are_escaped(service, neap):
    service.inference.text = " a\x1b[2J\x9b\u202e\nb"
    result = neap("generate", "hi", "--worker", service.address)
    assert result.stdout == "Héllo a\\u001b[2J\\u009b\\u202e\nb\n"
    result = neap("generate", "hi", "--worker", service.address, "--json")
    assert all(line.isprintable() for line in result.stdout.splitlines())
    texts = [json.loads(line).get("chunk", {}).get("text", "") for line in result.stdout.splitlines()]
    assert "".join(texts) == "Héllo" + service.inference.text


def test_a_margin_is_carried(service, neap):
    flags = ["--policy", "relaxed", "--margin", "0.2"]
    neap("generate", "hi", "--worker", service.address, *flags)
    relaxed = service.inference.requests[0].depth.relaxed
    assert (relaxed.margin, relaxed.HasField("threshold")) == (0.2, False)


def test_the_request_carries_every_flag(service, neap, tmp_path):
    flags = ["--model", "tiny", "--policy", "relaxed", "--threshold", "0.9", "--min-layers", "4"]
    flags += ["--temperature", "0", "--top-k", "5", "--seed", "0", "--stop", "a", "--stop", "b"]
    flags += ["--max-tokens", "9", "--router", "3", "--system", "be brief", "--ignore-eos"]
    schema = tmp_path / "schema.json"
    schema.write_text('{"title": "é"}', encoding="utf-8")
    flags += ["--json-schema", str(schema)]
    neap("generate", "hi", "--worker", service.address, *flags)
    request = service.inference.requests[0]
    assert request.depth.relaxed.threshold == 0.9
    assert request.depth.min_layers == 4
    assert request.sampling == pb.Sampling(temperature=0.0, top_k=5, seed=0)
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p")
    assert list(request.stopping.stop_strings) == ["a", "b"]
    assert request.stopping.max_tokens == 9
    assert request.stopping.ignore_eos
    assert request.constraint == pb.Constraint(json_schema='{"title": "é"}')
    assert request.router.version == 3
    roles = [(message.role, message.content) for message in request.chat.messages]
    assert roles == [("system", "be brief"), ("user", "hi")]


def test_a_prediction_comes_from_a_file(service, neap, tmp_path):
    file = tmp_path / "draft.txt"
    file.write_text("Was ich erwarte: ü\n", encoding="utf-8")
    neap("generate", "hi", "--worker", service.address, "--prediction", str(file))
    expected = pb.Prediction(text="Was ich erwarte: ü\n")
    assert service.inference.requests[0].prediction == expected
    neap("generate", "hi", "--worker", service.address, "--prediction", "nowhere.txt", code=2)


@pytest.mark.parametrize("flags", [[], ["--threshold", "0.9"], ["--margin", "0.1"]])
def test_relaxed_says_that_it_is_lossy(service, neap, flags):
    command = ["generate", "hi", "--worker", service.address]
    shown = neap(*command, "--policy", "relaxed", *flags).stderr
    assert "relaxed is lossy: 1 tokens are not the full model's own choice" in shown
    assert "lossy" not in neap(*command).stderr


def test_a_misspelt_variable_gets_a_warning(service, neap):
    variables = {"NEAP_TOKENS_FILE": "secret"}
    result = neap("generate", "hi", "--worker", service.address, env=variables)
    assert "NEAP_TOKENS_FILE is not known; did you mean NEAP_TOKEN_FILE?" in result.stderr
    assert "secret" not in result.stderr
    assert "not known" not in neap("generate", "hi", "--worker", service.address).stderr


def test_raw_prompt_from_standard_input(service, neap):
    neap("generate", "-", "--raw", "--worker", service.address, input="Once upon\n")
    assert service.inference.requests[0].text == "Once upon\n"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_base_model_continues_plain_text_and_a_line_says_so(service, neap, flags):
    service.inference.has_chat_template = False
    result = neap("generate", "Once upon", "--worker", service.address, *flags)
    assert "no chat template: prompts are continued as plain text" in result.stderr
    assert "plain text" not in result.stdout
    assert service.inference.requests[-1].text == "Once upon"
    system = neap("generate", "hi", "--system", "be brief", "--worker", service.address, code=1)
    assert "NO_CHAT_TEMPLATE" in system.stderr


def test_json_has_one_event_per_line(service, neap):
    result = neap("generate", "hi", "--json", "--worker", service.address)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [next(iter(event)) for event in events] == ["started", "chunk", "chunk", "finished"]
    assert events[2]["chunk"]["tokens"][0]["proposer"] == "prompt-lookup"


def test_show_depth_prints_a_legend(service, neap):
    result = neap("generate", "hi", "--show-depth", "--worker", service.address)
    assert "prompt-lookup (0/30) 1" in result.stderr
    assert "full (30/30) 1" in result.stderr


@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (["--policy", "full", "--threshold", "0.5"], 1, "threshold applies to the policy relaxed"),
        (["--policy", "exact", "--raw", "--system", "x"], 1, "a system message needs the chat template"),
        (["--policy", "bold"], 2, "'bold' is not one of"),
        (["--no-such-flag"], 2, "--no-such-flag"),
    ],
)
def test_errors_are_one_line(service, neap, flags, code, reason):
    result = neap("generate", "hi", "--worker", service.address, *flags, code=code)
    assert reason in result.stderr
    assert "Traceback" not in result.output
    if code == 1:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_colours_follow_depth():
    assert proposer_colour("full", 30, 30) == FULL_STYLE
    assert proposer_colour("prompt-lookup", 0, 30) != proposer_colour("ngram-table", 0, 30)
    styles = [proposer_colour("depth", depth, 30) for depth in range(1, 30)]
    order = [SHADES.index(style) for style in styles]
    assert order == sorted(order)
    assert len(set(order)) > 3


def test_text_is_coloured_by_its_token_and_late_text_by_the_deepest(capsys):
    console = Console(force_terminal=True, color_system="standard", width=80)
    view = DepthView(console, num_layers=4, coloured=True)
    with console.capture() as capture:
        view.show(
            pb.GenerateResponse(
                chunk=pb.TokenChunk(text="a", tokens=[pb.Token(exit_depth=0, proposer="prompt-lookup")])
            )
        )
        view.show(
            pb.GenerateResponse(chunk=pb.TokenChunk(text="", tokens=[pb.Token(exit_depth=0, proposer="prompt-lookup")]))
        )
        view.show(pb.GenerateResponse(chunk=pb.TokenChunk(text="é", tokens=[pb.Token(exit_depth=4, proposer="full")])))
    assert capture.get() == "\x1b[92ma\x1b[0m\x1b[39mé\x1b[0m"
    assert view.counts == {("prompt-lookup", 0): 2, ("full", 4): 1}
