"""What a Segment says: token ids, or words that most vocabularies have as one token each. Pure; equal keys, equal text.

Ids are drawn from a range that every common vocabulary has and that holds no control tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from tidegate.bench.workload import Segment

FIRST_TOKEN_ID = 1_000
NUM_TOKEN_IDS = 28_000
_TOKEN_IDS = range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKEN_IDS)
_WORDS: tuple[str, ...] = (
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
    "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were",
    "all", "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "no",
    "more", "if", "out", "so", "said", "what", "up", "its", "about", "into", "than", "them", "can", "only",
    "other", "new", "some", "could", "time", "these", "two", "may", "then", "do", "first", "any", "my", "now",
    "such", "like", "our", "over", "man", "me", "even", "most", "made", "after", "also", "did", "many", "before",
    "must", "through", "years", "where", "much", "your", "way", "well", "down", "should", "because", "each",
    "just", "those", "people", "how", "too", "little", "state", "good", "very", "make", "world", "still", "see",
    "own", "men", "work", "long", "here", "get", "both", "between", "life", "being", "under", "never", "day",
    "same", "another", "know", "while", "last", "might", "us", "great", "old", "year", "off", "come", "since",
    "against", "go", "came", "right", "used", "take", "three",
)  # fmt: skip


@lru_cache(maxsize=4_096)
def segment_token_ids(segment: Segment) -> tuple[int, ...]:
    return tuple(random.Random(segment.key).choices(_TOKEN_IDS, k=segment.num_tokens))


def token_ids(content: Sequence[Segment]) -> list[int]:
    return [token_id for segment in content for token_id in segment_token_ids(segment)]


def text(content: Sequence[Segment]) -> str:
    """About one token a word."""
    return " ".join(" ".join(random.Random(segment.key).choices(_WORDS, k=segment.num_tokens)) for segment in content)
