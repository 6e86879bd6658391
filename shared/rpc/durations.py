"""Converts and checks google.protobuf.Duration. A message on the wire may hold numbers that the type does not allow."""

from google.protobuf.duration_pb2 import Duration

from shared.errors import InvalidInput

# Limits of the type: https://protobuf.dev/reference/protobuf/google.protobuf/#duration
MAX_DURATION_S = 315_576_000_000
_NANOS_PER_S = 1_000_000_000


def seconds_of(duration: Duration, field: str, *, at_most_s: float = MAX_DURATION_S, reason: str) -> float:
    """Convert a positive duration to seconds. `field` is its path in the request, for the error.

    Raises InvalidInput with `reason`, and the field in its metadata, if the message is not a valid Duration (seconds or
    nanoseconds out of range or of different signs), if it is not positive, and if it exceeds `at_most_s`.
    """

    def refused(why: str) -> InvalidInput:
        value = f"{duration.seconds} s and {duration.nanos} ns"
        return InvalidInput(f"{field} is {value}; {why}", reason=reason, metadata={"field": field})

    if abs(duration.seconds) > MAX_DURATION_S or abs(duration.nanos) >= _NANOS_PER_S:
        raise refused(f"a duration has at most {MAX_DURATION_S} seconds and less than 10^9 nanoseconds")
    if duration.seconds * duration.nanos < 0:
        raise refused("seconds and nanoseconds of a duration must have the same sign")
    seconds = duration.seconds + duration.nanos / _NANOS_PER_S
    if seconds <= 0:
        raise refused("it must be positive")
    if seconds > at_most_s:
        raise refused(f"at most {at_most_s:g} s are allowed here")
    return seconds


def duration_of(seconds: float, name: str) -> Duration:
    """Convert seconds to a Duration. Raises InvalidInput, which mentions `name`, if a Duration cannot hold them."""
    if not abs(seconds) <= MAX_DURATION_S:
        raise InvalidInput(f"{name} is {seconds} s; a duration has at most {MAX_DURATION_S} s")
    duration = Duration()
    duration.FromNanoseconds(round(seconds * _NANOS_PER_S))
    return duration
