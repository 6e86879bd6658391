"""The URL of a shared registry."""

import pytest

from shared.errors import InvalidInput
from shared.registry.address import RegistryAddress

OBJECTS = "objects=s3://bucket/some/prefix"


def test_a_url_with_all_options_is_parsed():
    address = RegistryAddress.parse(
        f"rediss://ann:p%40ss@host:6380/3?{OBJECTS}&endpoint=https://store:9000&region=eu&ssl_ca_certs=/ca.pem"
    )
    assert address == RegistryAddress(
        redis_url="rediss://ann:p%40ss@host:6380/3",
        is_cluster=False,
        bucket="bucket",
        prefix="some/prefix",
        endpoint="https://store:9000",
        region="eu",
        ssl_ca_certs="/ca.pem",
    )
    assert "p%40ss" not in repr(address)


def test_options_that_are_left_out_get_their_defaults():
    address = RegistryAddress.parse("redis://host?objects=s3://bucket")
    assert (address.redis_url, address.prefix, address.endpoint) == ("redis://host/0", "", None)
    cluster = RegistryAddress.parse(f"rediss+cluster://host:7000?{OBJECTS}")
    assert (cluster.redis_url, cluster.is_cluster) == ("rediss://host:7000/0", True)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://host?objects=",
        "redis://host?objects=/folder",
        "redis://host?objects=s3://",
        "redis://host?objects=s3://bucket/../other",
        "redis://host?objects=s3://user:SECRET@bucket",
        f"redis://?{OBJECTS}",
        f"redis://host:port?{OBJECTS}",
        f"redis://host:70000?{OBJECTS}",
        f"redis://host/name?{OBJECTS}",
        f"redis+cluster://host/1?{OBJECTS}",
        f"http://host?{OBJECTS}",
        f"redis://host?{OBJECTS}&{OBJECTS}",
        f"redis://host?{OBJECTS}&password=SECRET",
        f"redis://host?{OBJECTS}&nonsense",
        f"redis://host?{OBJECTS}&endpoint=store:9000",
        f"redis://host?{OBJECTS}&endpoint=http://user:SECRET@store",
        f"redis://host?{OBJECTS}&ssl_ca_certs=/ca.pem",
        f"redis://:SECRET#more@host?{OBJECTS}",
        f"redis://:SECRET/more@host?{OBJECTS}",
        f"redis://[host?{OBJECTS}",
    ],
)
def test_the_error_for_a_wrong_url_names_the_fault_but_no_secret(url):
    with pytest.raises(InvalidInput) as raised:
        RegistryAddress.parse(url)
    assert raised.value.reason == "BAD_REGISTRY"
    assert "redis://" in raised.value.message
    assert "SECRET" not in raised.value.message
