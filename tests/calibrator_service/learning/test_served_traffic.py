"""A service learns a pool's router from what was served, by itself, in real jobs on a tiny random model."""

import json
from contextlib import closing

import pytest
import torch
from neap_client.calibration.v1 import calibration_pb2 as pb
from transformers import AutoModelForCausalLM

from calibrator_service.calibration.spec import ServedTraffic
from calibrator_service.learning.traffic_file import fetch_traffic
from shared.registry.factory import open_registry
from shared.traffic.answer import ServedAnswer
from shared.traffic.traffic import open_traffic
from tests.families import VOCABULARY_SIZE
from tests.waiting import wait_until


def served(prompt: list[int], answer_ids: list[int], *, pool: str = "legal", hour: int = 480_000) -> ServedAnswer:
    return ServedAnswer("tiny", pool, 0, "cpu", hour, prompt, answer_ids)


def test_the_newest_answers_come_first_and_a_later_start_has_the_same(tmp_path):
    registry = str(tmp_path / "registry")
    traffic = open_traffic(registry)
    traffic.write([served([hour], [2, 3], hour=480_000 + hour) for hour in (1, 2, 3)])
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    path = fetch_traffic(registry, "tiny", ServedTraffic("legal"), work_dir, 0, None)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"prompt": [hour], "answer": [2, 3]} for hour in (3, 2, 1)]
    traffic.forget("legal")
    assert fetch_traffic(registry, "tiny", ServedTraffic("legal"), work_dir, 0, None).read_text() == path.read_text()


def test_a_limit_leaves_out_the_oldest(tmp_path):
    registry = str(tmp_path / "registry")
    open_traffic(registry).write([served([hour], [2] * 99, hour=480_000 + hour) for hour in range(9)])
    path = fetch_traffic(registry, "tiny", ServedTraffic("legal"), tmp_path, 100, None)
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    assert prompts == [[8], [7], [6], [5]]


def states(service) -> list[int]:
    return [job.state for job in service.calibrations.ListCalibrations(pb.ListCalibrationsRequest()).calibrations]


@pytest.mark.full
def test_a_pool_learns_by_itself_and_goes_on(start_service, model_folder, tmp_path):
    prompts = [[2 + (number * 7 + at) % (VOCABULARY_SIZE - 2) for at in range(6)] for number in range(120)]
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    answers = model.generate(torch.tensor(prompts), max_new_tokens=24, do_sample=False)[:, 6:].tolist()
    registry = f"{tmp_path}/registry"
    traffic = open_traffic(registry)
    flags = ("--model", f"tiny={model_folder}", "--threads", "1", "--learn-tokens", "1000", "--learn-interval-s", "0")
    service = start_service(*flags, "--learn-from-traffic", "--learn-budget-s", "60", real=True)
    for half in (0, 60):
        together = zip(prompts[half : half + 60], answers[half : half + 60], strict=True)
        traffic.write([served(prompt, ids) for prompt, ids in together])
        expected = [pb.STATE_SUCCEEDED] * (1 + half // 60)
        wait_until(lambda expected=expected: states(service) == expected, timeout_s=200)
    with closing(open_registry(registry)) as opened:
        assert opened.aliases("tiny") == {"latest@legal": 2}
        first, second = (opened.get("tiny", version).manifest for version in (1, 2))
    assert first["pool"] == second["pool"] == "legal"
    source = first["calibration"]["spec"]["source"]
    assert (source["kind"], source["pool"]) == ("ServedTraffic", "legal")
    assert "path" not in source
    assert str(tmp_path) not in json.dumps(second)
    assert second["calibration"]["spec"]["parent"]["version"] == 1
    assert second["calibration"]["statistics"]["generation"] == 1
