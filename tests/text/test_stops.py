from __future__ import annotations

import itertools

import pytest
import text_samples
from hypothesis import example, given
from hypothesis import strategies as st

from residentd.errors import CallerError
from residentd.text import limits
from residentd.text.stops import StopMatcher, stop_set

small = st.text(alphabet="ab\n", min_size=1, max_size=5)


def first_match(text, stops):
    """The rule, character by character: (start, stop) of the match complete first, the longest of those."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def run(stops, deltas):
    """All text that left, and the match; checks on the way that nothing leaves too early or too late."""
    matcher, out, seen = StopMatcher(stop_set(stops)), "", ""
    for delta in deltas:
        seen += delta
        would = matcher.would_match(delta)
        emitted, stop = matcher.push(delta)
        out += emitted
        assert would is (stop is not None)
        if stop is not None:
            return out, stop
        assert seen.startswith(out)
        held = seen[len(out) :]
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert len(held) == longest
    return out + matcher.flush(), None


@text_samples.PROPERTY
@given(
    st.lists(small, min_size=1, max_size=5),
    st.text(alphabet="ab\n", max_size=25),
    st.lists(st.integers(0, 25), max_size=8),
)
@example(["abab", "ba"], "aababab", [3])
@example(["ab", "bab", "a"], "bab", [])
@example(["aab"], "aaab", [1, 2, 3])
def test_the_match_does_not_depend_on_the_deltas(stops, text, cuts):
    """Text up to the first complete match leaves, nothing of or past it, whatever the deltas are."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [text[start:end] for start, end in itertools.pairwise(edges)]
    match = first_match(text, stops)
    expected = (text, None) if match is None else (text[: match[0]], match[1])
    assert run(stops, deltas) == expected
    assert run(stops, list(text)) == expected


@pytest.mark.parametrize(
    ("stops", "deltas", "out", "stop"),
    [
        (["</s>"], ["a</", "s", ">b"], "a", "</s>"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["abcd", "bc"], ["xabcd"], "xa", "bc"),  # complete first
        (["bc", "abc"], ["xabc"], "x", "abc"),  # complete together: the longest
        (["stop"], ["sto"], "sto", None),  # a beginning that comes to nothing leaves at the end
        (["aab"], ["aaa", "ab"], "aa", "aab"),
        ([], ["ab"], "ab", None),
        (["a", "a"], ["ba"], "b", "a"),
        (["é😀"], ["xé", "😀y"], "x", "é😀"),
    ],
)
def test_rules_in_examples(stops, deltas, out, stop):
    """Earliest complete, then longest; held back exactly as long as needed."""
    assert run(stops, deltas) == (out, stop)


def test_limits():
    """STOPS_CEILING strings of STOP_CHARS_MAX characters work; one more of either, or an empty one, is refused."""
    most = ["a" * (limits.STOP_CHARS_MAX - 2) + f"{index:02}" for index in range(limits.STOPS_CEILING)]
    text = "a" * 1000
    assert run(most, [text, "07", "b"]) == ("a" * (1000 - limits.STOP_CHARS_MAX + 2), most[7])
    for stops in ([*most, "b"], ["a" * (limits.STOP_CHARS_MAX + 1)], [""], ["a", ""]):
        with pytest.raises(CallerError) as caught:
            stop_set(stops)
        assert caught.value.field == "stop"
        assert str(limits.STOPS_CEILING) in str(caught.value) or str(limits.STOP_CHARS_MAX) in str(caught.value)
