import json

import pytest

from neap_engine.cli import routers
from tests.manifests import real_manifest


def test_list(service, neap):
    calibration = {**real_manifest()["calibration"], "speed": {"num_answers": 9, "speed_up": 1.42}}
    service.routers.manifests[2] = {**real_manifest(), "calibration": calibration}
    service.routers.manifests[1] = {**real_manifest(), "calibration": {"speed": ["an import may say anything"]}}
    result = neap("routers", "list", "--model", "tiny", "--calibrator", service.address)
    rows = [line.split("│") for line in result.stdout.splitlines() if "prompt-lookup" in line]
    assert [row[1].strip() for row in rows] == ["2", "1"]
    assert [row[2].strip() for row in rows] == ["", "stable"]
    assert [[cell.strip() for cell in row[5:7]] for row in rows] == [["2.50", "1.42x"], ["2.50", ""]]


def test_list_as_json(service, neap):
    command = ["routers", "list", "--json", "--calibrator", service.address, "--model"]
    versions = [json.loads(line) for line in neap(*command, "tiny").stdout.splitlines()]
    assert [version["version"] for version in versions] == ["2", "1"]
    assert [version["aliases"] for version in versions] == [[], ["stable"]]
    assert versions[0]["proposers"][0]["name"] == "prompt-lookup"
    assert neap(*command, "none").stdout == ""


def test_list_of_an_unknown_model_prints_that_it_has_no_router(service, neap):
    result = neap("routers", "list", "--model", "none", "--calibrator", service.address)
    assert result.stdout == "no router is published for none\n"


def test_list_shows_damaged_versions(service, neap):
    service.routers.damage[1] = "the stored manifest sha256:1 is missing"
    result = neap("routers", "list", "--model", "tiny", "--calibrator", service.address)
    rows = [line.split("│") for line in result.stdout.splitlines() if "│" in line]
    # The table continues a long list of proposers on a line without a version.
    proposers = {row[1].strip(): row[4].strip() for row in rows if row[1].strip()}
    assert proposers == {"2": "prompt-lookup", "1": "DAMAGED"}
    assert "version 1 is damaged: the stored manifest sha256:1 is missing\n" in result.stdout


def test_show(service, neap):
    base = ["routers", "show", "--model", "tiny", "--calibrator", service.address]
    result = neap(*base, "1")
    assert "tiny version 1" in result.stdout
    rows = [line.split("│") for line in result.stdout.split("\n") if "depth-0" in line]
    figures = next(proposer["figures"] for proposer in real_manifest()["proposers"] if proposer["name"] == "depth-0")
    names = ("agreement", "coverage", "confidence_auc", "confidence_brier", "confidence_precision")
    shown = [f"{figures[name]:.3f}" for name in names]
    assert [cell.strip() for cell in rows[0][1:-1]] == ["depth-0", "0", *shown]
    assert json.loads(neap(*base, "1", "--manifest").stdout) == real_manifest()


def test_show_prints_how_often_answers_by_relaxed_differed(service, neap):
    show = ["routers", "show", "--model", "tiny", "--calibrator", service.address, "1"]
    service.routers.manifest = {"proposers": []}
    assert "relaxed: not measured for this router; it is lossy" in neap(*show).stdout
    counted = {"num_tokens": 640, "num_tokens_differing": 8, "token_low": 0.006, "token_high": 0.025}
    rows = [
        {"margin": 0.1, "num_differing": 2, "low": 0.057, "high": 0.51, **counted},
        {"threshold": 0.85, "num_differing": 9, "low": 0.6, "high": 0.98, **counted},
    ]
    figures = {"num_answers": 10, "max_new_tokens": 64, "interval": "wilson", "confidence": 0.95, "settings": rows}
    service.routers.manifest = {"proposers": [], "calibration": {"relaxed": figures}}
    shown = neap(*show).stdout
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "of 10" in line]
    assert lines == [
        ["margin 0.1", "2 of 10 (5.7% to 51.0%)", "1.25% (0.60% to 2.50%)"],
        ["threshold 0.85", "9 of 10 (60.0% to 98.0%)", "1.25% (0.60% to 2.50%)"],
    ]
    assert "10 held-out prompts, greedy, the first 64 tokens; 95% Wilson intervals" in shown
    assert "relaxed (lossy)" in shown


@pytest.mark.parametrize("left_out", [{"depth-0": "it would not pay"}, None, 7])
def test_show_prints_which_exits_were_left_out(service, neap, left_out):
    service.routers.manifest = {"proposers": [], "calibration": {"left_out": left_out}}
    shown = neap("routers", "show", "--model", "tiny", "--calibrator", service.address, "1")
    assert ("  without depth-0: it would not pay" in shown.stdout) == isinstance(left_out, dict)


@pytest.mark.parametrize(("positions", "shown"), [(199, "not known"), (200, "0.400")])
def test_show_claims_nothing_from_few_positions(service, neap, positions, shown):
    figures = {"agreement": 0.4, "positions": positions}
    service.routers.manifest = {"proposers": [{"name": "depth-0", "figures": figures}]}
    result = neap("routers", "show", "--model", "tiny", "--calibrator", service.address, "1")
    [row] = [line.split("│") for line in result.stdout.splitlines() if "│ depth-0" in line]
    assert row[3].strip() == shown
    assert ("199 held-out positions are too few" in result.stdout) == (positions == 199)


def test_promote_rollback_history(service, neap):
    where = ["--model", "tiny", "--calibrator", service.address]
    promoted = neap("routers", "promote", "2", "--expect", "0", "--reason", "better", *where)
    assert promoted.stdout == "stable: 1 -> 2\n"
    request = service.routers.requests[0]
    assert (request.alias, request.version, request.reason) == ("stable", 2, "better")
    assert request.HasField("expected_version")
    assert request.actor
    assert neap("routers", "rollback", *where).stdout == "stable: 2 -> 1\n"
    history = neap("routers", "history", *where).stdout
    assert "better" in history
    assert "ada" in history


@pytest.mark.parametrize("reason", ["\x1b]0;owned\x07", "\x9b31m", "one\ntwo", "\u202eevil", "[/red][b"])
def test_control_characters_from_a_service_are_escaped(service, neap, reason):
    where = ["--model", "tiny", "--calibrator", service.address]
    service.routers.reason = service.routers.damage[2] = reason
    service.routers.manifest = {"calibration": {"left_out": {"depth-0": reason}}}
    for command in ("history", "list", "show"):
        result = neap("routers", command, *where)
        assert all(line.isprintable() for line in result.stdout.splitlines())
        shown = "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in reason)
        assert shown in result.stdout


def test_canary_promotion_and_abort(service, neap):
    where = ["--model", "tiny", "--calibrator", service.address]
    begun = neap("routers", "canary", "2", "--share", "2.5%", "--expect", "1", *where)
    assert begun.stdout == "stable: 1, 2.5% to 2\n"
    request = service.routers.requests[0]
    assert (request.canary.version, request.canary.share_per_mille) == (2, 25)
    assert request.expected_version == 1
    assert request.actor
    listed = neap("routers", "list", *where).stdout
    assert "stable:2.5%" in listed
    assert "2.5% to 2" in neap("routers", "history", *where).stdout
    assert neap("routers", "abort", "--reason", "slow", *where).stdout == "stable: 1, no canary\n"
    ended = service.routers.requests[1]
    assert (ended.HasField("canary"), ended.reason) == (False, "slow")
    neap("routers", "canary", "2", "--share", "2.5%", *where)
    assert neap("routers", "promote", *where).stdout == "stable: 1 -> 2\n"
    neap("routers", "rollback", "--expect", "2", *where)
    assert service.routers.requests[-1].expected_version == 2


def test_invalid_shares_are_refused(service, neap):
    where = ["--model", "tiny", "--calibrator", service.address]
    for share in ("10", "0%", "0.05%", "101%", "-1%", "x%", "1/2", "%", "nan%"):
        refused = neap("routers", "canary", "2", "--share", share, *where, code=1)
        assert "BAD_SHARE" in refused.stderr
    assert service.routers.requests == []


def manifest_of(tokens: int, **parent: object) -> dict[str, object]:
    spec = {"source": {"kind": "AnswerFile", "digest": f"sha256:{tokens:064d}"}}
    if parent:
        spec["parent"] = parent
    return {"proposers": [], "calibration": {"tokens": {"total": tokens}, "spec": spec}}


def test_show_prints_the_line_of_a_router(service, neap):
    """Parents are found by their digests, because a number may be another registry's."""
    show = ["routers", "show", "--model", "tiny", "--calibrator", service.address]
    fake = service.routers
    fake.manifests = {
        2: manifest_of(300, version=9, manifest_digest="sha256:1", alias="stable", share=0.5),
        1: manifest_of(20_000, version=4, manifest_digest="sha256:elsewhere", share=1.0),
    }
    lines = neap(*show, "2").stdout.split("\n")
    first = lines.index("line, the youngest first") + 1
    assert lines[first].startswith("  version 2, 1970-")
    assert ": 300 tokens of AnswerFile sha256:000000000000, added to the next" in lines[first]
    assert lines[first].endswith(", which was stable then (share 0.5)")
    assert lines[first + 1].startswith("  version 1, 1970-")
    assert lines[first + 1].endswith("added to the next")
    assert lines[first + 2] == "  a router that is not in this registry, sha256:elsewhere"
    fake.manifests = {1: manifest_of(20_000)}
    assert "youngest" not in neap(*show, "1").stdout


def test_a_line_that_returns_to_itself_ends(service, neap, monkeypatch):
    monkeypatch.setattr(routers, "MAX_ANCESTORS", 3)
    service.routers.manifests = {1: manifest_of(5, version=1, manifest_digest="sha256:1")}
    show = ["routers", "show", "--model", "tiny", "--calibrator", service.address, "1"]
    assert neap(*show).stdout.count("  version 1, ") == 3


@pytest.mark.parametrize("calibration", [{"spec": []}, {"spec": {"parent": "x", "source": 1}, "tokens": 3}])
def test_a_manifest_without_a_readable_line_is_shown(service, neap, calibration):
    service.routers.manifests = {1: {"proposers": [], "calibration": calibration}}
    show = ["routers", "show", "--model", "tiny", "--calibrator", service.address, "1"]
    neap(*show)
