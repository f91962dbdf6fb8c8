from __future__ import annotations

import pytest
import text_samples
from hypothesis import given
from hypothesis import strategies as st

from residentd.text.trace import FOLLOWED, Traced, derived, is_whole, join, merged, plain, redacted

# Every character occurs once, so where a character of a result came from can be read off the character itself.
ALPHABET = "aBcDeF \t\n\u2003gHiJ|ßkŉ"
NEW = "XYZ"


@st.composite
def traced(draw):
    """A text without repeated characters, and which of them are the caller's."""
    text = "".join(draw(st.lists(st.sampled_from(ALPHABET), unique=True, max_size=len(ALPHABET))))
    mine = draw(st.sets(st.sampled_from(text))) if text else set()
    spans = merged([(index, index + 1) for index, char in enumerate(text) if char in mine])
    return Traced(text, spans), mine


def callers(text):
    """The caller's characters of `text`."""
    spans = text.spans if isinstance(text, Traced) else ()
    return {text[index : index + 1] for start, end in spans for index in range(start, end)}


def check(result, expected, mine):
    """`result` is the plain `expected`, and each character is still whose it was."""
    assert type(plain(result)) is str
    assert result == expected
    assert {plain(char) for char in callers(result)} == {char for char in expected if char in mine}
    if isinstance(result, Traced):
        assert all(start < end for start, end in result.spans)
        assert all(left[1] <= right[0] for left, right in zip(result.spans, result.spans[1:], strict=False))


CALLS = {
    "strip": lambda text, chars, _: text.strip(chars),
    "strip blanks": lambda text, _, __: text.strip(),
    "lstrip": lambda text, chars, _: text.lstrip(chars),
    "lstrip blanks": lambda text, _, __: text.lstrip(),
    "rstrip": lambda text, chars, _: text.rstrip(chars),
    "rstrip blanks": lambda text, _, __: text.rstrip(None),
    "removeprefix": lambda text, chars, _: text.removeprefix(chars),
    "removesuffix": lambda text, chars, _: text.removesuffix(chars),
    "split": lambda text, chars, count: text.split(chars or "a", count),
    "split blanks": lambda text, _, count: text.split(None, count),
    "rsplit": lambda text, chars, count: text.rsplit(chars or "a", count),
    "rsplit blanks": lambda text, _, count: text.rsplit(maxsplit=count),
    "splitlines": lambda text, _, __: text.splitlines(),
    "splitlines keeping": lambda text, _, __: text.splitlines(True),
    "partition": lambda text, chars, _: text.partition(chars or "a"),
    "rpartition": lambda text, chars, _: text.rpartition(chars or "a"),
    "replace": lambda text, chars, count: text.replace(chars or "a", NEW, count),
    "slice": lambda text, _, count: text[count : count + 5],
    "slice to": lambda text, _, count: text[:count],
    "index": lambda text, _, count: text[count] if -len(text) <= count < len(text) else "",
    "characters": lambda text, _, __: list(text),
    "add": lambda text, _, __: text + NEW,
    "add to": lambda text, _, __: NEW + text,
    "join": lambda text, _, __: text.join(["X", "Y"]),
    "str": lambda text, _, __: str(text),
}


@pytest.mark.parametrize("name", CALLS)
@text_samples.BRIEF
@given(traced(), st.text(alphabet=ALPHABET, max_size=2), st.integers(-3, 6))
def test_an_operation_keeps_whose_each_character_is(name, text_and_mine, chars, count):
    """Every followed operation gives what str gives, and each character stays the caller's or the template's."""
    text, mine = text_and_mine
    result = CALLS[name](text, chars, count)
    expected = CALLS[name](plain(text), chars, count)
    if isinstance(expected, str):
        check(result, expected, mine)
        return
    assert len(result) == len(expected)
    for part, whole in zip(result, expected, strict=True):
        check(part, whole, mine)


@pytest.mark.parametrize("name", ["lower", "upper", "casefold", "capitalize", "title", "swapcase"])
@text_samples.BRIEF
@given(traced())
def test_a_change_of_case_keeps_places(name, text_and_mine):
    """One to one where lengths agree; else the whole result is the caller's, and says that it is mixed."""
    text, mine = text_and_mine
    expected = getattr(plain(text), name)()
    result = getattr(text, name)()
    assert result == expected
    places = {index for index, char in enumerate(text) if char in mine}
    found = {index for start, end in getattr(result, "spans", ()) for index in range(start, end)}
    if len(expected) == len(text):
        assert found == places
    elif mine:
        assert found == set(range(len(expected)))
        assert result.mixed or len(mine) == len(text)


@text_samples.BRIEF
@given(traced(), traced(), st.integers(-1, 3))
def test_joining_shifts(left, right, count):
    """`join`, + and * put the spans where the characters go."""
    (first, mine), (second, yours) = left, right
    both = first + second
    assert both == plain(first) + plain(second)
    places = [plain(first)[i] in mine for i in range(len(first))] + [
        plain(second)[i] in yours for i in range(len(second))
    ]
    found = {index for start, end in getattr(both, "spans", ()) for index in range(start, end)}
    assert found == {index for index, owned in enumerate(places) if owned}
    assert join([first, "x", second]) == first + "x" + second
    assert getattr(first * count, "spans", ()) == getattr(join([first] * count), "spans", ())


def test_repeated_separators():
    """Pieces that look alike keep apart whose they are."""
    text = Traced("a,a,a,a", ((2, 3), (4, 5)))
    assert [bool(callers(part)) for part in text.split(",")] == [False, True, True, False]
    assert [bool(callers(part)) for part in text.rsplit(",", 1)] == [True, False]
    spaced = Traced("a a  a a", ((2, 3), (5, 6)))
    assert [bool(callers(part)) for part in spaced.split()] == [False, True, True, False]
    assert [bool(callers(part)) for part in spaced.rsplit(None, 1)] == [True, False]
    assert text.replace("a", "b") == "b,b,b,b"
    assert callers(text.replace("a", "b")) == set()  # every character is the template's now
    assert text.replace(",", Traced("b")).spans == ((1, 6),)


def test_it_is_a_string_to_everything_else():
    """Comparison, hashing, searching, dictionary keys and isinstance see the text only."""
    text = Traced("ab", ((0, 1),))
    assert text == "ab"
    assert {text: 1}["ab"] == 1
    assert hash(text) == hash("ab")
    assert text.startswith("a")
    assert "b" in text
    assert isinstance(text, str)
    assert f"{text}" == "ab"
    assert type(plain(text)) is str


@pytest.mark.parametrize("name", sorted(FOLLOWED))
def test_each_followed_method_is_overridden(name):
    """A name in FOLLOWED is a method that Traced has itself."""
    assert name in vars(Traced)


def test_what_is_not_followed_is_the_callers():
    """A result with a trace in its inputs is the caller's as a whole; `mixed` says whether that took the template's."""
    whole, part = Traced("ab"), Traced("ab", ((0, 1),))
    assert derived("x", ["ab"]) == "x"
    assert not isinstance(derived("x", ["ab"]), Traced)
    assert (derived("xyz", [whole]).spans, derived("xyz", [whole]).mixed) == (((0, 3),), False)
    assert derived("xyz", [part]).mixed
    assert derived("xyz", [whole, "ab"]).mixed
    assert (part % ()).mixed
    assert ("%s!" % whole).mixed  # noqa: UP031 - what a template would do
    assert part[::-1].mixed
    assert not whole[::-1].mixed
    assert part.replace("", "-").mixed
    assert (whole + derived("xyz", [part])).mixed


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("", True),
        ("a", False),
        (Traced("ab"), True),
        (Traced("ab", ((0, 1),)), False),
        (Traced("ab", mixed=True), False),
    ],
)
def test_is_whole(text, whole):
    """All of it, and exactly."""
    assert is_whole(text) is whole


@text_samples.BRIEF
@given(traced())
def test_redacted_text_holds_nothing_of_the_callers(text_and_mine):
    """An ellipsis stands for each of the caller's stretches, and the template's text stays."""
    text, mine = text_and_mine
    clean = redacted(text)
    assert type(clean) is str
    assert not mine & set(clean)
    assert [char for char in clean if char != "…"] == [char for char in plain(text) if char not in mine]
    assert clean.count("…") == len(text.spans)
