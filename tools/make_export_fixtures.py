# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-any-return"
# ruff: noqa: RUF001 - the corpus is meant to hold characters of many scripts
"""Make the tiny random-weight exports under tests/fixtures/exports, with goldens recorded from transformers.

Not part of the product: torch is needed here and nowhere else, so run it in an environment of its own (CPython 3.11,
Linux, CPU; a CPU build of torch is enough):

    python3 -m venv fixtures-venv
    fixtures-venv/bin/pip install torch==2.13.0 transformers==4.57.6 tokenizers==0.22.2 optimum==2.1.0 \
        optimum-onnx==0.1.0 accelerate==1.15.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
    fixtures-venv/bin/python -W ignore tools/make_export_fixtures.py          # all of them, half a minute
    fixtures-venv/bin/python -W ignore tools/make_export_fixtures.py llama    # one
    fixtures-venv/bin/python tools/make_export_fixtures.py --check            # replay the committed ones, write nothing

A run depends on nothing but the pinned versions and the seeds below: on one machine it writes the same bytes again.
Another CPU may round the recorded logits and gaps differently in the last digits; token ids are safe, because a seed is
taken only when every greedy choice is clear (GREEDY_GAP_MIN).
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import tokenizers
import torch
import transformers
from optimum.exporters.onnx import onnx_export_from_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

EXPORTS = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "exports"
FORMAT = 1
CONTEXT_TOKENS_MAX = 256
GREEDY_TOKENS = 24
PROMPT_TOKENS = (1, 2, 7, 16, 24, 25, 40, 73, 110, 150, CONTEXT_TOKENS_MAX - GREEDY_TOKENS)
LOGITS_PROMPT_INDEX = 6
GREEDY_GAP_MIN = 5e-3  # fp32 kernels disagree by about 1e-4 on these logits
DISTINCT_TOKENS_MIN = 15  # of GREEDY_TOKENS: a looping answer would hide position errors
MATTERS_TOKENS_MIN = 40  # prompts from this length on show every part of an architecture
SEED_TRIES_MAX = 400
FIXTURE_BYTES_MAX = 1_000_000
ORT_LOGIT_TOLERANCE = 2e-3

CORPUS = """\
The harbour town woke slowly. A narrow street led from the old lighthouse to the market, where fishermen sold the
night's catch and children counted the coins: one, two, three, 10, 42, 1999. The weather was calm, the water was clear,
and the wind was warm. "Where were you yesterday?" asked the baker. "I was waiting for the train," said the other, "but
the train was late again." In the evening they would sit together near the window and tell the story of the winter when
the river froze and the whole town walked over the ice. The teacher wrote everything down; the doctor remembered the
names; the carpenter remembered the weather.
Le café était fermé, mais l'élève naïf attendait près de la fenêtre. Größe und Maß: fünf Äpfel, drei Brötchen.
El niño pequeño comió piñas mañana. Dziękuję bardzo, łódź płynie. Ångström, smörgåsbord, œuvre.
你好，世界。今天天气很好。こんにちは世界、元気ですか。안녕하세요 세계. Привет, мир! Γειά σου κόσμε. שלום עולם.
def add(first, second):\n    return first + second\n\nfor index in range(10):\n    print(add(index, 2 * index))\n
😀 🎉 🚀 👍🏽 👩‍💻 ½ × ÷ € £ ¥ – — … “quotes” ‘single’ • → ≤ ≥
"""

ENCODE_TEXTS = (
    "",
    " ",
    "Hello",
    "hello world",
    " leading and trailing ",
    "two  spaces   three",
    "The weather was calm, the water was clear.",
    "café naïve Größe",
    "cafe\u0301 combining",
    "1999 and 3.14 and 007",
    "tab\tnewline\n\ntwo newlines\r\n",
    "你好，世界 こんにちは 안녕",
    "emoji 😀🎉👩‍💻👍🏽!",
    "unseen 𝔘𐍈 ꙮ ௵",
    "don't I'll we've IT'S",
    "▁underline and\u00a0nbsp",
    "def add(first, second):\n    return first",
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}" + CHATML
)
CHATML_THINKING = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' and '</think>' in message.content %}\n"
    "        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
    "    {%- else %}\n"
    "        {%- set content = message.content %}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endif %}"
)
LLAMA_CHAT = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
ZEPHYR_CHAT = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)
MISTRAL_CHAT = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}"
    "{%- endif %}"
    "{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}"
    "{%- else %}{{- message['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}"
)

GEMMA_CHAT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

CHAT_CASES: tuple[tuple[list[dict[str, str]], bool], ...] = (
    ([{"role": "user", "content": "Hello, where is the lighthouse?"}], True),
    ([{"role": "user", "content": "  Spaces around\n"}], False),
    (
        [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "Où est le café? 你好 😀"}],
        True,
    ),
    (
        [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."},
            {"role": "user", "content": "Three {{ 1 + 1 }} {% raw %}?"},
        ],
        True,
    ),
    ([{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}], False),
    ([{"role": "user", "content": "First."}, {"role": "user", "content": "Second."}], True),
)


@dataclass(frozen=True, slots=True)
class Fixture:
    """One directory: an architecture, the tokenizer style that goes with it, and its quirks.

    `eos` and `generation_eos` name tokens; `config` is passed to the transformers configuration class as it is.
    """

    name: str
    model_type: str
    seed: int
    tokenizer_style: str  # see TOKENIZERS
    tokenizer_class: str
    chat_template: str
    vocab_size: int
    eos: str
    generation_eos: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"  # what the exporter traces; goldens are always eager
    accelerate: bool = True  # with accelerate installed the exporter stores tied weights once, without it twice
    external_data: bool = False
    template_in_tokenizer_config: bool = False
    chat_kwargs: tuple[dict[str, Any], ...] = ({},)
    exporter: str = "optimum"
    attention_gain: float = 1.0  # above 1 where attention would be too flat for context to decide
    embedding_gain: float = 1.0  # below 1 where the model makes its embedding loud, or its branches quiet, by itself
    matters: tuple[dict[str, Any], ...] = ()  # configurations with each of which the long answers must be others
    distinct_min: int = DISTINCT_TOKENS_MIN
    has_text_goldens: bool = True  # False: the tokenizer is another fixture's, which has them


BYTE_LEVEL_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_SPECIALS = (*BYTE_LEVEL_SPECIALS, "<|fim_end|>")
SENTENCEPIECE_CHARACTERS = 90
SENTENCEPIECE_SPECIALS = ("<unk>", "<s>", "</s>")
GEMMA_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")

LLAMA = Fixture(
    name="llama",
    model_type="llama",
    seed=1000,
    tokenizer_style="sentencepiece",
    tokenizer_class="PreTrainedTokenizerFast",
    chat_template=LLAMA_CHAT,
    vocab_size=480,
    eos="</s>",
    generation_eos=("</s>",),
    config={
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    },
)
SMALL = Fixture(
    name="small",
    model_type="llama",
    seed=40_000,
    tokenizer_style="qwen",
    tokenizer_class="Qwen2TokenizerFast",
    chat_template=CHATML_DEFAULT_SYSTEM,
    vocab_size=320,
    eos="<|fim_end|>",
    generation_eos=("<|im_end|>", "<|endoftext|>"),
    has_text_goldens=False,
    config={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
)
"""What the fixtures of further architectures start from: the tokenizer of `qwen2`, with fewer merges."""

GEMMA = replace(
    SMALL,
    tokenizer_style="gemma",
    tokenizer_class="GemmaTokenizerFast",
    chat_template=GEMMA_CHAT,
    vocab_size=400,
    eos="<eos>",
    generation_eos=("<eos>", "<end_of_turn>"),
    embedding_gain=0.05,
    config=SMALL.config | {"sliding_window": 24, "query_pre_attn_scalar": 12, "rms_norm_eps": 1e-6},
)


def small(name: str, model_type: str, config: dict[str, Any], **changes: Any) -> Fixture:
    """SMALL under another name, with parts of its configuration changed."""
    return replace(SMALL, name=name, model_type=model_type, config=SMALL.config | config, **changes)


def llama_rope(kind: str, seed: int, **parameters: Any) -> Fixture:
    scaling = {"rope_type": kind, **parameters}
    # Within max_position_embeddings dynamic NTK is no scaling at all, which is what its answers show.
    matters = () if kind == "dynamic" else ({"rope_scaling": None},)
    return small(f"llama-rope-{kind}", "llama", {"rope_scaling": scaling}, seed=seed, matters=matters)


FIXTURES = (
    LLAMA,
    replace(LLAMA, name="llama-external", external_data=True, template_in_tokenizer_config=True),
    replace(LLAMA, name="llama-eager", attention="eager"),
    Fixture(
        name="qwen3",
        model_type="qwen3",
        seed=2000,
        tokenizer_style="qwen",
        tokenizer_class="Qwen2TokenizerFast",
        chat_template=CHATML_THINKING,
        vocab_size=352,
        eos="<|fim_end|>",
        generation_eos=("<|im_end|>", "<|endoftext|>"),
        accelerate=False,
        config={
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
        },
        chat_kwargs=({}, {"enable_thinking": False}),
    ),
    Fixture(
        name="smollm2",
        model_type="llama",
        seed=3000,
        tokenizer_style="gpt2",
        tokenizer_class="GPT2TokenizerFast",
        chat_template=CHATML,
        vocab_size=336,
        eos="<|im_end|>",
        generation_eos=("<|im_end|>",),
        config={
            "hidden_size": 72,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rope_theta": 100_000.0,
            "rms_norm_eps": 1e-5,
        },
    ),
    Fixture(
        name="tinyllama",
        model_type="llama",
        seed=4000,
        tokenizer_style="sentencepiece",
        tokenizer_class="LlamaTokenizerFast",
        chat_template=ZEPHYR_CHAT,
        vocab_size=512,
        eos="</s>",
        generation_eos=("</s>",),
        config={
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
        },
    ),
    Fixture(
        name="mistral",
        model_type="mistral",
        seed=5000,
        tokenizer_style="metaspace",
        tokenizer_class="LlamaTokenizerFast",
        chat_template=MISTRAL_CHAT,
        vocab_size=448,
        eos="</s>",
        generation_eos=("</s>",),
        config={
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "tie_word_embeddings": False,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-5,
        },
    ),
    Fixture(
        name="qwen2",
        model_type="qwen2",
        seed=6000,
        tokenizer_style="qwen",
        tokenizer_class="Qwen2TokenizerFast",
        chat_template=CHATML_DEFAULT_SYSTEM,
        vocab_size=352,
        eos="<|fim_end|>",
        generation_eos=("<|im_end|>", "<|endoftext|>"),
        config={
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-6,
        },
    ),
    llama_rope(
        "llama3",
        40_000,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,  # wavelengths of 6, 20, 63 and more: kept, blended and scaled ones
    ),
    llama_rope("linear", 41_000, factor=4.0),
    llama_rope("yarn", 42_000, factor=4.0, original_max_position_embeddings=64),
    llama_rope("dynamic", 43_000, factor=2.0),
    small(
        "falcon3",  # a Llama with few wide heads
        "llama",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rope_theta": 1_000_042.0,
            "tie_word_embeddings": False,
        },
        seed=44_000,
    ),
    small(
        "smollm3",
        "smollm3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
        seed=45_000,
        matters=({"no_rope_layers": [1, 1, 1]},),
    ),
    small(
        "olmo2",
        "olmo2",
        {"pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0, "tie_word_embeddings": False},
        seed=46_000,
        embedding_gain=0.5,
    ),
    small(
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        seed=47_000,
        embedding_gain=0.3,
        matters=({"embedding_multiplier": 1.0}, {"attention_multiplier": 0.25}, {"residual_multiplier": 1.0}),
    ),
    replace(
        GEMMA,
        name="gemma2",
        model_type="gemma2",
        seed=48_000,
        attention="eager",  # sdpa, the exporter's default, leaves the softcap out
        config=GEMMA.config | {"attn_logit_softcapping": 8.0, "final_logit_softcapping": 25.0},
        matters=({"attn_logit_softcapping": None}, {"query_pre_attn_scalar": 16}),
        has_text_goldens=True,
    ),
    replace(
        GEMMA,
        name="gemma3",
        model_type="gemma3_text",
        seed=49_000,
        config=GEMMA.config
        | {
            "query_pre_attn_scalar": 100,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        matters=(
            {"rope_scaling": None},
            {"rope_local_base_freq": 1_000_000.0},
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"query_pre_attn_scalar": 16},
        ),
    ),
    replace(
        SMALL,
        name="falcon",  # one key head, attention and MLP side by side, queries, keys and values in one matrix
        model_type="falcon",
        seed=50_000,
        embedding_gain=0.2,
        attention_gain=2.5,
        config={
            "tie_word_embeddings": False,
            "hidden_size": 48,
            "ffn_hidden_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "alibi": False,
            "bias": False,
        },
    ),
    Fixture(
        name="phi3",
        model_type="phi3",
        seed=20000,
        tokenizer_style="sentencepiece",
        tokenizer_class="LlamaTokenizerFast",
        chat_template=ZEPHYR_CHAT,
        vocab_size=368,
        eos="</s>",
        generation_eos=("</s>",),
        config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "sliding_window": 40,
            "tie_word_embeddings": False,
        },
    ),
    Fixture(
        name="phi4-longrope",  # partial rotary embedding, scaled by length; the export is of the short factors
        model_type="phi3",
        seed=21000,
        tokenizer_style="qwen",
        tokenizer_class="Qwen2TokenizerFast",
        chat_template=CHATML,
        vocab_size=304,
        eos="<|im_end|>",
        generation_eos=("<|im_end|>", "<|endoftext|>"),
        config={
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 4 * CONTEXT_TOKENS_MAX,
            "original_max_position_embeddings": CONTEXT_TOKENS_MAX,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0],
                "long_factor": [1.0, 1.1, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0],
            },
        },
        matters=({"rope_scaling": None},),
    ),
    Fixture(
        name="stablelm",
        model_type="stablelm",
        seed=22000,
        tokenizer_style="gpt2",
        tokenizer_class="GPT2TokenizerFast",
        chat_template=CHATML,
        vocab_size=304,
        eos="<|im_end|>",
        generation_eos=("<|im_end|>",),
        config={
            "hidden_size": 48,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.25,  # 4 of 16: fewer than the kernel rotates by itself
            "use_qkv_bias": True,
            "tie_word_embeddings": False,
        },
        matters=({"partial_rotary_factor": 0.5},),
    ),
    Fixture(
        name="gpt-neox",
        model_type="gpt_neox",
        seed=23000,
        tokenizer_style="gpt2",
        tokenizer_class="GPT2TokenizerFast",
        chat_template=CHATML,
        vocab_size=304,
        eos="<|im_end|>",
        generation_eos=("<|im_end|>",),
        config={
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
        },
        attention_gain=2.0,
        matters=({"rotary_pct": 0.5}, {"use_parallel_residual": False}),
    ),
    Fixture(
        name="gpt2",
        model_type="gpt2",
        seed=24000,
        tokenizer_style="gpt2",
        tokenizer_class="GPT2TokenizerFast",
        chat_template=CHATML,
        vocab_size=304,
        eos="<|im_end|>",
        generation_eos=("<|im_end|>",),
        config={"n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 96},
        attention_gain=2.0,
        embedding_gain=0.5,
    ),
    Fixture(
        name="gpt-oss",
        model_type="gpt_oss",
        seed=25000,
        tokenizer_style="qwen",
        tokenizer_class="Qwen2TokenizerFast",
        chat_template=CHATML,
        vocab_size=304,
        eos="<|im_end|>",
        generation_eos=("<|im_end|>", "<|endoftext|>"),
        attention="eager",
        config={
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
            "tie_word_embeddings": False,
        },
        matters=(
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"num_experts_per_tok": 1},
            {"rope_scaling": None},
        ),
    ),
    Fixture(
        name="qwen3-moe",
        model_type="qwen3_moe",
        seed=26000,
        tokenizer_style="qwen",
        tokenizer_class="Qwen2TokenizerFast",
        chat_template=CHATML_THINKING,
        vocab_size=304,
        eos="<|fim_end|>",
        generation_eos=("<|im_end|>", "<|endoftext|>"),
        config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
        chat_kwargs=({}, {"enable_thinking": False}),
        matters=({"norm_topk_prob": False}, {"num_experts_per_tok": 1}),
    ),
    Fixture(
        name="mpt",  # ALiBi: a bias by distance in the scores, which no canonical attention has
        model_type="mpt",
        seed=9500,
        tokenizer_style="gpt2",
        tokenizer_class="GPT2TokenizerFast",
        chat_template=CHATML,
        vocab_size=320,
        eos="<|im_end|>",
        generation_eos=("<|im_end|>",),
        attention="eager",
        attention_gain=2.0,
        distinct_min=5,  # without angles a random model soon repeats itself
        has_text_goldens=False,  # smollm2 has them
        config={
            "d_model": 48,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": CONTEXT_TOKENS_MAX,
            "expansion_ratio": 2,
            "tie_word_embeddings": False,
        },
    ),
)


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def byte_level_tokenizer(vocab_size: int, *, style: str) -> Tokenizer:
    """A trained byte-level BPE; `gpt2` puts the special tokens first, `qwen` puts them last, as the real ones do."""
    tokenizer = Tokenizer(models.BPE())
    if style == "gpt2":
        digits = pre_tokenizers.Digits(individual_digits=True)
        split: pre_tokenizers.PreTokenizer = digits
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        specials = list(BYTE_LEVEL_SPECIALS)
        trained = list(BYTE_LEVEL_SPECIALS)
    else:
        tokenizer.normalizer = normalizers.NFC()
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        specials = list(QWEN_SPECIALS)
        trained = []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - (0 if trained else len(specials)),
        special_tokens=trained,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def sentencepiece_bpe(vocab_size: int, specials: tuple[str, ...] = SENTENCEPIECE_SPECIALS) -> models.BPE:
    """A BPE model laid out as SentencePiece does: control tokens, 256 bytes, merged pieces, single characters."""
    scratch = Tokenizer(models.BPE())
    scratch.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    reserved = len(specials) + 256
    # Only the frequent characters get a piece of their own: the others must fall back to bytes. They are chosen here,
    # since the trainer's own choice among equally frequent ones differs from run to run (seen with tokenizers 0.22.2).
    counts = Counter(character for line in CORPUS.splitlines() for character in "▁" + line.replace(" ", "▁"))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:SENTENCEPIECE_CHARACTERS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - reserved,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    scratch.train_from_iterator(CORPUS.splitlines(), trainer)
    state = json.loads(scratch.to_str())["model"]
    pieces = sorted(state["vocab"], key=state["vocab"].__getitem__)
    ordered = [piece for piece in pieces if len(piece) > 1] + [piece for piece in pieces if len(piece) == 1]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *ordered]
    merges = [(left, right) for left, right in state["merges"]]
    vocab = {name: index for index, name in enumerate(names)}
    return models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106


def sentencepiece_tokenizer(vocab_size: int, *, style: str) -> Tokenizer:
    """Llama-2 style (`sentencepiece`: a normalizer) or Mistral style (`metaspace`: a pre-tokenizer); both add BOS."""
    tokenizer = Tokenizer(sentencepiece_bpe(vocab_size))
    if style == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bos_id = SENTENCEPIECE_SPECIALS.index("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", bos_id)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SENTENCEPIECE_SPECIALS]
    )
    return tokenizer


def gemma_tokenizer(vocab_size: int) -> Tokenizer:
    """As Gemma ships it: blanks are written ▁ and stay at the end of the word before, nothing is prepended but BOS."""
    tokenizer = Tokenizer(sentencepiece_bpe(vocab_size, GEMMA_SPECIALS))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bos_id = GEMMA_SPECIALS.index("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", bos_id)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in GEMMA_SPECIALS])
    return tokenizer


def tokenizer_for(fixture: Fixture) -> transformers.PreTrainedTokenizerFast:
    """The trained tokenizer behind the transformers class which the real models of this architecture name."""
    common: dict[str, Any] = {
        "model_max_length": CONTEXT_TOKENS_MAX,
        "clean_up_tokenization_spaces": False,
        "chat_template": fixture.chat_template,
    }
    if fixture.tokenizer_style in {"gpt2", "qwen"}:
        backend = byte_level_tokenizer(fixture.vocab_size, style=fixture.tokenizer_style)
        eos = "<|im_end|>"
        common |= {"bos_token": "<|im_start|>" if fixture.tokenizer_style == "gpt2" else None}
        common |= {"eos_token": eos, "pad_token": "<|endoftext|>", "unk_token": None}
        if fixture.tokenizer_style == "gpt2":
            common |= {"unk_token": "<|endoftext|>"}
    elif fixture.tokenizer_style == "gemma":
        backend = gemma_tokenizer(fixture.vocab_size)
        common |= {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    else:
        backend = sentencepiece_tokenizer(fixture.vocab_size, style=fixture.tokenizer_style)
        common |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        if fixture.tokenizer_class == "LlamaTokenizerFast":
            common |= {"add_bos_token": True, "add_eos_token": False, "legacy": False}
    tokenizer = getattr(transformers, fixture.tokenizer_class)(tokenizer_object=backend, **common)
    if len(tokenizer) != fixture.vocab_size:
        message = f"{fixture.name}: the tokenizer has {len(tokenizer)} tokens, the model {fixture.vocab_size}"
        raise RuntimeError(message)
    return tokenizer


# ---- models --------------------------------------------------------------------------------------------------------


def eos_ids(fixture: Fixture, tokenizer: transformers.PreTrainedTokenizerFast) -> tuple[int, tuple[int, ...]]:
    """(the one id in config.json, the ids in generation_config.json)."""
    return (
        tokenizer.convert_tokens_to_ids(fixture.eos),
        tuple(tokenizer.convert_tokens_to_ids(token) for token in fixture.generation_eos),
    )


def model_for(fixture: Fixture, tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    """The model with eager attention and whatever weights its class starts with: call `randomise` next."""
    config_eos, generation_eos = eos_ids(fixture, tokenizer)
    bos = tokenizer.bos_token_id
    config = transformers.AutoConfig.for_model(
        fixture.model_type,
        vocab_size=fixture.vocab_size,
        bos_token_id=bos,
        eos_token_id=config_eos,
        **({"max_position_embeddings": CONTEXT_TOKENS_MAX} | fixture.config),
    )
    config.dtype = "float32"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    eos = generation_eos[0] if len(generation_eos) == 1 else list(generation_eos)
    pad = tokenizer.pad_token_id
    model.generation_config = transformers.GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    return model


EMBEDDINGS = ("embed_tokens", "lm_head", "word_embeddings", "embed_in", "embed_out", ".wte", ".wpe")
FUSED_QUERIES = ("query_key_value", ".c_attn", ".Wqkv")
BRANCH_ENDS = ("o_proj", "down_proj", "attention.dense", "dense_4h_to_h", ".c_proj", ".attn.out_proj")
"""Parts of parameter names: what every architecture calls its embeddings, and the last matrix of a branch."""


def randomise(
    model: transformers.PreTrainedModel,
    seed: int,
    eos: set[int],
    *,
    embedding_gain: float = 1.0,
    attention_gain: float = 1.0,
) -> None:
    """Give every parameter, norms and biases too, a random value such that context decides and choices are clear.

    The branches are loud against the embedding, so a tied head does not just repeat its input; query and key are loud
    enough for peaked attention, so a wrong mask or position changes tokens; the head rows of the end tokens are a
    little longer than the others, so that some answers meet one.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            uniform = torch.rand(parameter.shape, generator=generator)
            if "q_norm" in name or "k_norm" in name:
                value = 1.0 + uniform
            elif name.endswith("bias"):
                value = 0.3 * noise
            elif name.endswith("sinks"):
                value = 1.0 + noise
            elif "norm" in name or "ln_" in name:
                # The last norm makes up in the logits for a head that is as quiet as the embedding it is tied to.
                is_last = name == "model.norm.weight" and model.config.tie_word_embeddings
                value = (0.5 + uniform) / (embedding_gain if is_last else 1.0)
            elif any(part in name for part in EMBEDDINGS):
                value = (1.0 if "lm_head" in name else embedding_gain) * noise
            else:
                branch_gain = 8.0 if model.config.tie_word_embeddings else 3.0
                gain = branch_gain if any(part in name for part in BRANCH_ENDS) else 1.4
                gain *= attention_gain if any(part in name for part in FUSED_QUERIES) else 1.0
                value = gain * noise / parameter.shape[0 if ".c_" in name else 1] ** 0.5  # GPT-2 keeps [in, out]
            parameter.copy_(value)
        head = model.get_output_embeddings().weight
        head[sorted(eos)] *= 1.25


@dataclass(frozen=True, slots=True)
class Greedy:
    """One greedy answer of transformers: ids, the narrowest top1 - top2 logit, the logits after the prompt `[V]`."""

    ids: list[int]
    gap_min: float
    prompt_logits: list[float]


def greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> Greedy:
    """Greedy decoding of GREEDY_TOKENS ids through transformers' own cache, end tokens ignored."""
    ids: list[int] = []
    gaps: list[float] = []
    prompt_logits: list[float] = []
    past = None
    feed = torch.tensor([prompt])
    with torch.no_grad():
        for step in range(GREEDY_TOKENS):
            out = model(input_ids=feed, past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits = out.logits[0, -1]
            if step == 0:
                prompt_logits = logits.tolist()
            top = torch.topk(logits, 2)
            ids.append(int(top.indices[0]))
            gaps.append(float(top.values[0] - top.values[1]))
            feed = torch.tensor([[ids[-1]]])
    return Greedy(ids, min(gaps), prompt_logits)


def prompts_for(fixture: Fixture, tokenizer: transformers.PreTrainedTokenizerFast) -> list[list[int]]:
    """One prompt of each length in PROMPT_TOKENS: text of the corpus and random plain ids by turns."""
    generator = np.random.default_rng(fixture.seed)
    text = tokenizer(CORPUS, add_special_tokens=False).input_ids
    special = set(tokenizer.all_special_ids)
    plain = [index for index in range(fixture.vocab_size) if index not in special]
    bos = tokenizer.bos_token_id
    prompts = []
    for index, length in enumerate(PROMPT_TOKENS):
        start = 40 * index
        body = text[start : start + length] if index % 2 else generator.choice(plain, length).tolist()
        prompts.append([bos, *body[1:]] if bos is not None else body)
    return prompts


def verdict(answers: list[Greedy], groups: list[set[int]]) -> str:
    """Why these answers make poor goldens; empty if they make good ones. `groups` are the sets of end ids to be met."""
    ids = [answer.ids for answer in answers]
    union = set().union(*groups)
    if len({tuple(one[-8:]) for one in ids}) < len(ids):
        return "two prompts have the same answer"
    for group in groups:
        if not any(group & set(one[2:]) for one in ids):
            return "no answer meets an end token"
    if sum(1 for one in ids if not union & set(one)) < len(ids) // 3:
        return "nearly every answer meets an end token"
    return ""


def search(
    fixture: Fixture, tokenizer: transformers.PreTrainedTokenizerFast
) -> tuple[int, transformers.PreTrainedModel, list[list[int]], list[Greedy]]:
    """The first seed from `fixture.seed` on whose answers are robust goldens."""
    config_eos, generation_eos = eos_ids(fixture, tokenizer)
    groups = [{config_eos}, set(generation_eos)]
    prompts = prompts_for(fixture, tokenizer)
    model = model_for(fixture, tokenizer)
    for seed in range(fixture.seed, fixture.seed + SEED_TRIES_MAX):
        randomise(
            model,
            seed,
            set().union(*groups),
            embedding_gain=fixture.embedding_gain,
            attention_gain=fixture.attention_gain,
        )
        answers = []
        for prompt in prompts:
            answers.append(greedy(model, prompt))
            if answers[-1].gap_min < GREEDY_GAP_MIN or len(set(answers[-1].ids)) < fixture.distinct_min:
                break
        else:
            why = verdict(answers, groups) or window_verdict(model, prompts, answers)
            why = why or matters_verdict(fixture, model, prompts, answers)
            print(f"{fixture.name}: seed {seed}: {why or 'taken'}")
            if not why:
                return seed, model, prompts, answers
    message = f"{fixture.name}: no seed of {SEED_TRIES_MAX} makes good goldens"
    raise RuntimeError(message)


def window_verdict(model: transformers.PreTrainedModel, prompts: list[list[int]], answers: list[Greedy]) -> str:
    """Why the answers do not show whether the sliding window is applied; empty if they do, or if there is none."""
    window = getattr(model.config, "sliding_window", None)
    if window is None:
        return ""
    # A window as long as the context hides nothing; without one, layers that are named local could not be made.
    other = with_config(model, {"sliding_window": CONTEXT_TOKENS_MAX})
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(prompt) > window and greedy(other, prompt).ids == answer.ids:
            return "an answer is the same without the sliding window"
    return ""


def matters_verdict(
    fixture: Fixture, model: transformers.PreTrainedModel, prompts: list[list[int]], answers: list[Greedy]
) -> str:
    """Why the answers do not show whether what the architecture adds is there; empty if they do."""
    for override in fixture.matters:
        other = with_config(model, override)
        for prompt, answer in zip(prompts, answers, strict=True):
            if len(prompt) >= MATTERS_TOKENS_MIN and greedy(other, prompt).ids == answer.ids:
                return f"an answer is the same with {override}"
    return ""


def with_config(model: transformers.PreTrainedModel, override: dict[str, Any]) -> transformers.PreTrainedModel:
    """The same weights under another configuration."""
    config = type(model.config)(**(model.config.to_dict() | override))
    other = type(model)._from_config(config, attn_implementation="eager").eval()
    other.load_state_dict(model.state_dict())
    return other


# ---- goldens -------------------------------------------------------------------------------------------------------


def chat_goldens(fixture: Fixture, tokenizer: transformers.PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Chat cases as transformers renders and tokenizes them; one that its template refuses carries the message."""
    goldens: list[dict[str, Any]] = []
    for (messages, add_generation_prompt), kwargs in itertools.product(CHAT_CASES, fixture.chat_kwargs):
        golden: dict[str, Any] = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "kwargs": kwargs,
        }
        render = {"add_generation_prompt": add_generation_prompt, **kwargs}
        try:
            golden["text"] = tokenizer.apply_chat_template(messages, tokenize=False, **render)
            golden["ids"] = tokenizer.apply_chat_template(messages, tokenize=True, **render)
        except Exception as error:  # noqa: BLE001 - jinja2's TemplateError, raised by the template
            golden["error"] = str(error)
        goldens.append(golden)
    return goldens


def encode_goldens(tokenizer: transformers.PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Texts to ids, with and without what the tokenizer adds by itself."""
    return [
        {
            "text": text,
            "ids": tokenizer(text).input_ids,
            "ids_without_special": tokenizer(text, add_special_tokens=False).input_ids,
        }
        for text in (*ENCODE_TEXTS, *CORPUS.splitlines())
    ]


def decode_goldens(tokenizer: transformers.PreTrainedTokenizerFast, answers: list[Greedy]) -> list[dict[str, Any]]:
    """Ids to text: whole encodings, encodings cut inside a character, and the answers (mostly invalid UTF-8)."""
    whole = [tokenizer(text).input_ids for text in ENCODE_TEXTS if text]
    cut = [tokenizer(text).input_ids[:-1] for text in ("emoji 😀", "unseen 𝔘", "你好 ௵")]
    return [
        {
            "ids": ids,
            "text": tokenizer.decode(ids, skip_special_tokens=True),
            "text_with_special": tokenizer.decode(ids, skip_special_tokens=False),
        }
        for ids in (*whole, *cut, *(answer.ids for answer in answers))
    ]


def goldens_for(
    fixture: Fixture,
    tokenizer: transformers.PreTrainedTokenizerFast,
    seed: int,
    prompts: list[list[int]],
    answers: list[Greedy],
) -> dict[str, Any]:
    """Everything a test compares with, as plain JSON values."""
    config_eos, generation_eos = eos_ids(fixture, tokenizer)
    made_with = {
        module.__name__: module.__version__.partition("+")[0] for module in (torch, transformers, tokenizers, onnx)
    }
    return {
        "format": FORMAT,
        "made_with": made_with,
        "exporter": fixture.exporter,
        "architecture": fixture.model_type,
        "seed": seed,
        "context_tokens_max": CONTEXT_TOKENS_MAX,
        "sliding_window": fixture.config.get("sliding_window"),
        "eos_token_ids": sorted({config_eos, *generation_eos}),
        "gap_min": round(min(answer.gap_min for answer in answers), 5),
        "prompts": [
            {"prompt_ids": prompt, "greedy_ids": answer.ids, "gap_min": round(answer.gap_min, 5)}
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
        "logits": {
            "prompt_index": LOGITS_PROMPT_INDEX,
            "values": [round(value, 5) for value in answers[LOGITS_PROMPT_INDEX].prompt_logits],
        },
    } | (text_goldens_for(fixture, tokenizer, answers) if fixture.has_text_goldens else {})


def text_goldens_for(
    fixture: Fixture, tokenizer: transformers.PreTrainedTokenizerFast, answers: list[Greedy]
) -> dict[str, Any]:
    return {
        "chat": chat_goldens(fixture, tokenizer),
        "encode": encode_goldens(tokenizer),
        "decode": decode_goldens(tokenizer, answers),
    }


def write_goldens(path: Path, goldens: dict[str, Any]) -> None:
    """One line for each item of each list, so that a change is readable in a diff."""
    lines = []
    for key, value in goldens.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value)
            lines.append(f"{json.dumps(key)}: [\n  {items}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


# ---- export --------------------------------------------------------------------------------------------------------


def export(fixture: Fixture, source: Path, output: Path) -> None:
    """Write what `optimum-cli export onnx --task text-generation-with-past` writes for `source`, a saved model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation=fixture.attention)
    model.config.use_cache = True
    with mock.patch("optimum.exporters.onnx.base.is_accelerate_available", return_value=fixture.accelerate):
        onnx_export_from_model(model, output, task="text-generation-with-past", do_validation=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(output, save_jinja_files=not fixture.template_in_tokenizer_config)
    if fixture.template_in_tokenizer_config:
        (output / "chat_template.jinja").unlink(missing_ok=True)
    if fixture.external_data:
        graph = onnx.load(output / "model.onnx")
        (output / "model.onnx").unlink()
        onnx.save(
            graph,
            output / "model.onnx",
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location="model.onnx_data",
            size_threshold=100,
            convert_attribute=True,
        )
        (output / "model.onnx_data").chmod(0o644)


def check_clean(output: Path) -> None:
    """Raise if a file of the fixture names a place on this machine, or if the fixture is too large."""
    traces = (b"/home/", b"/work/", b"/tmp/", b"/usr/", b"site-packages", b"http://", b"https://", b".py")
    for path in sorted(output.iterdir()):
        found = [trace.decode() for trace in traces if trace in path.read_bytes()]
        if found:
            message = f"{path.name} contains {found}"
            raise RuntimeError(message)
    size = sum(path.stat().st_size for path in output.iterdir())
    if size > FIXTURE_BYTES_MAX:
        message = f"{output.name}: {size} bytes, at most {FIXTURE_BYTES_MAX}"
        raise RuntimeError(message)


def make(fixture: Fixture) -> None:
    """Write one fixture directory anew, and replay it."""
    torch.set_num_threads(1)  # one order of additions
    output = EXPORTS / fixture.name
    tokenizer = tokenizer_for(fixture)
    seed, model, prompts, answers = search(fixture, tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        source, fresh = Path(scratch, "source"), Path(scratch, fixture.name)
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        export(fixture, source, fresh)
        write_goldens(fresh / "goldens.json", goldens_for(fixture, tokenizer, seed, prompts, answers))
        check_clean(fresh)
        check(fresh)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(fresh, output)


# ---- replay on ONNX Runtime ----------------------------------------------------------------------------------------


def run(session: onnxruntime.InferenceSession, ids: list[int], past: dict[str, np.ndarray]) -> tuple[np.ndarray, Any]:
    """Run `ids` after `past`; return the logits of the last position and the new past, both by export names."""
    before = next(iter(past.values())).shape[2]
    total = before + len(ids)
    feeds = {
        "input_ids": np.array([ids], np.int64),
        "attention_mask": np.ones((1, total), np.int64),
        "position_ids": np.arange(before, total, dtype=np.int64)[None],
        **past,
    }
    names = [value.name for value in session.get_outputs()]
    known = {value.name for value in session.get_inputs()}
    outputs = dict(zip(names, session.run(names, {k: v for k, v in feeds.items() if k in known}), strict=True))
    logits = outputs.pop("logits")[0, -1]
    return logits, {name.replace("present", "past_key_values"): value for name, value in outputs.items()}


def check_tokenizer(directory: Path, goldens: dict[str, Any]) -> None:
    """Raise unless tokenizer.json alone, without transformers, encodes and decodes as the goldens say."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for golden in goldens.get("encode", ()):
        ids = tokenizer.encode(golden["text"]).ids
        plain = tokenizer.encode(golden["text"], add_special_tokens=False).ids
        if (ids, plain) != (golden["ids"], golden["ids_without_special"]):
            message = f"{directory.name}: {golden['text']!r} is encoded as {ids}, {plain}"
            raise RuntimeError(message)
    for golden in goldens.get("chat", ()):
        if "ids" in golden and tokenizer.encode(golden["text"], add_special_tokens=False).ids != golden["ids"]:
            message = f"{directory.name}: the rendered chat {golden['text']!r} is encoded otherwise"
            raise RuntimeError(message)
    for golden in goldens.get("decode", ()):
        texts = tuple(tokenizer.decode(golden["ids"], skip_special_tokens=skip) for skip in (True, False))
        if texts != (golden["text"], golden["text_with_special"]):
            message = f"{directory.name}: {golden['ids']} is decoded as {texts}"
            raise RuntimeError(message)


def check(directory: Path) -> None:
    """Raise unless the export repeats its goldens, both step by step with its past and from the whole history."""
    goldens = json.loads((directory / "goldens.json").read_text(encoding="utf-8"))
    check_tokenizer(directory, goldens)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(directory / "model.onnx", options, providers=["CPUExecutionProvider"])
    empty = {
        value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    worst = 0.0
    for index, golden in enumerate(goldens["prompts"]):
        history, feed, past = list(golden["prompt_ids"]), list(golden["prompt_ids"]), empty
        for expected in golden["greedy_ids"]:
            stepped, past = run(session, feed, past)
            whole, _ = run(session, history, empty)
            if index == goldens["logits"]["prompt_index"] and feed == history:
                worst = max(worst, float(np.abs(stepped - np.array(goldens["logits"]["values"])).max()))
            worst = max(worst, float(np.abs(stepped - whole).max()))
            if not int(stepped.argmax()) == int(whole.argmax()) == expected:
                message = f"{directory.name}: prompt {index}: {stepped.argmax()}, {whole.argmax()}, not {expected}"
                raise RuntimeError(message)
            history.append(expected)
            feed = [expected]
    if worst > ORT_LOGIT_TOLERANCE:
        message = f"{directory.name}: logits differ by {worst}"
        raise RuntimeError(message)
    print(f"{directory.name}: goldens repeated, worst logit difference {worst:.1e}")


def main(arguments: list[str]) -> int:
    """Make, or with --check only replay, the named fixtures or all of them."""
    parser = argparse.ArgumentParser(description="Make the export fixtures of tests/fixtures/exports.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(fixture.name for fixture in FIXTURES))
    parser.add_argument("--check", action="store_true", help="replay the fixtures on ONNX Runtime, write nothing")
    options = parser.parse_args(arguments)
    by_name = {fixture.name: fixture for fixture in FIXTURES}
    unknown = sorted(set(options.names) - set(by_name))
    if unknown:
        parser.error(f"no such fixture: {', '.join(unknown)}")
    for name in options.names or by_name:
        if options.check:
            check(EXPORTS / name)
        else:
            make(by_name[name])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
