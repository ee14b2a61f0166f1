"""ChatTemplate: from chat messages to the segments of a prompt.

Owns: checking messages, rendering them within bounds, and keeping apart what the template wrote from what users wrote:
special tokens come only from the template.
Never encodes (Tokenizer.encode_rendered does), and never trusts a template with time or memory (template_sandbox).

How the two are kept apart: before rendering, each character in the messages with which a special token could begin is
replaced by a private-use character that occurs nowhere in the input, so that no message can spell a special token,
whatever the template cuts, joins or trims. In the rendered text special tokens are therefore the template's; after
they are found, the characters are put back. Text that the template itself looks for (such as "</think>") is left as
it is, unless it is, or begins, a special token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes

from tidegate.config import ConfigError
from tidegate.request import InvalidRequest
from tidegate.text.template_sandbox import MAX_STEPS, MAX_TIME_S, BoundedEnvironment, TemplateLimitError, render_bounded
from tidegate.text.tokenizer import Segment, Tokenizer

DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role }}: {{ message.content }}

{% endfor -%}
{%- if add_generation_prompt -%}
assistant:
{%- endif -%}
"""
"""For models that bring no template: "role: content" and an empty line for each message, then "assistant:"."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_CHARS_ALWAYS = 16 * 2**20
_MAX_CHARS_PER_INPUT_CHAR = 16
_MAX_DEPTH = 32


class ChatTemplate:
    """Thread-safe; one a model."""

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        """`source` is a Jinja template; by default the model's own, or else DEFAULT_TEMPLATE. Raises ConfigError."""
        self._tokenizer = tokenizer
        self._source = source or tokenizer.chat_template or DEFAULT_TEMPLATE
        environment = BoundedEnvironment()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(self._source)
            tree = environment.parse(self._source)
        except (jinja2.TemplateError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"the model's chat template cannot be compiled: {error}") from None
        self._knows_developer = "developer" in self._source
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self._shield = _Shield(tokenizer.special_texts, constants, self._source)

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Prompt token ids; see render for options and errors."""
        return self._tokenizer.encode_rendered(self.render(messages, **options))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        max_steps: int = MAX_STEPS,
        max_time_s: float = MAX_TIME_S,
    ) -> list[Segment]:
        """The prompt, cut at its special tokens.

        `continue_final_message` ends the prompt inside the last message, so that the answer goes on with it.
        `variables` are more names for the template (chat_template_kwargs); they cannot replace the ones used here.
        Raises InvalidRequest (param "messages...") for messages, or a template, that cannot be rendered.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message cannot go with add_generation_prompt", param="continue_final_message"
            )
        given = {
            **(variables or {}),
            "messages": _checked(messages, self._knows_developer),
            "tools": list(tools) if tools else None,
        }
        shielded = self._shield.over(given)
        if continue_final_message:
            shielded.mark_end()
        names = {
            **shielded.values,
            "bos_token": self._tokenizer.special_text(self._tokenizer.bos_id),
            "eos_token": self._tokenizer.special_text(next(iter(self._tokenizer.eos_ids), None)),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(names, shielded, max_steps, max_time_s)
        if continue_final_message:
            text = shielded.cut_at_end(text)
        return [
            segment if segment.is_special else Segment(shielded.restore(segment.text), False)
            for segment in self._tokenizer.split_special(text)
        ]

    def _render(self, names: dict[str, Any], shielded: _Shielded, max_steps: int, max_time_s: float) -> str:
        max_chars = _MAX_CHARS_ALWAYS + _MAX_CHARS_PER_INPUT_CHAR * shielded.num_chars
        try:
            return render_bounded(
                self._template, names, max_steps=max_steps, max_chars=max_chars, max_time_s=max_time_s
            )
        except TemplateLimitError as error:
            message = f"the chat template cannot render these messages within its bounds: {error}"
        except RecursionError:
            message = "the chat template cannot render these messages: it nests too deeply"
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            message = f"the chat template refuses these messages: {shielded.restore(str(error))}"
        except MemoryError:
            message = "the chat template cannot render these messages: it takes too much memory"
        raise InvalidRequest(message, param="messages")


def _checked(messages: Sequence[Mapping[str, Any]], knows_developer: bool) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string, tool call arguments an object. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    checked = []
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequest(f"role must be one of {', '.join(ROLES)}, not {role!r}", param=f"{param}.role")
        entry = {key: value for key, value in message.items() if value is not None}
        entry["content"] = _content_text(message.get("content"), f"{param}.content", role)
        entry["role"] = "system" if role == "developer" and not knows_developer else role
        if "tool_calls" in entry:
            entry["tool_calls"] = _tool_calls(entry["tool_calls"], f"{param}.tool_calls")
        checked.append(entry)
    return checked


def _content_text(content: object, param: str, role: str) -> str:
    """A string as it is; text parts joined by line ends; nothing (an assistant's tool call) as the empty string."""
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise InvalidRequest("content is missing", param=param)
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest("content must be a string or a list of text parts", param=param)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
        if not isinstance(text, str):
            message = f"a content part of type {kind!r} is not supported; only text is"
            raise InvalidRequest(message, param=f"{param}[{index}]")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: object, param: str) -> list[Any]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest("tool_calls must be a list", param=param)
    return [_with_arguments_object(call) for call in calls]


def _with_arguments_object(call: Any) -> Any:
    """The API carries arguments as JSON text, templates print an object; text that is no JSON stays text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class _Shield:
    """Knows which characters begin special tokens, and which texts with them the template looks for."""

    def __init__(self, specials: Sequence[str], constants: set[str], source: str) -> None:
        self._firsts = sorted({special[0] for special in specials})
        self._source = source
        self._sought = sorted(
            {text for text in constants if text and text[0] in self._firsts and not _could_be_special(text, specials)}
        )

    def over(self, values: dict[str, Any]) -> _Shielded:
        """A copy of `values`, all strings in it shielded. Raises InvalidRequest for deep nesting."""
        strings = [self._source, *_strings(values)]
        free = _free_characters("\n".join(strings))
        replacements = {first: next(free) for first in self._firsts if any(first in text for text in strings[1:])}
        shielded = _mapped(values, lambda text: self._hide(text, replacements))
        return _Shielded(shielded, replacements, next(free), sum(map(len, strings)))

    def _hide(self, text: str, replacements: dict[str, str]) -> str:
        kept = [sought for sought in self._sought if sought in text]
        text = _hidden(text, replacements)
        for sought in kept:
            text = text.replace(_hidden(sought, replacements), sought)
        return text


class _Shielded:
    """Values for one render, and the way back from the rendered text."""

    def __init__(self, values: dict[str, Any], replacements: dict[str, str], end_mark: str, num_chars: int) -> None:
        self.values = values
        self.num_chars = num_chars
        self._replacements = replacements
        self._end_mark = end_mark

    def mark_end(self) -> None:
        self.values["messages"][-1]["content"] += self._end_mark

    def cut_at_end(self, text: str) -> str:
        """The text up to the end of the final message. Raises InvalidRequest if the template does not show it."""
        before, mark, _ = text.rpartition(self._end_mark)
        if not mark:
            raise InvalidRequest("the chat template does not show the final message", param="continue_final_message")
        return before.replace(self._end_mark, "")

    def restore(self, text: str) -> str:
        for first, replacement in self._replacements.items():
            text = text.replace(replacement, first).replace(_escaped(replacement), first)
        return text


def _could_be_special(text: str, specials: Sequence[str]) -> bool:
    """Whether the text holds a special token or begins one."""
    return any(special in text or special.startswith(text) for special in specials)


def _hidden(text: str, replacements: dict[str, str]) -> str:
    for first, replacement in replacements.items():
        text = text.replace(first, replacement)
    return text


def _free_characters(text: str) -> Iterator[str]:
    """Private-use characters that the text holds neither as such nor as a template might print them escaped."""
    for code in chain(range(0xE000, 0xF900), range(0x100000, 0x10FFFE)):
        char = chr(code)
        if char not in text and _escaped(char) not in text:
            yield char


def _escaped(char: str) -> str:
    r"""As repr prints it: \ue000. A template that prints a whole object shows it so."""
    return char.encode("ascii", "backslashreplace").decode("ascii")


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"messages are nested more than {_MAX_DEPTH} deep", param="messages")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key, depth + 1)
            yield from _strings(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item, depth + 1)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(str(layout)[:100])
