"""Transformers' ``use_kernels=True``: our norm as a local kernel layer.

::

    from meshnorm.integrations.transformers import kernel_config

    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True, kernel_config=kernel_config())

Transformers' own mapping has one kernel for every class that is called "RMSNorm", whatever its cast order. Ours looks
at what each norm computes, as ``meshnorm.convert`` does; a norm that it does not compute keeps its own forward. Norms
that Transformers offers to no kernel (Gemma's, T5's, ...) are converted beside.

Seen with Transformers 5.22 and kernels 0.17.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import KernelConfig

from meshnorm.converting.convert import convert
from meshnorm.converting.converted import computed, is_converted
from meshnorm.converting.probe import recipe_of
from meshnorm.converting.recipe import Recipe
from meshnorm.converting.report import Report
from meshnorm.converting.shell import Refused

__all__ = ["MeshnormKernelConfig", "MeshnormRMSNorm", "kernel_config", "kernel_mapping"]

# The names under which Transformers' classes ask for an RMSNorm kernel.
LAYER_NAMES = ("RMSNorm", "RMSNormZeroCentered")
_DEVICES = ("cpu", "cuda", "rocm", "xpu", "npu", "mps")
_KNOWN = "_meshnorm_kernel"


class MeshnormRMSNorm(nn.Module):
    """A kernel layer: ``kernels.kernelize`` binds its forward to the model's own norm modules.

    x ``(*rows, hidden)`` -> y of the same shape, in the dtype that the module's own forward gives.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        recipe = self.__dict__[_KNOWN] if _KNOWN in self.__dict__ else _recognised(self)
        y = None if recipe is None else computed(self, recipe, hidden_states)
        return type(self).forward(self, hidden_states) if y is None else y


def _recognised(module: nn.Module) -> Recipe | None:
    """The module's recipe, kept on it; None if meshnorm does not compute what its class does."""
    bare = object.__new__(type(module))
    bare.__dict__.update({name: value for name, value in vars(module).items() if name != "forward"})
    try:
        recipe = recipe_of(bare)
    except Refused:
        recipe = None
    module.__dict__[_KNOWN] = recipe
    return recipe


class _Repository:
    """What kernels takes for a place to load a layer from."""

    layer_name = MeshnormRMSNorm.__name__

    def load(self) -> type[nn.Module]:
        return MeshnormRMSNorm

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Repository)

    def __hash__(self) -> int:
        return hash(_Repository)

    def __str__(self) -> str:
        return f"meshnorm (layer `{self.layer_name}`)"


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """For ``kernels.use_kernel_mapping`` and ``register_kernel_mapping``: our layer for every device and mode.

    A norm is recognised at its first forward, which therefore must not be one that torch.compile traces whole;
    ``kernel_config`` does it when the model is loaded.
    """
    return {name: {device: _Repository() for device in _DEVICES} for name in LAYER_NAMES}


class MeshnormKernelConfig(KernelConfig):
    """Made by ``kernel_config``. ``report`` says which norms were converted that no kernel layer reaches."""

    report: Report | None = None

    def sanitize_kernel_mapping(self, model: nn.Module) -> None:
        """Recognises the norms of the model."""
        self.store_registered_layer_names(model)
        for module in model.modules():
            if getattr(module, "kernel_layer_name", None) in LAYER_NAMES and not is_converted(module):
                _recognised(module)
        self.report = convert(
            model, where=lambda name, module: getattr(module, "kernel_layer_name", None) not in LAYER_NAMES
        )

    def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
        self.kernel_mapping = kernel_mapping()


def kernel_config(*, inherit_mapping: bool = False) -> MeshnormKernelConfig:
    """For ``from_pretrained(..., use_kernels=True, kernel_config=kernel_config())``.

    ``inherit_mapping=True`` leaves the other layers to Transformers' own mapping, whose kernels come from its hub.
    """
    return MeshnormKernelConfig(inherit_mapping=inherit_mapping)
