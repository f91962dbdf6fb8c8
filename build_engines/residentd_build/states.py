"""What an exported graph carries from run to run: its inputs beside the step's own, and the outputs that renew them."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from residentd.backend.compatibility import INPUT_DTYPES, STEP_INPUTS
from residentd.models.manifest import State

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    import onnx_ir as ir

RENEWED: tuple[tuple[str, str], ...] = (
    ("past_key_values", "present"),
    ("past_key_values", "present_key_values"),
    ("past", "present"),
)
"""How exporters name the output that renews an input; the first pair whose output is there counts."""
STATE_DTYPES: Mapping[str, Literal["float32", "float16"]] = MappingProxyType(
    {"tensor(float)": "float32", "tensor(float16)": "float16"}
)
RANK_MAX = 6
DIM_MAX = 1 << 24
BATCH_AXIS = 0


class StateError(Exception):
    """An input is nothing that a run could be given. The text is a clause about the export."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input of the graph: its element type as ONNX Runtime writes it, None for every axis that is not fixed."""

    name: str
    type: str
    dims: tuple[int | None, ...]


def states_of(inputs: Sequence[Port], outputs: Collection[str]) -> tuple[State, ...]:
    """The states among `inputs`, in their order. Raises StateError at the first that none can be."""
    for port in inputs:
        if port.name in STEP_INPUTS and port.type not in INPUT_DTYPES:
            raise StateError(f"its input {port.name} is a {port.type}, which is not fed")
    return tuple(_state(port, outputs) for port in inputs if port.name not in STEP_INPUTS)


def _state(port: Port, outputs: Collection[str]) -> State:
    output = next((name for name in _renewals(port.name) if name in outputs), None)
    if output is None:
        raise StateError(f"it has an input {port.name} whose meaning is not known and that no output renews")
    dtype = STATE_DTYPES.get(port.type)
    if dtype is None:
        raise StateError(f"its input {port.name} is a {port.type}; states are kept as float32 or float16")
    grows = [axis for axis, dim in enumerate(port.dims) if axis != BATCH_AXIS and dim is None]
    fits = 1 < len(port.dims) <= RANK_MAX and port.dims[BATCH_AXIS] in {None, 1}
    if not fits or len(grows) > 1 or any(dim is not None and not 0 < dim <= DIM_MAX for dim in port.dims):
        shown = ", ".join("?" if dim is None else str(dim) for dim in port.dims)
        raise StateError(f"its input {port.name} is [{shown}]; one batch axis and one that grows are understood")
    shape = tuple(1 if axis == BATCH_AXIS else dim or 0 for axis, dim in enumerate(port.dims))
    return State(input=port.name, output=output, dtype=dtype, shape=shape, axis=grows[0] if grows else None)


def _renewals(name: str) -> list[str]:
    return [name.replace(past, present, 1) for past, present in RENEWED if name.startswith(past)]


def ports_of_graph(graph: ir.Graph) -> tuple[Port, ...]:
    return tuple(_port_of_value(value) for value in graph.inputs)


def _port_of_value(value: ir.Value) -> Port:
    dtype = "?" if value.dtype is None else value.dtype.name.lower()
    dims = () if value.shape is None else tuple(dim if isinstance(dim, int) else None for dim in value.shape)
    return Port(value.name or "", f"tensor({dtype})", dims)


def ports_of_session(session: Any) -> tuple[Port, ...]:
    """The same of a session of ONNX Runtime, which gives axes that are not fixed as names."""
    return tuple(
        Port(value.name, value.type, tuple(dim if isinstance(dim, int) else None for dim in value.shape))
        for value in session.get_inputs()
    )
