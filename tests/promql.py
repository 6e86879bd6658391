"""What a PromQL expression selects and groups by, read from its syntax tree."""

from collections.abc import Iterator
from typing import Any

import promql_parser

# Grafana replaces these before it asks Prometheus.
_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$__interval": "1m"}


def parse(query: str) -> Any:
    """Raises ValueError for an expression that Prometheus would not accept."""
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    return promql_parser.parse(query)


def metrics_in(query: str) -> set[str]:
    """Names of the series that an expression selects."""
    return {node.name for node in _nodes(query) if isinstance(node, promql_parser.VectorSelector)}


def counters_in(query: str) -> list[tuple[str, dict[str, str]]]:
    """The counters that an expression selects, each with the labels that it must have and a pattern for each."""
    return [
        (node.name, {m.name: m.value for m in node.matchers.matchers if not str(m.op).endswith(("NotEqual", "NotRe"))})
        for node in _nodes(query)
        if isinstance(node, promql_parser.VectorSelector) and node.name.endswith("_total")
    ]


def matched_labels(query: str) -> set[str]:
    """Labels that selectors of the expression compare with a value."""
    return {
        matcher.name
        for node in _nodes(query)
        if isinstance(node, promql_parser.VectorSelector)
        for matcher in node.matchers.matchers
    }


def grouped_labels(query: str) -> set[str]:
    """Labels by which aggregations of the expression group."""
    return {
        label
        for node in _nodes(query)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
        for label in node.modifier.labels
    }


def _nodes(query: str) -> Iterator[Any]:
    found: list[Any] = []

    def visit(node: Any) -> bool:
        found.append(getattr(node, "vector_selector", node))
        found.append(node)
        return True

    promql_parser.walk(parse(query), pre_visit=visit)
    return iter(found)
