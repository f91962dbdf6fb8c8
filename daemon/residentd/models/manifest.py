"""The manifest of one version: what it is, what decides its answers, and how well it reproduced its export.

Pure: schema, digests and checks over values. Files are `models.store`'s business.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

import msgspec

from residentd.errors import OperatorError, StoreError

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


class Golden(_Struct, frozen=True, kw_only=True):
    """A prompt and the greedy ids the export itself produced after it; replayed at every load."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class TextGolden(_Struct, frozen=True, kw_only=True):
    """A text and its ids: a tokenizer library that encodes differently is seen at load."""

    text: str
    ids: tuple[int, ...]


class Agreement(_Struct, frozen=True, kw_only=True):
    """The engine against its export on ONNX Runtime's CPU provider, on ragged, mixed, slot-reusing batches."""

    logit_diff_max: float
    logit_diff_bound: float
    greedy_equal: int
    greedy_total: int
    positions: int  # sampled rows compared


class Build(_Struct, frozen=True, kw_only=True):
    """How it was made. Explains a version; decides no answer, so it is outside the digest."""

    created: str  # ISO 8601, UTC
    tool_versions: dict[str, str]
    source_sha256: str
    seconds: float
    passes: tuple[str, ...]  # what each pass did, one line each


class Content(_Struct, frozen=True, kw_only=True):
    """Everything that decides an answer. Its digest is the version's identity (design §4)."""

    architecture: str
    engine: Engine
    text: Text
    sampling: SamplingDefaults
    goldens: tuple[Golden, ...]
    text_goldens: tuple[TextGolden, ...]
    files: dict[str, File]


class Manifest(_Struct, frozen=True, kw_only=True):
    schema: int
    name: str
    content: Content
    digest: str
    agreement: Agreement
    build: Build


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
