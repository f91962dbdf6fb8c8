"""What ONNX Runtime says, without what only its own developers understand."""

from __future__ import annotations

import pytest

from residentd.backend.messages import MESSAGE_CHARS_MAX, plain

NODE = "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Mul node. Name:'m' Status Message: "
SAID = "Non-zero status code returned while running Mul node. Name:'m' Status Message: "
PLACE = "/onnxruntime_src/onnxruntime/core/framework"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            (
                f"{NODE}{PLACE}/bfc_arena.cc:360 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, "
                "onnxruntime::Stream*) Failed to allocate memory for requested buffer of size 17179869184\n"
            ),
            f"{SAID}Failed to allocate memory for requested buffer of size 17179869184",
        ),
        (
            (
                f"{NODE}{PLACE}/op_kernel.cc:87 virtual OrtValue* onnxruntime::OpKernelContext::OutputMLValue(int, "
                "const onnxruntime::TensorShape&) [ONNXRuntimeError] : 1 : FAIL : Calculation for size overflowed"
            ),
            f"{SAID}Calculation for size overflowed",
        ),
        (
            (
                f"{NODE}/onnxruntime_src/onnxruntime/core/common/safeint.h:17 static void "
                "SafeIntExceptionHandler<onnxruntime::OnnxRuntimeException>::SafeIntOnOverflow() Integer overflow"
            ),
            f"{SAID}Integer overflow",
        ),
        (
            (
                f"{NODE}{PLACE}/reshape_helper.h:91 onnxruntime::ReshapeHelper::ReshapeHelper(const "
                "onnxruntime::TensorShape&, onnxruntime::TensorShapeVector&, bool) input_shape_size == "
                "requested_shape_size was false. The input tensor cannot be reshaped. Input shape:{2,3}"
            ),
            f"{SAID}The input tensor cannot be reshaped. Input shape:{{2,3}}",
        ),
        (f"{NODE}matmul_helper.h:59 Compute MatMul dimension mismatch", f"{SAID}MatMul dimension mismatch"),
        (f"{NODE}indices element out of data bounds, idx=9", f"{SAID}indices element out of data bounds, idx=9"),
        (
            "[ONNXRuntimeError] : 1 : FAIL : Load model from /srv/models/model.onnx failed:Node () Op (Mul) is bad",
            "Load model from … failed:Node () Op (Mul) is bad",
        ),
        ("", "RuntimeError"),
        ("x" * MESSAGE_CHARS_MAX, "x" * MESSAGE_CHARS_MAX),
        ("x" * (MESSAGE_CHARS_MAX + 1), "x" * (MESSAGE_CHARS_MAX - 1) + "…"),
        ("a/" * 10_000_000, "a/" * (MESSAGE_CHARS_MAX // 2 - 1) + "a…"),
        (".h:1 :: (" * 1_000, ".h:1 :: (" * 33 + ".h…"),
    ],
)
def test_what_onnx_runtime_says_is_one_short_line(text: str, expected: str) -> None:
    """No code, no place in its sources, no path of the machine; what it says of the graph stays."""
    assert plain(RuntimeError(text)) == expected
