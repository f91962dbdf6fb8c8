"""Tiny tokenizers of every kind that exports come with, and the recorded goldens of the real-export fixtures."""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hypothesis import settings
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Inner

from residentd.models import manifest
from residentd.text.chat import ChatTemplate
from residentd.text.detokenizer import table_for
from residentd.text.model import TextModel
from residentd.text.tokenizer import Tokenizer

PROPERTY = settings(deadline=None)  # a busy machine is no failure
BRIEF = settings(deadline=None, max_examples=40)  # for properties that hold for each entry of a long table

EXPORTS = Path(__file__).resolve().parent.parent / "fixtures" / "exports"
EXPORT_NAMES = tuple(
    sorted(file.parent.name for file in EXPORTS.glob("*/goldens.json") if '"encode"' in file.read_text("utf-8"))
)
"""Those with goldens of text; the others have the tokenizer of one of these."""

CORPUS = """\
The lighthouse keeper said: "the weather was calm, the water was warm", and the town was asleep.
for index in range(10):\n    print(index, 2 * index)\n\n\nuser assistant system im_start im_end think end
Où est le café? Größe, naïve, 你好、世界。こんにちは 안녕 😀 🎉 — “quoted” ½ €
"""

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[NORM]", "<|user|>", "<s >")
"""Of the byte-level samples: the last five are not marked special in the file."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def add_controls(inner: Inner) -> None:
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROLS[:3]])
    inner.add_tokens([AddedToken(name, special=False, normalized=name == "[NORM]") for name in CONTROLS[3:]])
    # Text, not control: runs of blanks as GPT-NeoX adds them, a line break pair as Gemma does, a word, a letter.
    inner.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("   ", "\n\n", "lighthouse", "õ")])


def byte_level() -> Inner:
    """As GPT-2, SmolLM2 and Llama 3 ship: special names are in the model's own vocabulary too."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(CONTROLS[:3]), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([CORPUS], trainer)
    add_controls(inner)
    return inner


def whole_words() -> Inner:
    """ignore_merges, as Llama 3, and no pre-tokenizer that would take a control token's text apart."""
    inner = byte_level()
    description = json.loads(inner.to_str())
    description["model"]["ignore_merges"] = True
    description["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    return Inner.from_str(json.dumps(description))


def folding() -> Inner:
    """A normaliser that makes control tokens of other text: compatibility forms and lower case."""
    inner = byte_level()
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    inner.add_tokens([AddedToken("<|fold|>", special=False, normalized=True)])
    inner.add_special_tokens([AddedToken("<|foldspecial|>", special=True, normalized=True)])
    return inner


def stripping() -> Inner:
    """As Phi-3 (rstrip) and T5 or Mask tokens (lstrip) do; one stands only as a word of its own."""
    inner = byte_level()
    inner.add_special_tokens(
        [
            AddedToken("<|end|>", special=True, rstrip=True, normalized=False),
            AddedToken("<|mask|>", special=True, lstrip=True, normalized=False),
            AddedToken("<|word|>", special=True, single_word=True, normalized=False),
        ]
    )
    return inner


SPECIALS = ("<unk>", "<s>", "</s>")


def sentencepiece_model() -> models.BPE:
    scratch = Inner(models.BPE())
    scratch.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    scratch.train_from_iterator(
        CORPUS.splitlines(), trainers.BpeTrainer(vocab_size=160, limit_alphabet=70, show_progress=False)
    )
    state = json.loads(scratch.to_str())["model"]
    pieces = sorted(state["vocab"], key=state["vocab"].__getitem__)
    # A converter that derives merges from the whole vocabulary makes one that ends in a control token.
    extra = [piece for piece in ("<", ">", "/", "<s", "s", "</s") if piece not in pieces]
    names = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *extra]
    merges = [
        *(tuple(merge) for merge in state["merges"]),
        ("<", "s"),
        ("<s", ">"),
        ("<", "/"),
        ("</", "s"),
        ("</s", ">"),
    ]
    vocabulary = {name: index for index, name in enumerate([*names, "</"])}
    return models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def sentencepiece(*, style: str) -> Inner:
    inner = Inner(sentencepiece_model())
    if style == "metaspace":  # Mistral
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:  # Llama 2
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style != "gemma":
        steps.append(decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence(steps)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    normalized = style == "normalized"  # older conversions of Llama 2
    inner.add_special_tokens([AddedToken(name, special=True, normalized=normalized) for name in SPECIALS])
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return inner


def unigram() -> Inner:
    """As T5 and XLM-R: the model would pick a control token for its text, and the decoder is Metaspace alone."""
    letters = sorted(set(CORPUS.replace(" ", "▁").replace("\n", "")) | set("<>/s[]|"))
    pieces = [(name, 0.0) for name in SPECIALS] + [("<extra>", 0.0)]
    pieces += [(letter, -6.0) for letter in letters] + [("▁the", -3.0), ("▁was", -3.0), ("er", -4.0), ("▁▁", -5.0)]
    inner = Inner(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    inner.add_tokens([AddedToken("<extra>", special=False, normalized=False)])
    return inner


def word_pieces(decoder: Any) -> Inner:
    """A vocabulary of words and `##` ends, under a decoder that no table knows."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "was", "town", "##er", "##s", ".", ",", "!", "'", "n't", "end</w>", "|"]
    inner = Inner(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoder
    inner.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return inner


def replacing_words() -> Inner:
    """A decoder that changes text already written: only holding back gets it right."""
    inner = word_pieces(None)
    inner.decoder = decoders.Sequence(
        [decoders.WordPiece(cleanup=False), decoders.Fuse(), decoders.Replace(Regex(r" ([.,!])"), "!")]
    )
    return inner


MAKERS = {
    "byte_level": byte_level,
    "whole_words": whole_words,
    "folding": folding,
    "stripping": stripping,
    "llama2": lambda: sentencepiece(style="llama2"),
    "normalized": lambda: sentencepiece(style="normalized"),
    "metaspace": lambda: sentencepiece(style="metaspace"),
    "gemma": lambda: sentencepiece(style="gemma"),
    "unigram": unigram,
    "wordpiece": lambda: word_pieces(decoders.WordPiece(cleanup=True)),
    "bpe_suffix": lambda: word_pieces(decoders.BPEDecoder()),
    "ctc": lambda: word_pieces(decoders.CTC(pad_token="[CLS]", word_delimiter_token="|")),
    "replacing": replacing_words,
}
KINDS = {"byte_level": "bytes", "whole_words": "bytes", "folding": "bytes", "stripping": "bytes"} | {
    **dict.fromkeys(("llama2", "normalized", "metaspace", "gemma", "unigram"), "pieces"),
    **dict.fromkeys(("wordpiece", "bpe_suffix", "ctc", "replacing"), "whole"),
}
NAMES = tuple(MAKERS)


@functools.cache
def sample(name: str) -> Tokenizer:
    return Tokenizer(MAKERS[name]().to_str().encode())


@functools.cache
def table(name: str) -> Any:
    return table_for(sample(name))


def fixed_now() -> datetime:
    return datetime(2026, 11, 5, 13, 37, tzinfo=UTC)


def chat_template(source: str, *, clock: Any = lambda: 0.0, **variables: str) -> ChatTemplate:
    return ChatTemplate(source, variables, now=fixed_now, clock=clock)


def text_model(
    tokenizer: str, source: str | None = CHATML, *, bos: str | None = None, adds_bos: bool = False, eos: str = ""
) -> TextModel:
    loaded = sample(tokenizer)
    variables = {name: value for name, value in {"bos_token": bos, "eos_token": eos}.items() if value}
    template = None if source is None else chat_template(source, **variables)
    bos_id = None if bos is None else loaded.inner.token_to_id(bos)
    return TextModel(loaded, table(tokenizer), template, bos_id, adds_bos)


@functools.cache
def goldens(export: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((EXPORTS / export / "goldens.json").read_text(encoding="utf-8"))
    return loaded


def export_text(export: str, directory: Path) -> manifest.Text:
    """What an install writes down about an export's text, with its files in `directory`."""
    source = EXPORTS / export
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = source / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.exists() else config["chat_template"]
    (directory / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    inner = Inner.from_file(str(directory / "tokenizer.json"))
    bos = config["bos_token"]
    bos_id = None if bos is None else inner.token_to_id(bos)
    return manifest.Text(
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        bos_id=bos_id,
        bos_token=bos or "",
        eos_token=config["eos_token"],
        adds_bos=bos_id is not None and inner.encode("").ids == [bos_id],
        eos_ids=tuple(goldens(export)["eos_token_ids"]),
    )
