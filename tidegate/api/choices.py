"""Choice: what one answer has become so far, from the RequestOutputs of its engine to what its client may see.

Owns: the text of a choice, its log-probabilities, finish reason and count of tokens; and the usage of a response.
Never does: JSON. Streamed and whole answers are made of the same Deltas, so that they cannot differ.
Invariant: nothing is taken in after the choice has ended, whatever the engine still sends.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidegate.api.errors import Outcome, Refused
from tidegate.request import FinishReason, Request, RequestOutput, TokenLogprobs
from tidegate.text.output_text import ChoiceText
from tidegate.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """What one output adds to a choice. `text_offsets` and `logprobs` are parallel when log-probabilities are on."""

    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)


class Choice:
    """One of the `params.n` answers to one prompt. `index` counts over the whole response."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, *, continues_text: bool) -> None:
        params = request.params
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.is_cut = False
        self.text = ""
        """All that its client got of it. One string and one array: a list of pieces would take 100 bytes a token."""
        self.token_ids = array("i")
        self._text = ChoiceText(
            tokenizer,
            stops=params.stop,
            include_stop=params.include_stop_str_in_output,
            stop_token_ids=request.stop_token_ids,
            min_tokens=params.min_tokens,
            continues_text=continues_text,
        )

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def push(self, output: RequestOutput) -> Delta:
        """Raises Refused when the engine gave up on it."""
        if self.finish_reason is not None:
            return Delta()
        if output.finish_reason is FinishReason.ERROR or output.finish_reason is FinishReason.ABORT:
            raise Refused(Outcome.ERROR, output.error or "the request was ended by the server")
        text = self._text.push(output.token_ids)
        delta = Delta(text.text, text_offsets=text.text_offsets)
        self.token_ids.extend(output.token_ids[: text.num_tokens_used])
        if output.logprobs is not None:
            delta.logprobs = output.logprobs[: text.num_tokens_used]
        if text.stop is not None:
            self.finish_reason = FinishReason.STOP
        elif output.finish_reason is not None:
            rest = self._text.finish()
            delta.text += rest.text
            self.finish_reason = FinishReason.STOP if rest.stop is not None else output.finish_reason
        delta.finish_reason = self.finish_reason
        self.text += delta.text
        return delta

    def cut(self) -> Delta:
        """Its time is up: it ends with what it has, as if its length had been reached."""
        rest = self._text.finish()
        self.is_cut = True
        self.finish_reason = FinishReason.LENGTH
        self.text += rest.text
        return Delta(rest.text, self.finish_reason)


class Answers:
    """All choices of a response, its usage, and what its prompts brought."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        *,
        continues_text: bool,
        on_finished: Callable[[Choice], None] | None = None,
    ) -> None:
        """`on_finished` is called with each choice that has just ended."""
        self._on_finished = on_finished
        self.choices = [
            [
                Choice(place * request.params.n + index, request, tokenizer, continues_text=continues_text)
                for index in range(request.params.n)
            ]
            for place, request in enumerate(requests)
        ]
        self.prompt_logprobs: list[list[TokenLogprobs | None] | None] = [None] * len(requests)
        self._num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
        self._num_cached_tokens = 0

    def push(self, place: int, output: RequestOutput) -> tuple[Choice, Delta]:
        """`place` is the index of the output's Request. Raises Refused."""
        if output.prefill is not None:
            self._num_cached_tokens += output.prefill.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[place] = output.prompt_logprobs
        choice = self.choices[place][output.index]
        delta = choice.push(output)
        if delta.finish_reason is not None and self._on_finished is not None:
            self._on_finished(choice)
        return choice, delta

    def cut(self) -> list[tuple[Choice, Delta]]:
        """End every choice that has not ended."""
        return [(choice, choice.cut()) for choice in self.all_choices if not choice.is_finished]

    def is_finished(self, place: int) -> bool:
        return all(choice.is_finished for choice in self.choices[place])

    @property
    def all_choices(self) -> list[Choice]:
        return [choice for group in self.choices for choice in group]

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.all_choices)

    def outcomes(self, are_clamped: Sequence[bool]) -> list[Outcome]:
        """One a Request, named after the choice that fared worst. `are_clamped`: whether each was to end earlier than
        was asked for."""
        return [_outcome(group, is_clamped) for group, is_clamped in zip(self.choices, are_clamped, strict=True)]

    def usage(self, *, counts_output: bool = True) -> dict[str, object]:
        num_output_tokens = self.num_output_tokens if counts_output else 0
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }


def _outcome(choices: Sequence[Choice], is_clamped: bool) -> Outcome:
    if any(choice.is_cut for choice in choices):
        return Outcome.TIMEOUT
    if any(choice.finish_reason is FinishReason.LENGTH for choice in choices):
        return Outcome.CLAMPED if is_clamped else Outcome.LENGTH
    return Outcome.STOP
