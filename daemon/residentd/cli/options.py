"""The options that many commands share, each group declared once as a value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

CONNECTION_PANEL = "Connection and output"
WEIGHTS_PANEL = "Weights (what is left out is the best for the CPU)"
SAMPLING_PANEL = "Sampling (what is left out takes the model's own default)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Where the daemon is and how to print; accepted before and after the subcommand."""

    config: Annotated[
        Path | None,
        typer.Option(
            envvar="RESIDENTD_CONFIG",
            metavar="FILE",
            help="The daemon's configuration. Default: /etc/residentd/residentd.toml, else that of `serve --dev`.",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The daemon's state directory.", rich_help_panel=CONNECTION_PANEL),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The Inference service.", rich_help_panel=CONNECTION_PANEL),
    ] = None
    admin_socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The Admin service.", rich_help_panel=CONNECTION_PANEL),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM certificates to trust; turns TLS on. Default: listen.tls_certificate of the configuration.",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM certificate to show the daemon.", rich_help_panel=CONNECTION_PANEL),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM private key of --tls-cert.", rich_help_panel=CONNECTION_PANEL),
    ] = None
    tls_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The name that the daemon's certificate must carry, where HOST differs.",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = None
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Machine-readable: one JSON document, or JSON lines for streams.",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = False

    def over(self, outer: ConnectionOptions) -> ConnectionOptions:
        """These options, with `outer`'s where this one leaves the default."""
        chosen = {field.name: getattr(self, field.name) or getattr(outer, field.name) for field in fields(self)}
        return ConnectionOptions(**chosen)


Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "auto"]
Format = Literal["same", "fp32", "int8", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What is built, where the source leaves a choice."""

    mode: Annotated[
        Literal["auto", "canonical", "compatibility"] | None,
        typer.Option(help="canonical: or refuse it; compatibility: run it as exported. Default: so if it must be."),
    ] = None
    variant: Annotated[
        str, typer.Option(metavar="FILE", help="Which of several ONNX files. Default: the least quantised.")
    ] = ""
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="generate, embed, classify, rerank or tensor. Default: what the directory shows."
        ),
    ] = ""
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT=1x3x48x320", help="Sizes to verify a tensor model with. Repeatable."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """In which format a build keeps its weights, and what that may cost; None is the compiler's default."""

    precision: Annotated[
        Precision | None,
        typer.Option(
            help="auto measures several on this machine and keeps the fastest within the bound. Default: fp32, or what "
            "an export that arrives quantised is.",
            rich_help_panel=WEIGHTS_PANEL,
        ),
    ] = None
    block: Annotated[
        Literal["0", "32", "128"] | None,
        typer.Option(
            help="Weights that share a scale. 0, in an int8 build: all of an output channel.",
            rich_help_panel=WEIGHTS_PANEL,
        ),
    ] = None
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Weights without a zero point, or with one for each block.",
            rich_help_panel=WEIGHTS_PANEL,
        ),
    ] = None
    embedding: Annotated[Format | None, typer.Option(help="The token embedding.", rich_help_panel=WEIGHTS_PANEL)] = None
    head: Annotated[Format | None, typer.Option(help="The output head.", rich_help_panel=WEIGHTS_PANEL)] = None
    kl_max: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="Mean KL divergence from the export past which nothing is installed. Default: by precision.",
            rich_help_panel=WEIGHTS_PANEL,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the tokens are chosen and when the generation ends; None is the model's own default."""

    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Output tokens at most.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Output tokens at least.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", metavar="X", help="0 is greedy.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    top_k: Annotated[int | None, typer.Option(min=0, metavar="N", help="0 is off.", rich_help_panel=SAMPLING_PANEL)] = (
        None
    )
    top_p: Annotated[float | None, typer.Option(metavar="X", help="1 is off.", rich_help_panel=SAMPLING_PANEL)] = None
    min_p: Annotated[float | None, typer.Option(metavar="X", help="0 is off.", rich_help_panel=SAMPLING_PANEL)] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="1 is off.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="0 is off.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="0 is off.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS", help="Add BIAS to a token's logit. Repeatable.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Same seed, same tokens.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text. Repeatable.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(min=0, metavar="ID", help="End at this token. Repeatable.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on past end-of-sequence tokens.", rich_help_panel=SAMPLING_PANEL),
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Report log-probabilities, with the N likeliest alternatives.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None
