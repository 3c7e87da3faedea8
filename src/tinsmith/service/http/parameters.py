"""Parameters of a route: a class with a field for each value in the query or, where it says so, in a header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from tinsmith.chat.request import describe_errors
from tinsmith.errors import BadRequest

P = TypeVar("P", bound="Parameters")


@dataclass(frozen=True, slots=True)
class InHeader:
    """Metadata of a field: the header that holds its value."""

    name: str


IdempotencyKey = Annotated[str | None, Field(max_length=256), InHeader("x-idempotency-key")]
"""A repeated request with the same key has its effect once."""


class Parameters(BaseModel):
    """Values of a request beside its path and body. Others are ignored: newer SDKs send more."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def headers(cls) -> dict[str, str]:
        """Names of the headers, by field."""
        fields = ((name, mark) for name, field in cls.model_fields.items() for mark in field.metadata)
        return {name: mark.name for name, mark in fields if isinstance(mark, InHeader)}


def parse_parameters(kind: type[P], request: Request) -> P:
    """The request's parameters. Raises BadRequest with the invalid ones."""
    headers = kind.headers()
    values = {name: value for name, value in request.query_params.items() if name not in headers}
    values |= {name: request.headers[header] for name, header in headers.items() if header in request.headers}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        errors = [{**each, "loc": _place(each["loc"], headers)} for each in error.errors(include_url=False)]
        raise BadRequest(describe_errors(errors)) from error


def _place(loc: tuple[int | str, ...], headers: dict[str, str]) -> tuple[int | str, ...]:
    """The place of a value, from that of its field."""
    header = headers.get(str(loc[0]))
    return ("header", header, *loc[1:]) if header is not None else ("query", *loc)
