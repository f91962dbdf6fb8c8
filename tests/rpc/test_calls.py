"""What a call to a model that answers in one run is refused with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from residentd.calls import Call, Tensor, TextRow
from residentd.config import Config
from residentd.engine.link import FRAME_BYTES_MAX, Ask, encode
from residentd.errors import CallerError, OverloadedError
from residentd.models.encoder import Kind
from residentd.models.registry import Version
from residentd.rpc.calls import CALL_BYTES_MAX, CALL_TOKENS_MAX, check_travels, error_of
from residentd.supervisor.engines import Loaded
from residentd.supervisor.host import EngineHost
from residentd.types import Finish, Finished, Refusal, RequestId
from support.manifests import plain_manifest


def loaded(kind: Kind) -> Loaded:
    plain = plain_manifest({})
    manifest = msgspec.structs.replace(plain, content=msgspec.structs.replace(plain.content, kind=kind))
    host = EngineHost(label="toy@1", directory=Path(), manifest=manifest, config=Config())
    return Loaded(Version("toy", 1, "d", "", active=True), manifest, host, None)


@pytest.mark.parametrize(("kind", "key"), [("tensor", "waiting_bytes_max"), ("embed", "waiting_tokens_max")])
def test_a_full_queue_of_the_worker_names_the_keys_that_apply(kind: Kind, key: str) -> None:
    """Tensors wait by bytes, texts by tokens."""
    full = Finished(RequestId(1), Finish.REJECTED, "the queue holds 9", Refusal.FULL)
    error = error_of(full, loaded(kind), "inputs")
    assert isinstance(error, OverloadedError)
    assert str(error) == f"the queue holds 9 (limits.waiting_max, limits.{key})"


@pytest.mark.parametrize("field", ["texts", "items", "documents", "inputs"])
def test_what_the_worker_refuses_is_the_fault_of_the_field_that_was_sent(field: str) -> None:
    """By its name in the request that was made."""
    invalid = Finished(RequestId(1), Finish.REJECTED, "no", Refusal.INVALID)
    error = error_of(invalid, loaded("embed"), field)
    assert isinstance(error, CallerError)
    assert error.field == field


@pytest.mark.parametrize(("most", "unit"), [(CALL_TOKENS_MAX, "tokens"), (CALL_BYTES_MAX, "bytes")])
def test_a_request_is_refused_one_above_what_a_frame_holds(most: int, unit: str) -> None:
    """Before it is with the worker, where it could only be lost again and again."""
    check_travels(most, most, unit, "texts")
    with pytest.raises(CallerError, match=f"the texts have {most + 1:,} {unit}; at most {most:,}") as caught:
        check_travels(most + 1, most, unit, "texts")
    assert caught.value.field == "texts"


def size_of(count: int) -> int:
    """Bytes of a frame with texts of `count` tokens that are as large as any."""
    row = TextRow((1 << 31,) * count, (1,) * count)
    return len(encode(Ask(Call(RequestId(1 << 60), (0,), (row,)))))


def test_what_is_not_refused_fits_a_frame() -> None:
    """Tokens as msgpack writes the largest ids; a megabyte and more is left for everything else."""
    grows = (size_of(2000) - size_of(1000)) / 1000
    assert grows * CALL_TOKENS_MAX + (1 << 20) <= FRAME_BYTES_MAX
    empty = Ask(Call(RequestId(1), (0,), tensors=(Tensor("x", "int8", (1,), b""),)))
    assert len(encode(empty)) + CALL_BYTES_MAX + (1 << 20) <= FRAME_BYTES_MAX
