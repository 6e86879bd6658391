def test_list(service, neap):
    result = neap("routers", "list", "--model", "tiny", "--calibrator", service.address)
    assert result.exit_code == 0, result.output
    rows = [line.split("│") for line in result.stdout.splitlines() if "suffix" in line]
    assert [row[1].strip() for row in rows] == ["2", "1"]
    assert [row[2].strip() for row in rows] == ["", "stable"]
    assert rows[0][5].strip() == "2.50"


def test_list_of_an_unknown_model_says_so(service, neap):
    result = neap("routers", "list", "--model", "none", "--calibrator", service.address)
    assert result.stdout == "no router is published for none\n"


def test_show(service, neap):
    base = ["routers", "show", "--model", "tiny", "--calibrator", service.address]
    result = neap(*base, "1")
    assert "tiny version 1" in result.stdout
    assert "0.875" in result.stdout
    assert neap(*base, "1", "--manifest").stdout.startswith('{"rungs"')
    missing = neap(*base, "9")
    assert missing.exit_code == 1
    assert "VERSION_NOT_FOUND" in missing.stderr


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
