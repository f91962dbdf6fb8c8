"""The daemon's command: residentd --config FILE.

Exit status: 0 stopped on request, 1 could not start or failed, 2 wrong usage or configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from residentd import daemon, logs
from residentd.config import Config, parse
from residentd.errors import ConfigError, ResidentError

DEFAULT_CONFIG = "/etc/residentd/residentd.toml"


def main() -> None:
    arguments = _parse_arguments()
    try:
        config = _read_config(Path(arguments.config))
        logs.configure(config.log)
        if not arguments.check:
            asyncio.run(daemon.run(config))
    except ConfigError as error:
        _fail(error, 2)
    except ResidentError as error:
        _fail(error, 1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="residentd", description="Serve the models of one state directory over gRPC.")
    parser.add_argument("--config", default=DEFAULT_CONFIG, help=f"TOML file (default {DEFAULT_CONFIG})")
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    return parser.parse_args()


def _read_config(path: Path) -> Config:
    try:
        return parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def _fail(error: ResidentError, status: int) -> None:
    sys.stderr.write(f"residentd: {error}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
