"""infer: one call with named tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from resident.v1 import inference_pb2
from residentd.cli import arrays, formats
from residentd.cli.channels import UNARY_S_MAX, inference_stub
from residentd.cli.command import Session
from residentd.cli.exits import Failure, usage
from residentd.cli.generate import ModelOption, TimeoutOption
from residentd.cli.output import Output

SHOWN_NUMBERS = 8


def infer(
    session: Session,
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="NAME=FILE.npy|JSON", help="One input. Repeatable; none: list them."),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", "-o", metavar="NAME", help="Only this output. Repeatable.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write each output into DIR as NAME.npy.")] = None,
    model: ModelOption = "",
    timeout: TimeoutOption = 60.0,
) -> None:
    """Run a tensor model on named tensors; without --input say what it takes and gives."""
    output = session.output
    with inference_stub(session.target()) as inference:
        known = inference.ListModels(inference_pb2.ListModelsRequest(), timeout=UNARY_S_MAX).models
        chosen = _model(model, known)
        if not inputs:
            _describe(output, chosen)
            return
        specs = {spec.name: spec for spec in chosen.inputs}
        tensors = [arrays.tensor_from_text(entry, specs) for entry in inputs]
        request = inference_pb2.InferRequest(model=chosen.version, inputs=tensors, outputs=outputs or ())
        answer = inference.Infer(request, timeout=timeout)
    for tensor in answer.outputs:
        _show(output, tensor)
        if save is not None:
            _save(save, tensor)


def _model(name: str, known: Sequence[inference_pb2.Model]) -> inference_pb2.Model:
    """The tensor model that `name` means. Raises Failure (usage)."""
    fitting = [model for model in known if model.kind == "tensor" and (not name or name in {model.name, model.version})]
    if not fitting:
        raise usage(f"no tensor model {name!r} is served. See: residentctl models")
    if len({model.name for model in fitting}) > 1:
        raise usage(f"several tensor models are served: {', '.join(model.version for model in fitting)}. Name one")
    return fitting[-1]


def _describe(output: Output, model: inference_pb2.Model) -> None:
    for what, specs in (("input", model.inputs), ("output", model.outputs)):
        for spec in specs:
            axes = [name or str(size) for size, name in zip(spec.shape, spec.axes, strict=True)]
            if output.as_json:
                output.emit({what: spec.name, "dtype": spec.dtype, "shape": axes})
            else:
                output.line(f"{what:<7} {spec.name}  {spec.dtype} [{', '.join(axes)}]")


def _show(output: Output, tensor: inference_pb2.Tensor) -> None:
    shape = tuple(tensor.shape)
    numbers = arrays.numbers_of(tensor)
    if output.as_json:
        values = arrays.nested(numbers, shape) if numbers else []
        output.emit({"name": tensor.name, "dtype": tensor.dtype, "shape": list(shape), "values": values})
        return
    first = ", ".join(f"{number:.6g}" for number in numbers[:SHOWN_NUMBERS])
    more = ", …" if len(numbers) > SHOWN_NUMBERS else ""
    size = formats.size(len(tensor.data))
    output.line(f"{tensor.name}  {tensor.dtype} {list(shape)}, {size}: {first}{more}")


def _save(directory: Path, tensor: inference_pb2.Tensor) -> None:
    path = directory / f"{arrays.file_name(tensor)}.npy"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(arrays.npy_of(tensor))
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror}. Name another directory with --save") from error
