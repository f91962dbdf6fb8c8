"""onnxruntime-genai's own configuration, in the words of the files that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_KEYS = {
    "type": "model_type",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
}
SEARCH_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")


def config_of(genai: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json would say; empty without a genai_config.json."""
    model = genai.get("model")
    found = model if isinstance(model, dict) else {}
    return {name: found[key] for key, name in MODEL_KEYS.items() if found.get(key) is not None}


def generation_of(genai: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would say of sampling."""
    search = genai.get("search")
    found = search if isinstance(search, dict) else {}
    return {key: found[key] for key in SEARCH_KEYS if found.get(key) is not None}


def head_size_of(genai: Mapping[str, Any]) -> int | None:
    """Numbers of one head in the caches, which the builder's graphs of 0.18 leave open."""
    model = genai.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    size = decoder.get("head_size") if isinstance(decoder, dict) else None
    return size if isinstance(size, int) and not isinstance(size, bool) else None
