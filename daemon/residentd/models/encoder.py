"""What the manifest says of models that answer in one run: encoders of text, and plain tensor models. Pure schema."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["generate", "embed", "classify", "rerank", "tensor"]
TextInput: TypeAlias = Literal["input_ids", "attention_mask", "token_type_ids", "position_ids"]
Pooling: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
Activation: TypeAlias = Literal["identity", "sigmoid", "softmax"]
TensorType: TypeAlias = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """As manifest._Struct: unknown fields are refused, defaults are not written."""


class EncodedGolden(_Struct, frozen=True, kw_only=True):
    """A text, or a pair of texts, and what the tokenizer makes of it, special tokens included."""

    text: str
    pair: str | None = None
    ids: tuple[int, ...]
    types: tuple[int, ...] = ()  # empty: all 0


class RowGolden(_Struct, frozen=True, kw_only=True):
    """Token ids of one text and what the export itself gave for it alone, pooled and normalised: scores as logits."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()
    output: bytes  # float32, little-endian, [Encoder.width]


class Encoder(_Struct, frozen=True, kw_only=True):
    """How texts become rows of the graph's inputs, and its output one row of `width` numbers for each.

    The limits are the engine's: `slots` rows a run at most, `context` tokens of one text, `step_tokens_max` tokens of
    one run, padding included.
    """

    inputs: tuple[TextInput, ...]
    output: str
    width: int
    pad_id: int = 0
    pooling: tuple[Pooling, ...] = ()  # over the tokens, side by side; empty: the graph gives one row a text
    normalise: bool = False  # to length 1, after pooling
    activation: Activation = "identity"  # of scores; what the graph gives are logits
    labels: tuple[str, ...] = ()
    prompts: dict[str, str] = msgspec.field(default_factory=dict)  # by name; written before a text
    prompt_default: str = ""  # a name
    lowercase: bool = False  # before the tokenizer
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"
    alone: str = ""  # why rows run one by one; empty: a batch of N was shown to equal N singles
    tolerance: float  # how far a replay of the goldens may be, in units of the output
    goldens: tuple[RowGolden, ...]
    texts: tuple[EncodedGolden, ...]


class TensorSpec(_Struct, frozen=True, kw_only=True):
    """One input or output. A text in `shape` names a free dimension: the same name is the same size, "?" is any."""

    name: str
    dtype: TensorType
    shape: tuple[int | str, ...]


class TensorSample(_Struct, frozen=True, kw_only=True):
    """An output's shape, and at most SAMPLES_MAX of its elements, evenly spread: float64, little-endian."""

    shape: tuple[int, ...]
    values: bytes


class TensorGolden(_Struct, frozen=True, kw_only=True):
    """Input shapes, the numbers that their contents are computed from, and what the export itself gave for them."""

    seed: int
    whole_max: int  # of whole numbers, which start at 0
    shapes: dict[str, tuple[int, ...]]
    outputs: dict[str, TensorSample]


class Tensors(_Struct, frozen=True, kw_only=True):
    """A graph that is called with named tensors. `slots` of the engine's limits is the most rows of one run."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    alone: str = ""  # why calls run one by one; empty: runs of several calls were shown to equal single ones
    tolerances: dict[str, float]  # by output, in its own units: how far a replay of the goldens may be
    goldens: tuple[TensorGolden, ...]
