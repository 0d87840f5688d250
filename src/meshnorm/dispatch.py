"""Whether anything could be looking at an op call: the one place that asks torch's dispatcher, through private APIs.

There is no public question for these; each answer below was checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_dispatch_modes = torch._C._len_torch_dispatch_stack  # FakeTensorMode, CommDebugMode, selective checkpointing, make_fx
_function_transform = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined] # torch.func.grad, vmap, functionalize
_is_wrapper = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined] # one may outlive its transform
is_batched = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[attr-defined] # of autograd's is_grads_batched=True
_jit_tracing = torch._C._get_tracing_state  # torch.jit.trace, which would record nothing of a direct kernel call


def unobserved(*tensors: Tensor | None) -> bool:
    """True where a kernel can be called without the dispatcher and nobody would notice."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        kind = type(tensor)
        if kind is Tensor or kind is Parameter:
            if tensor.is_meta or _is_wrapper(tensor) or is_batched(tensor):  # type: ignore[union-attr]
                return False
        elif tensor is not None:
            return False
    return (
        _dispatch_modes() == 0
        and _function_transform() is None
        and _jit_tracing() is None
        and forward_ad._current_level < 0
    )


def transformed(*tensors: Tensor | None) -> bool:
    """True inside torch.func's transforms, and where a tensor has a forward-mode tangent, which an op would drop."""
    if torch.compiler.is_compiling():
        return False
    if _function_transform() is not None:
        return True
    return forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )
