"""What sentence-transformers wrote about an embedding model: how token vectors become one, length, prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from residentd_build.foreign import cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residentd.models.encoder import Pooling
    from residentd_build.encoders.reading import Reader

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
MODULES_MAX = 16
PROMPTS_MAX = 256
PROMPT_CHARS_MAX = 4096
FLAGS: tuple[tuple[str, Pooling], ...] = (
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
    ("pooling_mode_weightedmean_tokens", "weighted_mean"),
    ("pooling_mode_lasttoken", "last"),
)
"""1_Pooling/config.json's names, in the order in which sentence-transformers puts their vectors side by side."""
NAMES = {"weightedmean": "weighted_mean", "lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
RESTORE = "Restore the file from the model's own repository"
IN_THE_GRAPH = (
    "Export it with `optimum-cli export onnx --library sentence_transformers`, which puts all modules into the graph"
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """`modules`: class names of modules.json, last parts only; None without the file."""

    modules: tuple[str, ...] | None = None
    pooling: tuple[Pooling, ...] = ()
    normalise: bool = False
    tokens_max: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] | None = None
    prompt_default: str = ""
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"


def modules_of(reader: Reader) -> tuple[tuple[str, str], ...] | None:
    """Class name and folder of each module, in their order; None without modules.json."""
    entries: list[Any] = reader.json(MODULES_FILE, list)
    if not entries:
        return None
    found = []
    for entry in entries[:MODULES_MAX]:
        kind = entry.get("type") if isinstance(entry, dict) else None
        path = entry.get("path", "") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(path, str):
            reader.add(f"an entry is {cut(json.dumps(entry))}; type and path are needed", MODULES_FILE, RESTORE)
            return ()
        found.append((kind.rpartition(".")[2], path))
    return tuple(found)


def read_sentence(reader: Reader, modules: Sequence[tuple[str, str]] | None, *, whole_graph: bool) -> Sentence:
    """`whole_graph`: the graph gives sentence vectors, so what the modules do is in it."""
    names = None if modules is None else tuple(name for name, _ in modules)
    pooling: tuple[Pooling, ...] = ()
    if modules and not whole_graph:
        pooling = _pooling_of(reader, modules)
        _check_order(reader, names or ())
    length, lowercase = _length(reader)
    prompts, default, similarity = _prompts(reader)
    return Sentence(
        modules=names,
        pooling=pooling,
        normalise="Normalize" in (names or ()) and not whole_graph,
        tokens_max=length,
        lowercase=lowercase,
        prompts=prompts,
        prompt_default=default,
        similarity=similarity,
    )


def _check_order(reader: Reader, names: Sequence[str]) -> None:
    """Transformer, Pooling, perhaps Normalize: all else would have to be in the graph."""
    if tuple(names) not in {("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize")}:
        what = (
            f"its modules are {', '.join(cut(name, 40) for name in names)}; only Transformer, Pooling and Normalize, "
        )
        reader.add(f"{what}in this order, can follow a graph that gives token vectors", MODULES_FILE, IN_THE_GRAPH)


def _pooling_of(reader: Reader, modules: Sequence[tuple[str, str]]) -> tuple[Pooling, ...]:
    folder = next((path for name, path in modules if name == "Pooling"), None)
    if folder is None:
        return ()
    where = f"{folder}/config.json" if folder else "config.json"
    config: dict[str, Any] = reader.json(where, needed="Copy it from the model's repository: it says how to pool")
    if not config:
        return ()
    if config.get("include_prompt") is False:
        reader.add("it leaves the prompt out of the pooling, which is not supported", where, IN_THE_GRAPH)
    modes = tuple(mode for flag, mode in FLAGS if config.get(flag) is True) or _named_modes(config.get("pooling_mode"))
    if not modes:
        reader.add(f"it names no pooling that is known ({cut(json.dumps(config))})", where, RESTORE)
    return modes


def _named_modes(value: object) -> tuple[Pooling, ...]:
    """Newer versions write names instead of flags."""
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    spelled = {NAMES.get(name, name) for name in names if isinstance(name, str)}
    return tuple(mode for _, mode in FLAGS if mode in spelled)


def _length(reader: Reader) -> tuple[int | None, bool]:
    """max_seq_length, and whether texts are lowered before the tokenizer."""
    for name in LENGTH_FILES:
        config: dict[str, Any] = reader.json(name)
        if not config:
            continue
        length = config.get("max_seq_length")
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            reader.add(f"max_seq_length is {cut(json.dumps(length))}; a number of tokens is needed", name, RESTORE)
            length = None
        return length, config.get("do_lower_case") is True
    return None, False


def _prompts(reader: Reader) -> tuple[dict[str, str], str, Any]:
    config: dict[str, Any] = reader.json(PROMPTS_FILE)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    similarity = config.get("similarity_fn_name") or "cosine"
    is_map = isinstance(prompts, dict) and len(prompts) <= PROMPTS_MAX
    if not is_map or not all(isinstance(text, str) and len(text) <= PROMPT_CHARS_MAX for text in prompts.values()):
        what = f"prompts must be at most {PROMPTS_MAX} texts by name, of at most {PROMPT_CHARS_MAX:,} characters"
        reader.add(what, PROMPTS_FILE, RESTORE)
        return {}, "", "cosine"
    if default and default not in prompts:
        reader.add(f"default_prompt_name is {cut(json.dumps(default))}, which is no prompt", PROMPTS_FILE, RESTORE)
        default = ""
    if similarity not in SIMILARITIES:
        what = f"similarity_fn_name is {cut(json.dumps(similarity))}; {', '.join(SIMILARITIES)} are known"
        reader.add(what, PROMPTS_FILE, RESTORE)
        similarity = "cosine"
    return prompts, default, similarity
