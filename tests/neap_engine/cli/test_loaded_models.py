import json


def test_ps_shows_load_and_routers(service, neap, wide):
    result = neap("ps", "--worker", service.address)
    (row,) = [line for line in result.stdout.splitlines() if "tiny" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["tiny", "2048", "2", "1", "25%", "3 7"]


def test_as_json(service, neap):
    (line,) = neap("ps", "--json", "--worker", service.address).stdout.splitlines()
    model = json.loads(line)
    assert (model["model_id"], model["num_layers"], model["load"]["num_running"]) == ("tiny", 30, 2)
