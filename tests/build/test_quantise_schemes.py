"""What may be asked of --precision and its companions, and what is refused with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from residentd.errors import OperatorError
from residentd_build.options import AUTO_SCHEMES
from residentd_build.precision import BLOCKS, CHOICES, PRECISIONS, PrecisionError, Scheme, scheme_for


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_has_a_scheme_by_itself(precision: str) -> None:
    """A name alone is enough."""
    assert scheme_for(precision).precision == precision


@pytest.mark.parametrize(("precision", "block"), [(name, block) for name, blocks in BLOCKS.items() for block in blocks])
@pytest.mark.parametrize("embedding", CHOICES)
@pytest.mark.parametrize("head", CHOICES)
def test_block_embedding_and_head_are_chosen_one_by_one(precision: str, block: int, embedding: str, head: str) -> None:
    """Each choice is taken as it is; only a whole channel as block rounds activations outside the kernel."""
    found = scheme_for(precision, block=block, embedding=embedding, head=head)
    assert (found.precision, found.block, found.embedding, found.head) == (precision, block, embedding, head)
    assert found.activations == ("dynamic" if block == 0 else "float")


@pytest.mark.parametrize(
    ("scheme", "embedding", "head"),
    [
        (scheme_for("int8"), "int8", "int8"),
        (scheme_for("int4"), "int8", "int8"),
        (scheme_for("int4", embedding="same", head="fp32"), "int4", "fp32"),
        (scheme_for("fp32", head="int8"), "fp32", "int8"),
        (scheme_for("bf16"), "bf16", "bf16"),
    ],
)
def test_same_means_the_precision_of_the_others(scheme: Scheme, embedding: str, head: str) -> None:
    """`same` resolves to the precision; a choice stands."""
    assert (scheme.embedding_precision, scheme.head_precision) == (embedding, head)


@pytest.mark.parametrize(
    ("scheme", "coarsest"),
    [
        (scheme_for("fp32"), "fp32"),
        (scheme_for("fp32", embedding="fp32", head="same"), "fp32"),
        (scheme_for("fp32", head="int8"), "int8"),
        (scheme_for("fp32", embedding="int4", head="int8"), "int4"),
        (scheme_for("bf16", head="fp32"), "bf16"),
        (scheme_for("int8", head="fp32", embedding="fp32"), "int8"),
        (scheme_for("int8", embedding="int4"), "int4"),
        (scheme_for("int4"), "int4"),
    ],
)
def test_a_scheme_is_as_coarse_as_its_coarsest_part(scheme: Scheme, coarsest: str) -> None:
    """Whichever part that is; exact is what is fp32 in all of them."""
    assert scheme.coarsest == coarsest
    assert scheme.is_exact == (coarsest == "fp32")


BLOCKS_32, BLOCKS_128 = scheme_for("int4"), scheme_for("int4", block=128)


@pytest.mark.parametrize(
    ("scheme", "other", "is_certain"),
    [
        (BLOCKS_128, BLOCKS_32, True),
        (BLOCKS_32, BLOCKS_128, False),
        (BLOCKS_32, BLOCKS_32, False),
        (BLOCKS_32, scheme_for("int8", block=32), True),
        (BLOCKS_128, scheme_for("int8", block=32), True),
        (BLOCKS_32, scheme_for("int8", block=128), False),
        (BLOCKS_32, scheme_for("int8"), False),
        (scheme_for("int8"), scheme_for("int8", block=32), False),
        (BLOCKS_128, scheme_for("int4", head="int4"), False),
        (BLOCKS_128, scheme_for("fp32"), False),
    ],
)
def test_more_is_lost_for_certain_only_in_blocks_no_finer_in_anything(
    scheme: Scheme,
    other: Scheme,
    is_certain: bool,  # noqa: FBT001
) -> None:
    """Fewer bits or larger blocks, and nothing the other way round; a scale a channel is measured."""
    assert scheme.loses_more_than(other) == is_certain


def test_auto_tries_what_loses_less_before_what_loses_more() -> None:
    """So that the bound can rule out what comes later, and only that."""
    for index, scheme in enumerate(AUTO_SCHEMES):
        assert not any(scheme.loses_more_than(later) for later in AUTO_SCHEMES[index:])
    assert AUTO_SCHEMES[0].is_exact


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        ("int5", {}, r"'int5'; fp32, fp16, bf16, int8, int4 are possible"),
        ("fp32", {"block": 32}, "Leave --block out, or use int4"),
        ("int4", {"block": 0}, r"--block is 0; int4 has blocks of 32, 128"),
        ("int8", {"block": 64}, r"--block is 64; int8 has blocks of 0, 32, 128"),
        ("int8", {"symmetric": False}, "Add --block 32 or --block 128"),
        ("fp16", {"symmetric": False}, "fp16 has no zero point. Leave the option out"),
        ("int4", {"head": "int2"}, r"--head is 'int2'; same, fp32, int8, int4 are possible"),
        ("int4", {"embedding": "fp16"}, r"--embedding is 'fp16'"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_way_out(precision: str, options: dict[str, Any], message: str) -> None:
    """The value, what is possible and what to do."""
    with pytest.raises(PrecisionError, match=message) as refused:
        scheme_for(precision, **options)
    assert isinstance(refused.value, OperatorError)


def test_symmetric_may_be_said_where_it_is_so_anyway() -> None:
    """Asking for what is the default is no error."""
    assert scheme_for("int8", symmetric=True) == scheme_for("int8")
    assert not scheme_for("int8", block=32, symmetric=False).symmetric
