"""Commands that put versions on trial, show trials, and tell the judge what to leave alone."""

from neap_client.router.v1 import router_pb2 as pb


def test_a_trial_and_what_is_known_of_it(service, neap, wide):
    where = ["--model", "tiny", "--calibrator", service.address]
    begun = neap("routers", "try", "2", "--alias", "stable", "--reason", "more text", *where)
    assert begun.stdout == "stable: 1, 5% to 2\n"
    (request,) = service.routers.requests
    assert (request.model_id, request.alias, request.version, request.reason) == ("tiny", "stable", 2, "more text")
    assert request.actor
    shown = neap("routers", "judged", *where).stdout
    (row,) = (line for line in shown.splitlines() if "on trial" in line)
    assert [cell.strip() for cell in row.split("│")[1:5]] == ["stable", "1", "5% to 2", "on trial"]
    assert "1.2x as fast" in row
    assert "\x1b" not in shown
    assert "not tried: 7, 9\n" in shown
    assert "does not judge now" in shown


def test_orders(service, neap):
    where = ["--model", "tiny", "--calibrator", service.address]
    assert neap("routers", "hold", "--alias", "stable", *where).stdout == "stable: held\n"
    assert neap("routers", "release", "--alias", "stable", *where).stdout == "stable: judged\n"
    assert neap("routers", "forbid", "2", *where).stdout == "version 2 is not tried\n"
    assert neap("routers", "allow", "2", *where).stdout == "version 2 may be tried\n"
    assert [(order.action, order.alias, order.version) for order in service.routers.requests] == [
        (pb.JUDGE_ACTION_HOLD, "stable", 0),
        (pb.JUDGE_ACTION_RELEASE, "stable", 0),
        (pb.JUDGE_ACTION_FORBID, "", 2),
        (pb.JUDGE_ACTION_ALLOW, "", 2),
    ]
