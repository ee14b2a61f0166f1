"""Parsing a body: no bytes at all may raise anything but InvalidRequest, and a mistake names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.api.body import parse
from tidegate.api.fields import NEUTRAL
from tidegate.api.schemas import ChatBody, CompletionBody
from tidegate.request import InvalidRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
NAMES = st.sampled_from([*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *NEUTRAL])


def outcome(data: bytes, schema: Any) -> Any:
    try:
        return parse(data, schema)
    except InvalidRequest as error:
        return error


@given(st.binary())
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    outcome(data, ChatBody)


@given(st.dictionaries(NAMES | st.text(), JSON, max_size=6), st.sampled_from([ChatBody, CompletionBody]))
def test_no_values_raise_anything_else(document: dict[str, Any], schema: Any) -> None:
    result = outcome(json.dumps(document).encode(), schema)
    if isinstance(result, InvalidRequest):
        assert str(result)
    else:
        body, ignored = result
        assert isinstance(body, schema)
        assert set(ignored).isdisjoint(schema.__struct_fields__)


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({"prompt": "a", "n": "1"}, "n"),
        ({"prompt": "a", "stop": ["a", 1]}, "stop[1]"),
        ({"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias[...]"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": ["a", {}]}, "prompt[1]"),
        ({"prompt": "a", "tools": [1]}, "tools"),
    ],
)
def test_the_field_at_fault_is_named(document: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(json.dumps(document).encode(), CompletionBody)
    assert caught.value.param == param


def test_unknown_fields_come_back_by_name() -> None:
    body, ignored = parse(b'{"prompt": "a", "one": 1, "two": null, "tools": null}', CompletionBody)
    assert (body.prompt, ignored) == ("a", ["one", "two"])
