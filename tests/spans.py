"""Spans that a test's calls leave, kept in memory. The tracer provider is one per process, so all tests share it."""

from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.waiting import wait_until


class Spans(SpanProcessor):
    """Finished spans in the order they ended, and how many are open."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.num_open = 0
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        provider.add_span_processor(self)
        trace.set_tracer_provider(provider)

    def on_start(self, span: object, parent_context: object = None) -> None:
        self.num_open += 1

    def on_end(self, span: object) -> None:
        self.num_open -= 1

    def clear(self) -> None:
        self._exporter.clear()

    @property
    def finished(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.finished if span.name == name]

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Waits until `condition` holds and no span is open.
        Clients see the end of a call before its handler has ended."""
        wait_until(lambda: condition() and self.num_open == 0)


_spans: list[Spans] = []


def recorded_spans() -> Spans:
    """The process' spans, emptied."""
    if not _spans:
        _spans.append(Spans())
    _spans[0].clear()
    return _spans[0]
