"""What an answer must be, as a request says it."""

from dataclasses import dataclass, fields

from shared.chat.formats import CallFormat
from shared.errors import InvalidInput

MAX_BYTES = 64 * 1024
# Of the schemas of all tools together.
MAX_TOOL_BYTES = 4 * MAX_BYTES


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
        forms = [form.name for form in fields(self) if getattr(self, form.name) not in (None, False)]
        if len(forms) != 1:
            listed = " and ".join(forms) or "nothing"
            raise invalid(f"a constraint has exactly one form; this one has {listed}", "constraint")
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
    def schemas(self) -> list[tuple[str, str]]:
        """Where in a request a JSON Schema is, and the schema."""
        return [] if self.json_schema is None else [(self.field, self.json_schema)]

    @property
    def form(self) -> str:
        """The name of the field that is set."""
        return next(form.name for form in fields(self) if getattr(self, form.name) not in (None, False))

    @property
    def field(self) -> str:
        """That field, as a request names it."""
        return f"constraint.{self.form}"


@dataclass(frozen=True)
class MessageConstraint:
    """What the answer to a chat must be: reasoning, then text, then calls of tools. The text is free, or what `answer`
    allows.

    `thinking`: the tags of reasoning, which has begun if `in_thought`; None: there is none. `calls`: how calls are
    written; None: there are none. `tools`: by name, the JSON Schema of the arguments. `must_call`: there is a call, and
    no text. `may_repeat`: whether there may be several. Raises `InvalidInput` (reason CONSTRAINT_INVALID).
    """

    thinking: tuple[str, str] | None = None
    in_thought: bool = False
    answer: Constraint | None = None
    calls: CallFormat | None = None
    tools: tuple[tuple[str, str], ...] = ()
    must_call: bool = False
    may_repeat: bool = True

    def __post_init__(self) -> None:
        sizes = {field: len(schema.encode(errors="replace")) for field, schema in self.schemas}
        for field, most in [*dict.fromkeys(sizes, MAX_BYTES).items(), ("tools", MAX_TOOL_BYTES)]:
            num_bytes = sizes.get(field, sum(sizes.values()))
            if num_bytes > most:
                raise invalid(f"it has {num_bytes} bytes; at most {most} are allowed", field)

    @property
    def schemas(self) -> list[tuple[str, str]]:
        """Where in a request each JSON Schema is, and the schema."""
        of_tools = [(f"tools[{i}].parameters", schema) for i, (_, schema) in enumerate(self.tools)]
        return of_tools + (self.answer.schemas if self.answer else [])

    @property
    def field(self) -> str:
        return self.answer.field if self.answer else "tools"


def invalid(why: str, field: str) -> InvalidInput:
    """The error for a constraint that nobody can follow. `field`: where in the request."""
    return InvalidInput(f"{field}: {why}", reason="CONSTRAINT_INVALID", metadata={"field": field})
