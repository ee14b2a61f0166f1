"""From the bytes of a request body to a checked struct, with every mistake as an InvalidRequest that names its field.

Owns: JSON decoding, the rule for unknown fields, and OpenAI-like error messages.
Invariant: no input makes it raise anything but InvalidRequest, whatever its size, nesting or encoding.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from tidegate.api.fields import unknown_fields
from tidegate.request import InvalidRequest

Struct = TypeVar("Struct", bound=msgspec.Struct)

_PATH = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")


def parse(data: bytes, schema: type[Struct]) -> tuple[Struct, list[str]]:
    """The struct, and the names of ignored fields. Raises InvalidRequest."""
    document = _decode(data)
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    ignored = unknown_fields(document, _field_names(schema))
    try:
        return msgspec.convert(document, schema, str_keys=True), ignored
    except msgspec.ValidationError as error:
        raise _described(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.ValidationError as error:  # a number out of range
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


@cache
def _field_names(schema: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(schema.__struct_fields__)


def _described(message: str) -> InvalidRequest:
    """'Expected `int | null`, got `str` - at `$.max_tokens`' as a message and a param."""
    match = _PATH.match(message)
    what, path = (match["what"], match["path"]) if match is not None else (message, "")
    missing = _MISSING.match(what)
    if missing is not None:
        path = f"{path}.{missing['name']}".lstrip(".")
        return InvalidRequest(f"missing required field '{path}'", param=path)
    what = what.replace(" | null", "").replace("`", "")
    what = what[:1].lower() + what[1:]
    return InvalidRequest(f"invalid value for '{path}': {what}" if path else what, param=path or None)
