"""Optional treatment of long and of repetitive responses, off by default.

    rl.overlong_buffer_tokens  the reward falls linearly towards the length limit. Source: "soft overlong punishment",
                               DAPO, arXiv 2503.14476, section 3.4
    rl.overlong = "drop"       responses that end at the length limit are not trained on. Source: "overlong filtering",
                               in the same section
    rl.repeated_ngram_tokens   responses that repeat an n-gram too often are not trained on

rStar2-Agent (arXiv 2508.20722) keeps overlong responses as negatives, because dropping them encouraged repetition. Its
authors also tried an n-gram filter, without success.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asterism.bus.messages import TrajectoryFinished
from asterism.configs.schema.algorithm import RlConfig

ResponseFilter = Literal["overlong", "repeated"]
_BASE = np.uint64(6_364_136_223_846_793_005)  # odd, so that its powers keep all bits of a token


def compute_overlong_penalty(trajectory: TrajectoryFinished, rl: RlConfig, limit: int) -> float:
    """Return 0 for up to `limit` - `rl.overlong_buffer_tokens` tokens, then a linear rise to `rl.overlong_penalty` at
    the `limit`, also for a response that ends there. Tool tokens count, as in dialogue.response_tokens."""
    buffer = rl.overlong_buffer_tokens
    if not buffer:
        return 0.0
    over = trajectory.record.response_tokens - (limit - buffer)
    share = 1.0 if trajectory.ending == "length" else min(max(over / buffer, 0.0), 1.0)
    return rl.overlong_penalty * share


def list_filters(rl: RlConfig) -> list[ResponseFilter]:
    filters: list[ResponseFilter] = ["overlong"] if rl.overlong == "drop" else []
    return [*filters, "repeated"] if rl.repeated_ngram_tokens else filters


def find_filter(trajectory: TrajectoryFinished, rl: RlConfig) -> ResponseFilter | None:
    """Return the first filter that drops the trajectory from the training rows, or None."""
    if rl.overlong == "drop" and trajectory.ending == "length":
        return "overlong"
    if rl.repeated_ngram_tokens:
        ids = np.frombuffer(trajectory.record.token_ids, np.int32)
        mask = np.frombuffer(trajectory.record.loss_mask, np.uint8) > 0
        if repeats_ngram(ids, mask, rl.repeated_ngram_tokens, rl.repeated_ngram_limit):
            return "repeated"
    return None


def repeats_ngram(token_ids: NDArray[np.int32], is_generated: NDArray[np.bool_], size: int, limit: int) -> bool:
    """Return whether an n-gram of `size` consecutive generated tokens occurs over `limit` times, with overlaps.

    Both arrays have one value per token. The comparison uses a 64-bit hash, which is the same in all processes.
    """
    ids, num_ngrams = token_ids.astype(np.uint64), len(token_ids) - size + 1
    if num_ngrams < 1:
        return False
    hashes = np.zeros(num_ngrams, np.uint64)
    for place in range(size):
        hashes = hashes * _BASE + ids[place : place + num_ngrams] + np.uint64(1)
    totals = np.concatenate([[0], np.cumsum(is_generated)])
    whole = hashes[totals[size:] - totals[:num_ngrams] == size]
    buckets = (whole >> np.uint64(48)).astype(np.int64)
    frequent = whole[np.bincount(buckets, minlength=1)[buckets] > limit]  # leaves few hashes to sort
    return bool((np.unique(frequent, return_counts=True)[1] > limit).any())
