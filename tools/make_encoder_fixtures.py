# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-any-return"
"""Make the tiny random-weight encoders under tests/fixtures/encoders, with goldens recorded from transformers.

Not part of the product: torch is needed, so run it in the environment of tools/make_export_fixtures.py, which says how
to make one:

    fixtures-venv/bin/python -W ignore tools/make_encoder_fixtures.py             # all of them, a few seconds
    fixtures-venv/bin/python -W ignore tools/make_encoder_fixtures.py embed-bert  # one

What sentence-transformers would compute after the model (pooling over masks, length 1) is written out here by its
definition. Every golden is of one text, or pair of texts, alone and without padding.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from optimum.exporters.onnx import onnx_export_from_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "encoders"
FIXTURE_BYTES_MAX = 400_000
TRACES = (b"/home/", b"/work/", b"/tmp/", b"site-packages", b"http://", b"https://")
CORPUS = (
    "The harbour town woke slowly. A narrow street led from the old lighthouse to the market, where fishermen sold the "
    "night's catch and children counted the coins: one, two, three, 10, 42, 1999. Where were you yesterday? I was "
    "waiting for the train, but the train was late again. In the evening they would sit together near the window and "
    "tell the story of the winter when the river froze and the whole town walked over the ice. Le café était fermé. "
    "What is the capital of France? Paris is the capital of France. How high is the lighthouse?"
)
TEXTS = (
    "What is the capital of France?",
    "paris",
    "The river froze, and the whole town walked over the ice in the winter of 1999.",
    "a",
    "Le café était fermé; where were you?",
    "waiting for the train " * 20,
)
PAIRS = (
    ("What is the capital of France?", "Paris is the capital of France."),
    ("What is the capital of France?", "The river froze."),
    ("How high is the lighthouse?", "children counted the coins: one, two, three, 10, 42 " * 6),
    ("you", "I"),
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SIZES = MappingProxyType({"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64})
DISTIL_SIZES = MappingProxyType({"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64})


@dataclass(frozen=True)
class Fixture:
    name: str
    model: type[Any]
    config: Callable[[int, int], Any]  # vocabulary, pad id
    task: str
    seed: int
    pooling: Mapping[str, bool] = field(default_factory=dict)
    normalise: bool = False
    tokens_max: int | None = None
    paired: bool = False
    roberta: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # written into config.json


FIXTURE_LIST = (
    Fixture(
        "embed-bert",
        transformers.BertModel,
        lambda vocab, pad: transformers.BertConfig(
            vocab_size=vocab, pad_token_id=pad, max_position_embeddings=64, **SIZES
        ),
        "feature-extraction",
        1,
        pooling={"pooling_mode_mean_tokens": True},
        normalise=True,
        tokens_max=48,
        prompts={"query": "where is ", "document": ""},
    ),
    Fixture(
        "embed-roberta",
        transformers.RobertaModel,
        lambda vocab, pad: transformers.RobertaConfig(
            vocab_size=vocab, pad_token_id=pad, max_position_embeddings=50, type_vocab_size=1, **SIZES
        ),
        "feature-extraction",
        2,
        pooling={"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
        roberta=True,
    ),
    Fixture(
        "classify-distilbert",
        transformers.DistilBertForSequenceClassification,
        lambda vocab, pad: transformers.DistilBertConfig(
            vocab_size=vocab,
            pad_token_id=pad,
            max_position_embeddings=64,
            id2label={0: "calm", 1: "windy", 2: "stormy"},
            label2id={"calm": 0, "windy": 1, "stormy": 2},
            **DISTIL_SIZES,
        ),
        "text-classification",
        3,
    ),
    Fixture(
        "rerank-bert",
        transformers.BertForSequenceClassification,
        lambda vocab, pad: transformers.BertConfig(
            vocab_size=vocab, pad_token_id=pad, max_position_embeddings=64, num_labels=1, **SIZES
        ),
        "text-classification",
        4,
        paired=True,
        extra={"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}},
    ),
)


def tokenizer_for(*, roberta: bool) -> Any:
    """BERT's WordPiece with its template for pairs; or byte-level BPE with RoBERTa's, whose padding is not id 0."""
    special = ROBERTA_SPECIAL if roberta else SPECIAL
    if roberta:
        tokenizer = Tokenizer(models.BPE(unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(special), initial_alphabet=alphabet)
        cls, sep = "<s>", "</s>"
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 - a token of text
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(special))
        cls, sep = "[CLS]", "[SEP]"
    tokenizer.train_from_iterator([CORPUS], trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    middle = f"{sep} {sep}" if roberta else f"{sep}"
    tail = "0" if roberta else "1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls}:0 $A:0 {' '.join(f'{part}:0' for part in middle.split())} $B:{tail} {sep}:{tail}",
        special_tokens=ids,
    )
    names = {"pad_token": special[1 if roberta else 0], "unk_token": special[3 if roberta else 1]}
    names |= {"cls_token": cls, "sep_token": sep, "mask_token": special[4]}
    inputs = ["input_ids", "attention_mask"] if roberta else ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=48 if roberta else 64, model_input_names=inputs, **names
    )


def sentence_files(fixture: Fixture, output: Path) -> None:
    """What sentence-transformers saves beside an embedding model."""
    base = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + ([("2_Normalize", "Normalize")] * fixture.normalise)
    documents: dict[str, Any] = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"{base}.{name}"}
            for index, (path, name) in enumerate(modules)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 32, **fixture.pooling},
        "config_sentence_transformers.json": {"prompts": dict(fixture.prompts), "default_prompt_name": None},
    }
    if fixture.tokens_max is not None:
        documents["sentence_bert_config.json"] = {"max_seq_length": fixture.tokens_max, "do_lower_case": False}
    (output / "1_Pooling").mkdir()
    for name, document in documents.items():
        (output / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def answer(fixture: Fixture, model: Any, encoded: Any) -> list[float]:
    """One text: the embedding by sentence-transformers' definition, or the logits."""
    with torch.no_grad():
        found = model(**encoded)
    if fixture.task == "text-classification":
        return found.logits[0].tolist()
    hidden, mask = found.last_hidden_state, encoded["attention_mask"].unsqueeze(-1).float()
    parts = []
    if fixture.pooling.get("pooling_mode_cls_token"):
        parts.append(hidden[:, 0])
    if fixture.pooling.get("pooling_mode_max_tokens"):
        parts.append(hidden.masked_fill(mask == 0, -1e9).max(1)[0])
    if fixture.pooling.get("pooling_mode_mean_tokens"):
        parts.append((hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9))
    vector = torch.cat(parts, 1)
    return (torch.nn.functional.normalize(vector) if fixture.normalise else vector)[0].tolist()


def goldens_for(fixture: Fixture, model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    longest = fixture.tokens_max or tokenizer.model_max_length
    texts = [(text, None) for text in TEXTS] + (list(PAIRS) if fixture.paired else [])
    goldens = []
    for text, pair in texts:
        encoded = tokenizer(text, pair, truncation=True, max_length=longest, return_tensors="pt")
        known = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
        if fixture.model.__name__.startswith("DistilBert"):
            known.pop("token_type_ids", None)
        goldens.append(
            {
                "text": text,
                "pair": pair,
                "ids": encoded["input_ids"][0].tolist(),
                "output": [float(f"{number:.9g}") for number in answer(fixture, model, known)],
            }
        )
    return goldens


def make(fixture: Fixture) -> None:
    """Write one fixture directory anew."""
    torch.set_num_threads(1)  # one order of additions
    torch.manual_seed(fixture.seed)
    tokenizer = tokenizer_for(roberta=fixture.roberta)
    config = fixture.config(len(tokenizer), tokenizer.pad_token_id)
    config.initializer_range = 0.4  # outputs that differ from text to text
    model = fixture.model(config).eval()
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch, fixture.name)
        onnx_export_from_model(model, fresh, task=fixture.task, do_validation=False)
        tokenizer.save_pretrained(fresh)
        document = json.loads((fresh / "config.json").read_text(encoding="utf-8")) | dict(fixture.extra)
        (fresh / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if fixture.pooling:
            sentence_files(fixture, fresh)
        goldens = goldens_for(fixture, model, tokenizer)
        lines = ",\n ".join(json.dumps(golden, ensure_ascii=False) for golden in goldens)
        (fresh / "goldens.json").write_text(f"[\n {lines}\n]\n", encoding="utf-8")
        check_clean(fresh)
        output = FIXTURES / fixture.name
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(fresh, output)
    print(f"{fixture.name}: {sum(path.stat().st_size for path in output.rglob('*') if path.is_file()):,} bytes")


def check_clean(output: Path) -> None:
    """Raise if a file of the fixture names a place on this machine, or if the fixture is too large."""
    files = [path for path in sorted(output.rglob("*")) if path.is_file()]
    for path in files:
        found = [trace.decode() for trace in TRACES if trace in path.read_bytes()]
        if found:
            message = f"{path.name} contains {found}"
            raise RuntimeError(message)
    size = sum(path.stat().st_size for path in files)
    if size > FIXTURE_BYTES_MAX:
        message = f"{output.name}: {size} bytes, at most {FIXTURE_BYTES_MAX}"
        raise RuntimeError(message)


def main(names: list[str]) -> int:
    """Make the named fixtures, or all of them."""
    by_name = {fixture.name: fixture for fixture in FIXTURE_LIST}
    unknown = sorted(set(names) - set(by_name))
    if unknown:
        print(f"no such fixture: {', '.join(unknown)}", file=sys.stderr)
        return 2
    for name in names or by_name:
        make(by_name[name])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
