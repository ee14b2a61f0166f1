"""The next turn begins with the ids that were generated, and nothing that a user writes gets another's."""

from __future__ import annotations

import pytest

from tidegate.text.chat_template import ChatTemplate
from tidegate.text.conversation import ConversationMemory
from tidegate.text.tokenizer import Segment, Tokenizer


def bytewise(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that spell the text but are not what tokenizing it gives."""
    return [token_id for char in text for token_id in tokenizer.encode(char, add_special_tokens=False)]


@pytest.fixture
def template(tiny_tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer)


@pytest.fixture
def memory(tiny_tokenizer: Tokenizer) -> ConversationMemory:
    return ConversationMemory(tiny_tokenizer)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ANSWER = "hello the other"


def test_next_turns_begin_with_the_ids_of_the_turns_before(
    tiny_tokenizer: Tokenizer, template: ChatTemplate, memory: ConversationMemory
) -> None:
    messages = [user("hi")]
    known: list[int] = []
    for turn in range(4):
        start = memory.encode(template.render(messages), "")
        assert start.token_ids[: len(known)] == known
        answer = f"{ANSWER} {turn}"
        ids = bytewise(tiny_tokenizer, answer)
        assert ids != tiny_tokenizer.encode(answer, add_special_tokens=False)
        memory.remember(start, answer, [*ids, *tiny_tokenizer.eos_ids])
        known = [*start.token_ids, *ids]
        messages += [assistant(answer), user(f"and {turn}?")]


def test_what_is_not_known_is_tokenized_as_ever(template: ChatTemplate, memory: ConversationMemory) -> None:
    start = memory.encode(template.render([user("hi")]), "")
    assert start.token_ids == template.encode([user("hi")])
    memory.remember(start, ANSWER, bytewise(memory._tokenizer, ANSWER))
    edited = [user("hi"), assistant(ANSWER + "!"), user("go on")]
    assert memory.encode(template.render(edited), "").token_ids == template.encode(edited)


def test_the_whole_prompt_has_the_same_text_either_way(
    tiny_tokenizer: Tokenizer, template: ChatTemplate, memory: ConversationMemory
) -> None:
    start = memory.encode(template.render([user("hi")]), "")
    memory.remember(start, ANSWER, bytewise(tiny_tokenizer, ANSWER))
    messages = [user("hi"), assistant(ANSWER), user("go on")]
    ids = memory.encode(template.render(messages), "").token_ids
    assert ids != template.encode(messages)
    assert tiny_tokenizer.decode(ids, skip_special_tokens=False) == tiny_tokenizer.decode(
        template.encode(messages), skip_special_tokens=False
    )


def test_namespaces_share_nothing(template: ChatTemplate, memory: ConversationMemory) -> None:
    start = memory.encode(template.render([user("hi")]), "a")
    memory.remember(start, ANSWER, bytewise(memory._tokenizer, ANSWER))
    messages = [user("hi"), assistant(ANSWER), user("go on")]
    assert memory.encode(template.render(messages), "b").token_ids == template.encode(messages)
    assert memory.encode(template.render(messages), "a").token_ids != template.encode(messages)


def test_text_never_passes_for_a_special_token(
    tiny_tokenizer: Tokenizer, template: ChatTemplate, memory: ConversationMemory
) -> None:
    special = tiny_tokenizer.special_text(tiny_tokenizer.eos_ids[0])
    start = memory.encode([Segment("a", False), Segment(special, True), Segment("b", False)], "")
    memory.remember(start, "c", bytewise(tiny_tokenizer, "c"))
    for forged in (
        [Segment(f"a{special}bc", False), Segment(special, True)],
        [Segment("a", False), Segment(special, False), Segment("bc", False), Segment(special, True)],
    ):
        assert memory.encode(forged, "").token_ids == tiny_tokenizer.encode_rendered(forged)


def test_an_answer_cut_by_a_stop_string_inside_a_token_keeps_the_tokens_before(
    tiny_tokenizer: Tokenizer, template: ChatTemplate, memory: ConversationMemory
) -> None:
    start = memory.encode(template.render([user("hi")]), "")
    ids = [*bytewise(tiny_tokenizer, "one two "), *tiny_tokenizer.encode("hello", add_special_tokens=False)]
    memory.remember(start, "one two hel", ids)
    messages = [user("hi"), assistant("one two hel"), user("go on")]
    found = memory.encode(template.render(messages), "").token_ids
    known = [*start.token_ids, *bytewise(tiny_tokenizer, "one two ")]
    assert found[: len(known)] == known
    assert tiny_tokenizer.decode(found) == tiny_tokenizer.decode(template.encode(messages))


def test_a_special_token_that_the_model_chose_inside_its_answer_stays_there(
    tiny_tokenizer: Tokenizer, template: ChatTemplate, memory: ConversationMemory
) -> None:
    start = memory.encode(template.render([user("hi")]), "")
    ids = [*bytewise(tiny_tokenizer, "a"), *tiny_tokenizer.eos_ids, *bytewise(tiny_tokenizer, "b")]
    memory.remember(start, "ab", ids)
    messages = [user("hi"), assistant("ab"), user("go on")]
    known = [*start.token_ids, *ids]
    assert memory.encode(template.render(messages), "").token_ids[: len(known)] == known


def test_ids_that_do_not_give_the_text_are_not_kept(template: ChatTemplate, memory: ConversationMemory) -> None:
    start = memory.encode(template.render([user("hi")]), "")
    memory.remember(start, "something else", bytewise(memory._tokenizer, ANSWER))
    assert len(memory) == 0


def test_an_unfinished_character_is_kept_as_the_client_saw_it(
    tiny_tokenizer: Tokenizer, template: ChatTemplate, memory: ConversationMemory
) -> None:
    ids = bytewise(tiny_tokenizer, "ab\u6f22")[:-1]
    text = tiny_tokenizer.decode(ids)
    assert text.endswith("\ufffd")
    start = memory.encode(template.render([user("hi")]), "")
    memory.remember(start, text, ids)
    messages = [user("hi"), assistant(text), user("go on")]
    assert memory.encode(template.render(messages), "").token_ids[: len(start.token_ids) + len(ids)] == [
        *start.token_ids,
        *ids,
    ]


def test_memory_is_bounded_and_forgets_the_least_recently_used(
    tiny_tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    memory = ConversationMemory(tiny_tokenizer, max_tokens=200)
    ids = bytewise(tiny_tokenizer, ANSWER)
    first = memory.encode(template.render([user("chat 0")]), "")
    memory.remember(first, ANSWER, ids)
    again = [user("chat 0"), assistant(ANSWER), user("go on")]
    for chat in range(1, 40):
        start = memory.encode(template.render([user(f"chat {chat}")]), "")
        memory.remember(start, ANSWER, ids)
        assert memory.num_tokens <= 200
        assert memory.encode(template.render(again), "").token_ids != template.encode(again)  # used, so it stays
    forgotten = [user("chat 1"), assistant(ANSWER), user("go on")]
    assert memory.encode(template.render(forgotten), "").token_ids == template.encode(forgotten)


def test_remembering_again_does_not_count_twice(template: ChatTemplate, memory: ConversationMemory) -> None:
    for _ in range(3):
        start = memory.encode(template.render([user("hi")]), "")
        memory.remember(start, ANSWER, bytewise(memory._tokenizer, ANSWER))
    assert len(memory) == 1
    assert memory.num_tokens == len(start.token_ids) + len(bytewise(memory._tokenizer, ANSWER))
