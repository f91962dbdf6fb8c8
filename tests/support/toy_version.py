"""Put a version of the numpy toy model into a state directory, as if it had been installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from residentd.backend.reference import ReferenceModel, continuation
from residentd.models.manifest import (
    Content,
    Engine,
    EngineLimits,
    Golden,
    SamplingDefaults,
    Text,
    TextGolden,
)
from residentd.models.registry import Registry
from residentd.models.store import Store, measure_files
from support.manifests import sealed

BYTES = 256
END_TOKEN = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GOLDEN_PROMPTS = ((1,), (72, 101, 108, 108, 111), tuple(range(30)))
GOLDEN_TOKENS = 4
TEXT_GOLDENS = ("Hello", "café 😀\n")


def make_toy_version(
    state_dir: Path,
    name: str = "toy",
    vocab: int = 1024,
    slots: int = 4,
    context: int = 256,
    *,
    step_tokens_max: int = 64,
    model: ReferenceModel | None = None,
    has_end: bool = False,
    activate: bool = True,
) -> str:
    """Publish and register a toy model; return its digest.

    Ids 0 to 255 are the bytes, so `text.encode()` is a text's prompt; the ids above decode to " w<id>". With `has_end`
    the last id is an end token, which the model then produces once in `vocab` tokens.
    """
    model = model or ReferenceModel()
    store = Store(state_dir)
    with store.staging() as stage:
        (stage.path / "engine.json").write_bytes(msgspec.json.encode(model))
        tokenizer = toy_tokenizer(vocab, has_end=has_end)
        (stage.path / "tokenizer.json").write_text(tokenizer)
        (stage.path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        engine = Engine(
            target="reference",
            mode="canonical",
            precision="fp32",
            path="engine.json",
            limits=EngineLimits(slots=slots, context=context, step_tokens_max=step_tokens_max, vocab=vocab),
            caches=(),
        )
        text = Text(
            tokenizer="tokenizer.json",
            chat_template="chat_template.jinja",
            bos_id=None,
            bos_token="",
            eos_token=END_TOKEN if has_end else "",
            adds_bos=False,
            eos_ids=(vocab - 1,) if has_end else (),
        )
        content = Content(
            architecture="toy",
            engine=engine,
            text=text,
            sampling=SamplingDefaults(temperature=0.0),
            goldens=tuple(
                Golden(prompt=prompt, output=continuation(prompt, GOLDEN_TOKENS, model, vocab))
                for prompt in GOLDEN_PROMPTS
                if len(prompt) + GOLDEN_TOKENS <= context
            ),
            text_goldens=tuple(TextGolden(text=text, ids=tuple(text.encode())) for text in TEXT_GOLDENS),
            files=measure_files(stage.path),
        )
        manifest = sealed(name, content)
        store.publish(stage, manifest)
    registry = Registry(state_dir)
    registry.add_version(name, manifest.digest, activate=activate)
    registry.close()
    return manifest.digest


def toy_tokenizer(vocab: int, *, has_end: bool) -> str:
    """A byte-level BPE without merges, as tokenizer.json."""
    fillers = vocab - BYTES - has_end
    if fillers < 0:
        raise ValueError(f"vocab is {vocab}; the bytes and the end token alone are {BYTES + has_end}")
    ids = {character: byte for byte, character in enumerate(_byte_characters())}
    ids |= {f"Ġw{index}": index for index in range(BYTES, BYTES + fillers)}
    byte_level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    special = {
        "id": vocab - 1,
        "content": END_TOKEN,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special] if has_end else [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids | ({END_TOKEN: vocab - 1} if has_end else {}),
            "merges": [],
        },
    }
    return Tokenizer.from_str(json.dumps(document)).to_str()


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2 encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTES)]
