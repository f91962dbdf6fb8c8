"""The manifest's schema: what another residentd wrote is refused with the way out, and new fields keep old digests."""

from __future__ import annotations

import msgspec
import pytest

from residentd.errors import StoreError
from residentd.models.manifest import SCHEMA, Content, Golden, content_digest, decode, encode
from support.manifests import plain_manifest

OF_ISSUE_2 = {"architecture", "engine", "text", "sampling", "goldens", "text_goldens", "files"}
"""The fields of the first versions' content; none had a default."""


@pytest.mark.parametrize(("schema", "remedy"), [(SCHEMA - 1, "Reinstall this version"), (SCHEMA + 1, "Upgrade it")])
def test_another_schema_is_refused_with_the_way_out(schema: int, remedy: str) -> None:
    """A manifest of an older or newer residentd is never half read."""
    data = encode(msgspec.structs.replace(plain_manifest({}), schema=schema))
    with pytest.raises(StoreError, match=f"has schema {schema}; this residentd reads {SCHEMA}. {remedy}"):
        decode(data)


def test_a_field_at_its_default_is_not_part_of_the_digest() -> None:
    """A residentd that knows one more field computes the digests of today's versions."""

    class Grown(Content, frozen=True, kw_only=True):
        added: str = ""

    content = plain_manifest({}).content
    grown = msgspec.convert(msgspec.to_builtins(content), Grown)
    assert content_digest(grown) == content_digest(content)
    assert content_digest(msgspec.structs.replace(grown, added="x")) != content_digest(content)


def test_versions_of_before_the_gate_keep_their_digests() -> None:
    """Statistics, golden conversations and the tolerance are written only where they were recorded."""
    golden = Golden(prompt=(1,), output=(2,))
    content = msgspec.structs.replace(plain_manifest({}).content, goldens=(golden,))
    written = msgspec.json.decode(msgspec.json.encode(content))
    assert written.keys() == OF_ISSUE_2
    assert written["goldens"] == [{"prompt": [1], "output": [2]}]
