"""Which of our rows an engine is compared with."""

from bench.peers.engines.serving import EngineSettings
from bench.peers.run import Planned, base_of


def planned(title: str, weights: str) -> Planned:
    return Planned(title, weights, ("",), [], EngineSettings("", weights, 1, 1, 0, (), ""))


def test_others_are_compared_with_the_products_that_they_use() -> None:
    ours = [planned("neap", weights) for weights in ("bfloat16", "bfloat16-products")]
    vllm = planned("vLLM", "bfloat16")
    products = ("neap full bfloat16-products", "neap exact bfloat16-products")
    assert base_of(vllm, [*ours, vllm]) == products
    assert base_of(vllm, [ours[0], vllm]) == ("neap full bfloat16", "neap exact bfloat16")
    assert base_of(planned("vLLM", "float32"), ours) == ("neap full float32", "neap exact float32")


def test_ours_is_compared_with_itself() -> None:
    plain, products = (planned("neap", weights) for weights in ("bfloat16", "bfloat16-products"))
    assert base_of(plain, [plain, products]) == ("neap full bfloat16", "neap exact bfloat16")
    assert base_of(products, [plain, products])[0] == "neap full bfloat16-products"
