"""What an answer must be, as a request says it."""

from dataclasses import dataclass, fields

from shared.errors import InvalidInput

MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Constraint:
    """Exactly one field is set. `json_schema`: the schema as JSON. `regex`: it matches the whole answer. `lark`: a
    grammar in llguidance's variant of Lark. `choice`: the answer is one of these. `json_object`: any JSON object.

    Raises `InvalidInput` (reason CONSTRAINT_INVALID).
    """

    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [own.name for own in fields(self) if getattr(self, own.name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise invalid(f"a constraint has exactly one form; this one has {found}", "constraint")
        if self.choice is not None:
            # Frozen from here on; this is still construction.
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice:
                raise invalid("a choice has at least one text", self.field)
        texts = self.choice or [getattr(self, self.form)]
        num_bytes = sum(len(text.encode(errors="replace")) for text in texts if text is not True)
        if num_bytes > MAX_BYTES:
            raise invalid(f"it has {num_bytes} bytes; at most {MAX_BYTES} are allowed", self.field)

    @property
    def form(self) -> str:
        """The name of the field that is set."""
        return next(
            own.name for own in fields(self) if getattr(self, own.name) not in (None, False)
        )

    @property
    def field(self) -> str:
        """That field, as a request names it."""
        return f"constraint.{self.form}"


def invalid(why: str, field: str) -> InvalidInput:
    """The error for a constraint that nobody can follow. `field`: where in the request."""
    return InvalidInput(f"{field}: {why}", reason="CONSTRAINT_INVALID", metadata={"field": field})
