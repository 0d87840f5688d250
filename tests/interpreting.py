"""Triton's interpreter made to round as the hardware does, for the tests of kernels on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton.language as tl

CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="module")
def interpreter_does_as_the_hardware() -> Iterator[None]:
    """Triton's interpreter truncates to bfloat16, and takes a bfloat16's bits for its value on the way to float64: here
    it rounds, so that the tolerance need not know. Triton 3.6's fails on a loop's bounds with NumPy 2.4, and before 3.9
    its fused multiply-add rounds the product."""
    if CUDA:
        yield
        return
    from triton.runtime import interpreter

    dtypes = {tl.float64: torch.float64, tl.float32: torch.float32, tl.float16: torch.float16}
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target) or source == target:
            return cast(self, src, dst_type)
        values = torch.from_numpy(src.data.copy())
        values = values.view(torch.bfloat16) if source == tl.bfloat16 else values
        if target == tl.bfloat16:
            data = values.to(torch.bfloat16).view(torch.uint16).numpy()
        else:
            data = values.to(dtypes[target]).numpy()
        return interpreter.TensorHandle(data, target)

    fused = builder.create_fma

    def create_fma(self, x, y, z):
        if x.data.dtype.name != "float32":
            return fused(self, x, y, z)
        wide = x.data.astype("float64") * y.data + z.data  # the product is exact
        return interpreter.TensorHandle(wide.astype("float32"), z.dtype.scalar)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, *scope):
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    builder.cast_impl, interpreter._patch_lang_tensor, builder.create_fma = cast_impl, patch_lang_tensor, create_fma
    yield
    builder.cast_impl, interpreter._patch_lang_tensor, builder.create_fma = cast, patch_tensor, fused
