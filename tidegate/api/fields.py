"""Which fields we do not implement may still be sent, and with what value.

A client may send a field that would change the output only with the value that leaves it unchanged (its neutral
value); anything else is refused, so that nobody gets an answer that is silently not what was asked for. Fields that
change nothing are accepted. A field that is in neither table is unknown: accepted, and named in x-tidegate-ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.request import InvalidRequest

HARMLESS: frozenset[str] = frozenset(
    {
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "spaces_between_special_tokens", "store", "user",
    }
)  # fmt: skip
"""They only label, account for or speed up a request."""

_OFF: tuple[Any, ...] = (None, False)
_EMPTY: tuple[Any, ...] = ("", [], {}, None)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": _EMPTY,
    "function_call": (None, "none", "auto"),
    "functions": _EMPTY,
    "modalities": (None, ["text"]),
    "moderation": _EMPTY,
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "suffix": _EMPTY,
    "tool_choice": (None, "none", "auto"),
    "tools": _EMPTY,
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # other servers' extensions
    "add_special_tokens": (None, True),
    "best_of": (None, 1),
    "chat_template": _EMPTY,
    "documents": _EMPTY,
    "dry_multiplier": (None, 0),
    "early_stopping": _OFF,
    "grammar": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_grammar": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "json_schema": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "length_penalty": (None, 1),
    "logits_processors": _EMPTY,
    "mirostat": (None, 0),
    "repeat_penalty": (None, 1),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "skip_special_tokens": (None, True),
    "structured_outputs": _EMPTY,
    "top_a": (None, 0),
    "truncate_prompt_tokens": (None, -1),
    "typical_p": (None, 1),
    "use_beam_search": _OFF,
    "xtc_probability": (None, 0),
}


def unknown_fields(document: dict[str, Any], known: frozenset[str]) -> list[str]:
    """The names of fields that are ignored. Raises InvalidRequest for one that would change the output."""
    ignored = []
    for name, value in document.items():
        if name in known or name in HARMLESS:
            continue
        neutral = NEUTRAL.get(name)
        if neutral is None:
            ignored.append(name)
        elif not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            raise InvalidRequest(
                f"{name} is not supported and would change the output; leave it out"
                + ("" if neutral[-1] is None else f" or send {msgspec.json.encode(neutral[-1]).decode()}"),
                param=name,
                code="unsupported_parameter",
            )
    return ignored
