"""Chat: a conversation in the terminal with a running server.

Owns: the conversation's messages, reading lines, showing an answer as it streams, and the line of figures below it. A
stopped answer stays in the conversation as far as it came; a refused question leaves it as it was. When standard input
is not a terminal its lines are the questions, and only answers are printed.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from typing import Any

from rich.console import Console

from tidegate.terminal import TerminalError
from tidegate.terminal.client import ServerClient

# A model may write anything; only printable text, newlines and tabs reach the terminal, which obeys control codes.
_CONTROL_CODES = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Chat:
    def __init__(
        self,
        client: ServerClient,
        model: str = "default",
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        console: Console | None = None,
        interactive: bool | None = None,
    ) -> None:
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._client = client
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._interactive = sys.stdin.isatty() if interactive is None else interactive

    def run(self) -> None:
        """Until the input ends. Raises TerminalError when the server is not there to begin with."""
        names = self._client.models()
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  # input() then has editing and a history
            self._console.print(f"[bold]{', '.join(names)}[/] at {self._client.url}", style="cyan")
            self._console.print("Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
        while (question := self._read_question()) is not None:
            if question.strip():
                self._ask_and_report(question)

    def _read_question(self) -> str | None:
        """None at the end of the input. Ctrl-C drops the line that was being typed."""
        while True:
            try:
                return input("\n> " if self._interactive else "")
            except EOFError:
                if self._interactive:
                    self._console.print()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._console.print("\n(Ctrl-D leaves)", style="dim")

    def _ask_and_report(self, question: str) -> None:
        if not self._interactive:
            self.ask(question)
            return
        try:
            self.ask(question)
        except TerminalError as error:
            self._console.print(f"tidegate: {error}", style="red", markup=False)

    def ask(self, question: str) -> str:
        """Stream one answer to the console, and return it. Ctrl-C ends it early. Raises TerminalError."""
        messages = [*self.messages, {"role": "user", "content": question}]
        body = {**self._options, "messages": messages, "stream_options": {"include_usage": True}}
        figures = _Figures()
        pieces: list[str] = []
        stopped = False
        try:
            with closing(self._client.chat(body)) as chunks:  # type: ignore[type-var]
                for chunk in chunks:
                    figures.take(chunk)
                    for choice in chunk.get("choices", []):
                        piece = choice.get("delta", {}).get("content") or ""
                        pieces.append(piece)
                        self._console.print(piece.translate(_CONTROL_CODES), end="", markup=False)
        except KeyboardInterrupt:
            stopped = True
        finally:
            if pieces:
                self._console.print()
        answer = "".join(pieces)
        self.messages = [*messages, {"role": "assistant", "content": answer}] if answer else self.messages
        if self._interactive:
            self._console.print(figures.line(stopped), style="dim", markup=False)
        return answer


class _Figures:
    """What the line below an answer says: as this terminal saw it."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._finish_reason = ""
        self._usage: dict[str, Any] = {}

    def take(self, chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices", []):
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if choice.get("delta", {}).get("content"):
                self._last_s = time.monotonic()
                if self._first_s is None:
                    self._first_s = self._last_s
        self._usage = chunk.get("usage") or self._usage

    def line(self, stopped: bool) -> str:
        parts = ["stopped"] if stopped else []
        if self._finish_reason == "length":
            parts.append("cut at the token limit")
        if self._first_s is not None:
            parts.append(f"first token after {self._first_s - self._start_s:.2f} s")
        num_tokens = int(self._usage.get("completion_tokens", 0))
        if num_tokens:
            span_s = 0.0 if self._first_s is None else self._last_s - self._first_s
            rate = f", {(num_tokens - 1) / span_s:.0f} a second" if num_tokens > 1 and span_s > 0.0 else ""
            parts.append(f"{num_tokens} tokens{rate}")
        details = self._usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens"):
            parts.append(f"{details['cached_tokens']} of {self._usage['prompt_tokens']} prompt tokens from the cache")
        return "(" + " · ".join(parts or ["no answer"]) + ")"
