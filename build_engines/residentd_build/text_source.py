"""The text side of an export: tokenizer, chat template, special tokens, sampling defaults."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tokenizers import Tokenizer

from residentd.errors import CallerError, Finding, OperatorError
from residentd.models.manifest import SamplingDefaults
from residentd.sampling import validate as validate_sampling
from residentd.text import tokenizer as served
from residentd.text.chat import ChatTemplate
from residentd.text.detokenizer import table_for
from residentd.types import ChatMessage, SamplingParams
from residentd_build.foreign import cut, token_id_of
from residentd_build.source import (
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TextSource,
)

Json = Mapping[str, Any]

REBUILDS_POST_PROCESSOR = ("Llama", "CodeLlama", "Gemma", "Cohere")
"""Tokenizer classes of transformers whose add_bos_token overrides what tokenizer.json says (update_post_processor)."""
CONVERSATION = (
    ChatMessage("user", "Hello"),
    ChatMessage("assistant", "Good evening."),
    ChatMessage("user", "How high is the lighthouse?"),
)
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
WHOLE_FIELDS = frozenset({"top_k"})
SHORT_CHARS_MAX = 300
FIX_TEMPLATE = "Put a working template into chat_template.jinja, or remove the template to serve plain prompts"
FIX_TOKENIZER = "Save the tokenizer again with transformers' save_pretrained, from the model's own tokenizer"


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Parsed files of a source directory; an absent optional file is an empty mapping."""

    config: Json
    generation: Json
    tokenizer_config: Json
    special_tokens: Json
    tokenizer_json: bytes
    chat_template_file: str | None


def read_text(files: TextFiles) -> tuple[TextSource | None, list[Finding], int]:
    """The text side, what is wrong with it, and the highest token id plus one."""
    tokenizer, findings = _generating(files.tokenizer_json)
    if tokenizer is None:
        return None, findings, 0
    vocab = ids_of(tokenizer)
    bos_token, bos_id = _special(files, tokenizer, "bos", findings)
    eos_token, eos_id = _special(files, tokenizer, "eos", findings)
    eos_ids = _eos_ids(files, eos_id, findings)
    template, where = files.chat_template_file, CHAT_TEMPLATE_FILE
    if template is None:
        template, where = _template_in_config(files.tokenizer_config, findings), TOKENIZER_CONFIG_FILE
    if template is not None:
        findings += _try_template(template, {"bos_token": bos_token, "eos_token": eos_token}, where)
    text = TextSource(
        tokenizer_json=files.tokenizer_json,
        chat_template=template,
        bos_id=bos_id,
        bos_token=bos_token,
        eos_token=eos_token or (tokenizer.id_to_token(eos_ids[0]) or "" if eos_ids else ""),
        adds_bos=bos_id is not None and _adds_bos(files.tokenizer_config, tokenizer, bos_id),
        eos_ids=eos_ids,
    )
    return text, findings, vocab


def read_sampling(generation: Json) -> tuple[SamplingDefaults, list[Finding]]:
    """generation_config.json's defaults. do_sample false means greedy; what it leaves out is off."""
    findings: list[Finding] = []
    found: dict[str, Any] = {}
    for name in SAMPLING_FIELDS:
        value = generation.get(name)
        if name == "top_k" and value == -1:
            value = 0  # both mean off
        problem = None if value is None else _sampling_problem(name, value)
        if problem is not None:
            findings.append(Finding(problem, GENERATION_FILE, "Correct it, or remove it to have it off"))
        elif value is not None:
            found[name] = value if name in WHOLE_FIELDS else float(value)
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingDefaults(**found), findings


def check_stops(eos_ids: tuple[int, ...], vocab: int) -> list[Finding]:
    """Every request stops at all of these, so no more than one request may have."""
    try:
        validate_sampling(SamplingParams(tokens_max=1, stop_ids=frozenset(eos_ids)), vocab)
    except CallerError as error:
        what = f"eos_token_id and the tokenizer together end answers at {len(eos_ids):,} tokens: {error}"
        return [Finding(what, GENERATION_FILE, "Name only the tokens that end an answer")]
    return []


def _sampling_problem(name: str, value: object) -> str | None:
    """Why `value` cannot be every request's default: what a request may ask for is the limit."""
    is_whole = name in WHOLE_FIELDS
    is_number = isinstance(value, int) or (isinstance(value, float) and not is_whole)
    if isinstance(value, bool) or not is_number:
        return f"{name} is {cut(json.dumps(value))}; a {'whole number' if is_whole else 'number'} is expected"
    try:
        given: dict[str, Any] = {name: value}
        validate_sampling(SamplingParams(tokens_max=1, **given), 1)
    except CallerError as error:
        return str(error).removesuffix(".")
    return None


def read_tokenizer(data: bytes) -> tuple[served.Tokenizer | None, list[Finding]]:
    """Loaded as the daemon loads it: what it would refuse is a finding now."""
    try:
        loaded = served.Tokenizer(data)
    except OperatorError as error:
        return None, [Finding(_short(error), TOKENIZER_FILE, FIX_TOKENIZER)]
    dropout = getattr(loaded.inner.model, "dropout", None)
    if dropout:
        what = f"the model's dropout is {dropout:g}: it encodes one text differently each time, as only training wants"
        return loaded, [Finding(what, TOKENIZER_FILE, "Set dropout to null in it")]
    return loaded, []


def ids_of(tokenizer: Tokenizer) -> int:
    """The highest token id plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _generating(data: bytes) -> tuple[Tokenizer | None, list[Finding]]:
    """A tokenizer whose ids can also be made text."""
    loaded, findings = read_tokenizer(data)
    if loaded is None:
        return None, findings
    try:
        table_for(loaded)
    except OperatorError as error:
        return None, [*findings, Finding(_short(error), TOKENIZER_FILE, FIX_TOKENIZER)]
    return loaded.inner, findings


def _try_template(template: str, tokens: Mapping[str, str], where: str) -> list[Finding]:
    """Compiled and tried out as the daemon does it. That it refuses a conversation is its right."""
    variables = {name: token for name, token in tokens.items() if token}
    try:
        compiled = ChatTemplate(template, variables, now=datetime.now, clock=time.monotonic)
        with contextlib.suppress(CallerError):
            compiled.render(CONVERSATION)
    except OperatorError as error:
        return [Finding(_short(error), where, FIX_TEMPLATE)]
    return []


def _special(files: TextFiles, tokenizer: Tokenizer, name: str, findings: list[Finding]) -> tuple[str, int | None]:
    """Text and id of the BOS or EOS token: by the tokenizer's configuration, else by the model's."""
    for where, mapping in (
        (TOKENIZER_CONFIG_FILE, files.tokenizer_config),
        (SPECIAL_TOKENS_FILE, files.special_tokens),
    ):
        token = mapping.get(f"{name}_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        if content is None:
            continue
        index = tokenizer.token_to_id(content) if isinstance(content, str) else None
        if index is None:
            findings.append(
                Finding(f"{name}_token {cut(repr(content))} is not in the tokenizer's vocabulary", where, FIX_TOKENIZER)
            )
            return "", None
        return content, index
    for where, mapping in ((CONFIG_FILE, files.config), (GENERATION_FILE, files.generation)):
        value = mapping.get(f"{name}_token_id")
        index = token_id_of(value)
        if index is None and value is not None and name == "bos":  # EOS may be a list: _eos_ids judges it
            what = f"bos_token_id is {cut(json.dumps(value))}, which is no token id"
            findings.append(Finding(what, where, "Name the id of the token that begins a text, or remove it"))
        token = None if index is None else tokenizer.id_to_token(index)
        if token is not None:
            return str(token), index
    return "", None


def _eos_ids(files: TextFiles, named: int | None, findings: list[Finding]) -> tuple[int, ...]:
    """The union of every configuration that names an end of sequence."""
    found = set() if named is None else {named}
    for where, mapping in ((CONFIG_FILE, files.config), (GENERATION_FILE, files.generation)):
        value = mapping.get("eos_token_id")
        for entry in value if isinstance(value, list) else [] if value is None else [value]:
            index = token_id_of(entry)
            if index is not None:
                found.add(index)
            else:
                what = f"eos_token_id holds {cut(json.dumps(entry))}, which is no token id"
                findings.append(Finding(what, where, "Name the ids of the tokens that end an answer"))
    if not found:
        what = "no configuration names an end-of-sequence token, so no answer would ever end by itself"
        findings.append(
            Finding(what, GENERATION_FILE, "Add eos_token_id with the ids of the tokens that end an answer")
        )
    return tuple(sorted(found))


def _template_in_config(config: Json, findings: list[Finding]) -> str | None:
    """A string, or a list of named templates of which `default` is the chat's."""
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named = {
        entry["name"]: entry["template"]
        for entry in (template if isinstance(template, list) else [])
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if "default" in named:
        return str(named["default"])
    what = f"chat_template has no template named default (it has {', '.join(sorted(named)) or 'none'})"
    findings.append(Finding(what, TOKENIZER_CONFIG_FILE, "Put the chat's template into chat_template.jinja"))
    return None


def _adds_bos(config: Json, tokenizer: Tokenizer, bos_id: int) -> bool:
    """What the tokenizer's own library would do with a plain prompt."""
    explicit = config.get("add_bos_token")
    if isinstance(explicit, bool) and str(config.get("tokenizer_class", "")).startswith(REBUILDS_POST_PROCESSOR):
        return explicit
    return bool(tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos_id])


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:SHORT_CHARS_MAX] if str(error) else type(error).__name__
