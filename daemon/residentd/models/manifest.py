"""The manifest of one version: what it is, what decides its answers, and how well it reproduced its export.

Pure: schema, digests and checks over values. Files are `models.store`'s business.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

import msgspec

from residentd.errors import OperatorError, StoreError
from residentd.models.encoder import Encoder, Kind, Tensors

SCHEMA = 2
NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
MANIFEST_BYTES_MAX = 16 << 20


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Every part of the manifest refuses fields that it does not know.

    A field at its default is not written: a field that a later residentd adds leaves the digests of today as they are.
    """


class File(_Struct, frozen=True, kw_only=True):
    """One file of the version, by its path relative to the version's directory."""

    sha256: str
    bytes: int


class EngineLimits(_Struct, frozen=True, kw_only=True):
    slots: int
    context: int  # capacity of one slot, in tokens
    step_tokens_max: int
    vocab: int


class CacheTensor(_Struct, frozen=True, kw_only=True):
    """One K or V cache: an input and the output bound to the same memory, [slots, heads, context, dim]."""

    input: str
    output: str
    heads: int
    dim: int
    dtype: Literal["float32", "float16", "bfloat16"]


class State(_Struct, frozen=True, kw_only=True):
    """What a compatibility engine carries from run to run at batch 1: an input, and the output that is its next value.

    shape: of the input; 0 at `axis`, the one that counts tokens. axis None: the shape is fixed and starts as zeros.
    """

    input: str
    output: str
    dtype: Literal["float32", "float16"]
    shape: tuple[int, ...]
    axis: int | None = None


class Engine(_Struct, frozen=True, kw_only=True):
    """What the backend loads. `path` is relative to the version's directory."""

    target: Literal[
        "onnxruntime-cpu", "reference"
    ]  # reference: the numpy toy model of the tests and the overhead bench
    mode: Literal["canonical", "compatibility"]
    mode_reason: str = ""  # why compatibility mode, for `residentctl list`
    precision: Literal["fp32", "fp16", "bf16", "int8", "int4"]
    path: str
    limits: EngineLimits
    caches: tuple[CacheTensor, ...]
    states: tuple[State, ...] = ()  # of compatibility mode, which has no caches
    weights: str = ""  # the format in a few words where `precision` does not say it all: "row8; head int8 block 32"


class Text(_Struct, frozen=True, kw_only=True):
    """How text becomes token ids and back. Paths are relative to the version's directory."""

    tokenizer: str
    chat_template: str | None
    bos_id: int | None
    bos_token: str
    eos_token: str
    adds_bos: bool  # exactly one BOS starts every prompt: the template writes it or the tokenizer does, never both
    eos_ids: tuple[int, ...]  # the union of all the configs that name one


class SamplingDefaults(_Struct, frozen=True, kw_only=True):
    """From generation_config.json; what a request leaves out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class LogitStatistics(_Struct, frozen=True, kw_only=True):
    """Of the logits before one output token, as the engine gave them when it was built: 7 significant digits.

    `ids` are the likeliest tokens, best first, then some others; `logits` are theirs.
    """

    ids: tuple[int, ...]
    logits: tuple[float, ...]
    logsumexp: float
    mean: float
    deviation: float


class Golden(_Struct, frozen=True, kw_only=True):
    """A prompt and the greedy ids the export itself produced after it; replayed at every load.

    `statistics`, where they were recorded, are of the engine itself: one entry for each output token.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    statistics: tuple[LogitStatistics, ...] = ()


class Tolerance(_Struct, frozen=True, kw_only=True):
    """How far the statistics of a replay may be from the recorded ones, in logits.

    `bound`: the worst difference of any. `bound_rms`, of quantised builds: the root mean square over the positions of
    each one's worst. `spread` is the largest difference that the engine showed when it was built, with the goldens
    batched otherwise and, if quantised, with the rounding of another processor put into its caches.
    """

    bound: float
    spread: float
    bound_rms: float = 0.0  # 0: the worst says enough, as where nothing but fp32 rounding is between two replays
    tokens_missed_max: int = (
        0  # golden tokens of a quantised build that rounding may turn; of others none that is clear
    )


class TextGolden(_Struct, frozen=True, kw_only=True):
    """A text and its ids: a tokenizer library that encodes differently is seen at load."""

    text: str
    ids: tuple[int, ...]


class ChatGolden(_Struct, frozen=True, kw_only=True):
    """A conversation of (role, content), what the template writes for it at a fixed moment, and the prompt's ids.

    `refused`: the template, or the keeping apart of control tokens, refuses it, and must go on to.
    """

    messages: tuple[tuple[str, str], ...]
    add_generation_prompt: bool = True
    text: str = ""
    ids: tuple[int, ...] = ()
    refused: bool = False


class Agreement(_Struct, frozen=True, kw_only=True):
    """The engine against its export on ONNX Runtime's CPU provider, on ragged, mixed, slot-reusing batches."""

    logit_diff_max: float
    logit_diff_bound: float
    greedy_equal: int
    greedy_total: int
    positions: int  # sampled rows compared


class Quality(_Struct, frozen=True, kw_only=True):
    """The build beside its export, over the text that the compiler carries; next-token distributions, in nats."""

    kl_mean: float  # KL divergence from the export to the build
    kl_p99: float  # of the worst position in a hundred
    kl_bound: float  # of the mean; past it nothing was published
    perplexity: float
    perplexity_export: float
    top1: float  # share of the positions at which both have the same first choice
    positions: int
    kl_in_flight: float = 0.0  # the worst between a position in flight and the same alone; fp32 builds are exact


class Cost(_Struct, frozen=True, kw_only=True):
    """What the build takes. How fast it is, the first load measures (checks.Speeds)."""

    file_bytes: int  # graph and weights
    memory_bytes: int  # computed, as a load computes it: below this it is refused


class Build(_Struct, frozen=True, kw_only=True):
    """How it was made. Explains a version; decides no answer, so it is outside the digest."""

    created: str  # ISO 8601, UTC
    tool_versions: dict[str, str]
    source_sha256: str
    seconds: float
    passes: tuple[str, ...]  # what each pass did, one line each
    candidates: tuple[str, ...] = ()  # what --precision auto measured, and why it chose, one line each


class Content(_Struct, frozen=True, kw_only=True):
    """Everything that decides an answer. Its digest is the version's identity (design §4)."""

    architecture: str
    engine: Engine
    text: Text | None  # None: a tensor model
    sampling: SamplingDefaults
    goldens: tuple[Golden, ...]
    text_goldens: tuple[TextGolden, ...]
    files: dict[str, File]
    chat_goldens: tuple[ChatGolden, ...] = ()
    tolerance: Tolerance | None = None  # None: an older build, whose goldens have ids only
    kind: Kind = "generate"
    encoder: Encoder | None = None  # of embed, classify and rerank
    tensors: Tensors | None = None  # of tensor


class Manifest(_Struct, frozen=True, kw_only=True):
    schema: int
    name: str
    content: Content
    digest: str
    agreement: Agreement
    build: Build
    quality: Quality | None = None  # None: an older build
    cost: Cost | None = None


def content_digest(content: Content) -> str:
    """Hex SHA-256 over the canonical JSON of `content`: sorted keys, no whitespace."""
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1)


def decode(data: bytes) -> Manifest:
    """Parse and check a manifest. Raises StoreError naming what is wrong; never trusts the digest it carries."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise StoreError(f"the manifest has {len(data):,} bytes; at most {MANIFEST_BYTES_MAX:,} are read. Reinstall it")
    try:
        written = int(bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema", msgspec.Raw(b"0"))))
        if written != SCHEMA:
            remedy = "Upgrade it" if written > SCHEMA else "Reinstall this version"
            raise StoreError(f"the manifest has schema {written}; this residentd reads {SCHEMA}. {remedy}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreError(f"the manifest is damaged ({error}). Reinstall this version") from error
    if content_digest(manifest.content) != manifest.digest:
        raise StoreError("the manifest does not match its digest. Reinstall this version")
    return manifest


def check_name(name: str) -> str:
    """Return `name`, or raise OperatorError: it becomes part of file names, so the alphabet is narrow."""
    if not NAME_PATTERN.fullmatch(name):
        raise OperatorError(
            f"model name {name!r} is not allowed: 1 to 64 of a-z 0-9 . _ - starting with a letter or digit"
        )
    return name
