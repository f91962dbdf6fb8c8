"""What sentence-transformers wrote about an embedding model: how token vectors become one, length, prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from residentd_build.foreign import cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residentd.models.encoder import Pooling
    from residentd_build.reading import Reader

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
TRANSFORMER, POOLING, NORMALISE = ORDER = ("Transformer", "Pooling", "Normalize")
"""All that can be computed after a graph, or that the graph stands for."""
OWN_PACKAGES = frozenset({"", "sentence_transformers"})
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
class Module:
    """An entry of modules.json. `name` is the class's, with its package where that is nobody's whom we know."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class Sentence:
    pooling: tuple[Pooling, ...] = ()
    normalise: bool = False
    tokens_max: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] | None = None
    prompt_default: str = ""
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"


def modules_of(reader: Reader) -> tuple[Module, ...] | None:
    """In their order; None without modules.json, none where it is wrong."""
    entries: list[Any] = reader.json(MODULES_FILE, list)
    if not entries:
        return () if MODULES_FILE in reader.directory.names("") else None
    found = []
    for entry in entries[: MODULES_MAX + 1]:
        kind = entry.get("type") if isinstance(entry, dict) else None
        path = entry.get("path", "") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(path, str):
            reader.add(f"an entry is {cut(json.dumps(entry))}; type and path are needed", MODULES_FILE, RESTORE)
            return ()
        found.append(Module(_name_of(kind), path))
    if len(found) > MODULES_MAX:
        reader.add(f"it has {len(entries):,} modules; at most {MODULES_MAX} are read", MODULES_FILE, RESTORE)
        return ()
    return tuple(found)


def _name_of(kind: str) -> str:
    """Whatever class runs the transformer, the graph stands for it; of the others only the library's own are known."""
    package, _, name = kind.rpartition(".")
    return name if name == TRANSFORMER or package.partition(".")[0] in OWN_PACKAGES else kind


def read_sentence(reader: Reader, modules: Sequence[Module] | None, *, whole_graph: bool) -> Sentence:
    """`whole_graph`: the graph gives sentence vectors, so what the modules do is in it."""
    names = tuple(module.name for module in modules or ())
    pooling: tuple[Pooling, ...] = ()
    if modules is not None and not whole_graph:
        pooling = _pooling_of(reader, modules)
        _check_order(reader, names)
    length, lowercase = _length(reader, modules or ())
    prompts, default, similarity = _prompts(reader)
    return Sentence(
        pooling=pooling,
        normalise=NORMALISE in names and not whole_graph,
        tokens_max=length,
        lowercase=lowercase,
        prompts=prompts,
        prompt_default=default,
        similarity=similarity,
    )


def refuse_modules(reader: Reader, modules: Sequence[Module] | None) -> None:
    """A graph that gives logits has its head in it: what else should follow the transformer would be left out."""
    others = [cut(module.name, 40) for module in modules or () if module.name != TRANSFORMER]
    if others:
        what = f"it has the modules {', '.join(others)}, and nothing is computed after a graph that gives logits"
        remedy = "Export the model with them in its graph, or remove the file if the logits are what it answers"
        reader.add(what, MODULES_FILE, remedy)


def _check_order(reader: Reader, names: Sequence[str]) -> None:
    """Transformer, Pooling, perhaps Normalize: all else would have to be in the graph."""
    if tuple(names) in {ORDER, ORDER[:2]} or reader.is_wrong(MODULES_FILE):
        return
    listed = ", ".join(cut(name, 40) for name in names) or "none"
    others = [cut(name, 40) for name in names if name not in ORDER]
    without = f", and nothing here computes {', '.join(others)}" if others else ""
    what = f"its modules are {listed}{without}; only {', '.join(ORDER[:2])} and {NORMALISE}, in this order, "
    reader.add(f"{what}can follow a graph that gives token vectors", MODULES_FILE, IN_THE_GRAPH)


def _pooling_of(reader: Reader, modules: Sequence[Module]) -> tuple[Pooling, ...]:
    folder = next((module.folder for module in modules if module.name == POOLING), None)
    if folder is None:
        return ()
    where = f"{folder}/config.json" if folder else "config.json"
    config: dict[str, Any] = reader.json(where, needed="Copy it from the model's repository: it says how to pool")
    if reader.is_wrong(where):
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


def _length(reader: Reader, modules: Sequence[Module]) -> tuple[int | None, bool]:
    """max_seq_length, and whether texts are lowered before the tokenizer: from the transformer's own folder."""
    folder = next((module.folder for module in modules if module.name == TRANSFORMER), "")
    for name in (f"{folder}/{file}" if folder else file for file in LENGTH_FILES):
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
