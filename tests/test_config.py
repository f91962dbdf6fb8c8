from __future__ import annotations

import pytest

from residentd.config import CONFIG_BYTES_MAX, Config, key_table, parse
from residentd.errors import ConfigError


def test_an_empty_file_is_the_defaults() -> None:
    """Every key has a default."""
    assert parse("") == Config()


def test_keys_are_read_into_their_sections() -> None:
    """A value in the file replaces the default of exactly that key."""
    config = parse('state = "/x"\nmodels = ["a", "b@2"]\n[engine]\nthreads = 3\nscheduling = "throughput"\n')
    assert (config.state, config.models, config.engine.threads) == ("/x", ("a", "b@2"), 3)
    assert (config.engine.scheduling, config.limits) == ("throughput", Config().limits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stat = 1", "unknown key stat: did you mean state?"),
        ("[engine]\nthread = 1", "unknown key engine.thread: did you mean engine.threads?"),
        ("[engin]\nthreads = 1", "unknown key engin: did you mean engine?"),
        ("[log]\nzzz = 1", "unknown key log.zzz: known keys: format, level"),
        ("[engine]\nthreads = -1", "engine.threads"),
        ("[engine]\nthreads = 1025", "engine.threads"),
        ('[engine]\nthreads = "many"', "engine.threads"),
        ('[engine]\nscheduling = "fast"', "engine.scheduling"),
        ("[limits]\nwaiting_max = 0", "limits.waiting_max"),
        ("engine = 3", "engine"),
        ('state = ""', "state"),
        *(
            (f'[listen]\ngrpc = "{address}"', "HOST:PORT")
            for address in ("a", "a:65536", "a:-1", ":80", "unix:/x", "a:")
        ),
        ('[listen]\ntls_certificate = "a"', "listen.tls_key"),
        ('[listen]\ntls_key = "a"', "listen.tls_certificate"),
        ('[listen]\ntls_client_ca = "a"', "listen.tls_client_ca"),
        ("state = ", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    """A refused file says which key is wrong, and suggests the one that was meant."""
    with pytest.raises(ConfigError) as refusal:
        parse(text)
    assert message in str(refusal.value)


def test_every_unknown_key_is_reported_at_once() -> None:
    """Two mistakes are two lines of one error."""
    with pytest.raises(ConfigError) as refusal:
        parse("stat = 1\n[log]\nlevl = 2")
    assert len(str(refusal.value).splitlines()) == 2


def test_the_size_limit_is_exact() -> None:
    """CONFIG_BYTES_MAX characters are read; one more is refused unread."""
    assert parse("#" * CONFIG_BYTES_MAX) == Config()
    with pytest.raises(ConfigError, match="at most"):
        parse("#" * (CONFIG_BYTES_MAX + 1))


@pytest.mark.parametrize("row", key_table(), ids=lambda row: row[0])
def test_every_documented_default_is_accepted(row: tuple[str, str, str]) -> None:
    """Writing any key's default into the file gives the default configuration."""
    key, kind, default = row
    section, _, name = key.rpartition(".")
    value = default if kind in {"integer", "number"} else ("[]" if kind == "list of text" else f'"{default}"')
    assert parse((f"[{section}]\n" if section else "") + f"{name} = {value}") == Config()
