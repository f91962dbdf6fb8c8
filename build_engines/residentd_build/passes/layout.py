"""The two layouts that attention meets: rows of all heads, and heads first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx_ir.tape import Tape

    from residentd_build.draft import Draft

SWAP_HEADS_AND_TOKENS = (0, 2, 1, 3)


def rows_of(tape: Tape, draft: Draft, value: ir.Value, *, width: int, is_heads_first: bool, name: str) -> ir.Value:
    """[tokens, width] of a value that is [1, heads, tokens, dim] if `is_heads_first`, else [1?, tokens, …]."""
    if is_heads_first:
        value = tape.op("Transpose", [value], {"perm": SWAP_HEADS_AND_TOKENS}, name=f"{name}.tokens_first")
    return reshape(tape, draft, value, [-1, width], f"{name}.rows")


def heads_of(tape: Tape, draft: Draft, rows: ir.Value, *, heads: int, dim: int, name: str) -> ir.Value:
    """[1, heads, tokens, dim] of [tokens, heads · dim]."""
    split = reshape(tape, draft, rows, [1, -1, heads, dim], f"{name}.split")
    return tape.op("Transpose", [split], {"perm": SWAP_HEADS_AND_TOKENS}, name=f"{name}.heads_first")


def reshape(tape: Tape, draft: Draft, value: ir.Value, shape: list[int], name: str) -> ir.Value:
    return tape.op("Reshape", [value, draft.integers(shape)], name=name)
