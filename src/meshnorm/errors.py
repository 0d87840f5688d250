"""One class for each kind of failure. All derive from MeshnormError and from the builtin one would expect."""

from __future__ import annotations


class MeshnormError(Exception):
    """Anything that meshnorm refuses."""


class DTypeError(MeshnormError, TypeError):
    """A tensor's dtype is not one that can be normalized (float64, float32, bfloat16, float16)."""


class TensorLayoutError(MeshnormError, TypeError):
    """A tensor is sparse, nested or otherwise not strided."""


class DeviceError(MeshnormError, ValueError):
    """x and the weight live on different devices, or on one that meshnorm has no kernel for."""


class NormalizedShapeError(MeshnormError, ValueError):
    """normalized_shape does not match x's last dims, or holds a dim of size 0."""


class WeightShapeError(MeshnormError, ValueError):
    """The weight's shape is not normalized_shape."""


class ResidualShapeError(MeshnormError, ValueError):
    """The residual's shape is not x's."""


class GateShapeError(MeshnormError, ValueError):
    """The gate's shape is not x's."""


class GroupSizeError(MeshnormError, ValueError):
    """group_size does not cut the normalized dims into whole groups."""


class EpsError(MeshnormError, ValueError):
    """eps is negative, NaN or infinite."""


class OffsetError(MeshnormError, ValueError):
    """offset is NaN or infinite."""


class CastingModeError(MeshnormError, ValueError):
    """casting_mode is none of "llama", "gemma", "none"."""


class OptionError(MeshnormError, ValueError):
    """An option (hidden, weight_grad, ...) has a value that does not exist, or one that this call cannot use."""


class MixedTensorError(MeshnormError, TypeError):
    """A plain tensor stands beside a DTensor where both must be the one or the other."""


class MeshMismatchError(MeshnormError, ValueError):
    """x and the weight are DTensors on different meshes."""


class PlacementError(MeshnormError, ValueError):
    """Placements that no tensor of this shape can have on this mesh."""


class UnreachableLayoutError(MeshnormError, ValueError):
    """output_placements asks for a layout that the norm cannot produce from x's layout."""


class DoubleBackwardError(MeshnormError, NotImplementedError):
    """A gradient of the norm's gradient was asked for."""


class TransformError(MeshnormError, NotImplementedError):
    """A DTensor is normalized under a transform of torch.func, in which torch's DTensor takes no part."""
