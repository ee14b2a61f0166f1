"""Groups of 32 vocabulary tokens, so that a question about 49,152 logits reads 1,536 maxima first.

Owns: the fixed layout of groups, and exact searches that use a row's group maxima ("peaks") to skip the rest of it.
Never does: anything random, and no change to a row.

A chunk is 16,384 consecutive tokens, laid out as 32 lines of 512; a group is one column of a chunk, which makes the
maxima of all groups one vectorised pass over the row. The layout of a token depends on its id alone.

    chunk 0:  token     0     1 ...   511        group 0 = tokens 0, 512, 1024, ... 15872
                      512   513 ...  1023        group 1 = tokens 1, 513, 1025, ... 15873
                      ...                        group 512 starts chunk 1, with token 16384
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatRow = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

GROUP_SIZE = 32
GROUP_STRIDE = 512
_CHUNK = GROUP_SIZE * GROUP_STRIDE
_LEAST_TEMPERATURE = 1e-30  # its inverse is still a float32


class VocabGroups:
    """The groups of one vocabulary. The last chunk may be ragged: its groups then have fewer than 32 tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        num_chunks, tail = divmod(vocab_size, _CHUNK)
        self._num_full_groups = num_chunks * GROUP_STRIDE
        self._num_full_tokens = num_chunks * _CHUNK
        self._is_ragged = tail > 0
        self.num_groups = self._num_full_groups + min(tail, GROUP_STRIDE)
        group_ids = np.arange(self.num_groups, dtype=np.int64)
        self._first_ids = (group_ids // GROUP_STRIDE) * _CHUNK + group_ids % GROUP_STRIDE
        self._scratch = np.empty(vocab_size, dtype=np.float32)
        self._steps = np.arange(GROUP_SIZE, dtype=np.int64) * GROUP_STRIDE

    def peaks(self, row: FloatRow) -> FloatRow:
        """The largest logit of each group, [num_groups]. NaN where a group holds one."""
        peaks = np.empty(self.num_groups, dtype=np.float32)
        full, full_groups = self._num_full_tokens, self._num_full_groups
        if full:
            chunks = row[:full].reshape(-1, GROUP_SIZE, GROUP_STRIDE)
            np.maximum.reduce(chunks, axis=1, out=peaks[:full_groups].reshape(-1, GROUP_STRIDE))
        tail, tail_peaks = row[full:], peaks[full_groups:]
        num_lines = tail.size // GROUP_STRIDE
        rest = tail[num_lines * GROUP_STRIDE :]
        if num_lines:
            np.maximum.reduce(tail[: num_lines * GROUP_STRIDE].reshape(num_lines, GROUP_STRIDE), out=tail_peaks)
            np.maximum(tail_peaks[: rest.size], rest, out=tail_peaks[: rest.size])
        else:
            tail_peaks[:] = rest
        return peaks

    def members(self, row: FloatRow, group_ids: Ids) -> tuple[Ids, FloatRow]:
        """Ids and logits of all tokens of some groups, both [len(group_ids), 32]; -inf where a place has no token."""
        token_ids = self._first_ids[group_ids][:, None] + self._steps
        if not self._is_ragged:
            return token_ids, row[token_ids]
        logits = row.take(token_ids, mode="clip")
        logits[token_ids >= self.vocab_size] = -np.inf
        return token_ids, logits

    def logits_at(self, row: FloatRow, places: Ids) -> FloatRow:
        """The logit at one place (0 to 31) of each group, [num_groups]; -inf where it has no token."""
        token_ids = places * GROUP_STRIDE
        token_ids += self._first_ids
        if not self._is_ragged:
            return row[token_ids]
        logits = row.take(token_ids, mode="clip")
        logits[token_ids >= self.vocab_size] = -np.inf
        return logits

    def at_least(self, row: FloatRow, peaks: FloatRow, floor: float) -> Ids:
        """The tokens whose logit is `floor` or more, in an order that depends on the row alone."""
        group_ids = (peaks >= floor).nonzero()[0]
        if floor == -np.inf or 4 * group_ids.size > self.num_groups:
            return np.flatnonzero(row >= floor)
        token_ids, logits = self.members(row, group_ids)
        return token_ids[logits >= floor]

    def sum_exp(self, logits: FloatRow, largest: float, temperature: float = 1.0) -> float:
        """Sum of exp((logit - largest) / T) over at most a row of logits; `largest` is finite."""
        scaled = np.subtract(logits, np.float32(largest), out=self._scratch[: logits.size])
        if temperature != 1.0:
            scaled *= np.float32(1.0 / max(temperature, _LEAST_TEMPERATURE))
        return float(np.exp(scaled, out=scaled).sum())

    def largest(self, row: FloatRow, peaks: FloatRow, k: int) -> tuple[Ids, FloatRow]:
        """Ids and logits of the k largest (1 <= k <= vocab_size) and of all that equal the least of them."""
        # The k best peaks are k tokens, so the k-th largest token is no smaller than the k-th largest peak.
        if 4 * k > self.num_groups:
            token_ids, logits = np.arange(self.vocab_size), row
        else:
            token_ids = self.at_least(row, peaks, _kth_largest(peaks, k))
            logits = row[token_ids]
        kept = logits >= _kth_largest(logits, k)
        return token_ids[kept], logits[kept]


def _kth_largest(values: FloatRow, k: int) -> float:
    return float(np.partition(values, values.size - k)[values.size - k])
