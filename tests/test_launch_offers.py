"""Settings that are offered to the user: each where it applies, with what it changes, and none elsewhere."""

from __future__ import annotations

import re

import pytest

from meshwise.runtime.offers import Facts, offers, processor_flags


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts(num_ranks=4, num_cores=2), "4 ranks x 1 thread on 2 cores: .* devices=2: .* same bits"),
        (Facts(num_ranks=2, threads=2, num_cores=2), "2 ranks x 2 threads on 2 cores: .* threads=1; .* can change"),
        (Facts(threads=3, num_cores=2), "1 rank x 3 threads on 2 cores: .* threads=2"),
        (Facts(num_cores=8), "1 rank x 1 thread on 8 cores: 7 cores idle. .* threads=8"),
        (Facts(has_convolutions=True), "channels_last.* bits are others"),
        (Facts(flags=frozenset({"avx2", "avx512_bf16"})), "avx512_bf16.* precision=\"bf16\" .* losses are others"),
    ],
)
def test_an_offer_says_what_to_do_and_what_it_changes(facts: Facts, words: str) -> None:
    """One fact that could be better gives one sentence with its numbers."""
    (line,) = offers(facts)
    assert re.search(words, line), line


@pytest.mark.parametrize(
    "facts",
    [
        Facts(),
        Facts(num_ranks=2, num_cores=2),
        Facts(num_ranks=2, num_cores=3),
        Facts(has_convolutions=True, is_channels_last=True),
        Facts(precision="bf16", flags=frozenset({"amx_bf16"})),
        Facts(device_type="cuda", num_ranks=8, num_cores=2, has_convolutions=True),
    ],
)
def test_nothing_is_offered_where_nothing_is_gained(facts: Facts) -> None:
    """A job that uses its cores, or already has what could be offered, hears nothing."""
    assert offers(facts) == []


def test_the_processors_flags_are_words() -> None:
    """Flags can be read wherever tests run, be it as an empty set."""
    assert all(flag and " " not in flag for flag in processor_flags())
