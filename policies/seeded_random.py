"""Draws random numbers as pure functions of a seed and keys, so that deciders have no generator state."""

# Purposes of draws: the first key after a seed, so that no two purposes share draws.
ORDER, TRAIN, EVALUATE, SIBLING, POSITIVES, NEGATIVES, BRANCH = range(1, 8)

_MASK = (1 << 64) - 1


def mix(*keys: int) -> int:
    """Return a 64-bit hash of the key sequence (the finalizer of splitmix64 over each key)."""
    state = 0x9E3779B97F4A7C15
    for key in keys:
        state = (state ^ (key & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
        state = (state + 0x9E3779B97F4A7C15) & _MASK
    return state


def draw_uniform(*keys: int) -> float:
    """Return a number in [0, 1) that depends only on the keys."""
    return (mix(*keys) >> 11) * 2.0**-53


def shuffle_range(count: int, *keys: int) -> list[int]:
    """Return a permutation of range(count) that depends only on the keys (Fisher-Yates)."""
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = mix(*keys, last) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order
