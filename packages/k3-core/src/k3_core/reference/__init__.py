"""The whole model composed from the contracts, in plain PyTorch: the oracle for every other implementation."""

from k3_core.reference.cache import Cache, KdaState, LayerState, MlaState
from k3_core.reference.layers import LayerOutput
from k3_core.reference.model import Output, ReferenceK3, load_model
from k3_core.reference.weights import KdaWeights, LayerWeights, MixWeights, MlpWeights, ModelWeights

__all__ = [
    "Cache",
    "KdaState",
    "KdaWeights",
    "LayerOutput",
    "LayerState",
    "LayerWeights",
    "MixWeights",
    "MlaState",
    "MlpWeights",
    "ModelWeights",
    "Output",
    "ReferenceK3",
    "load_model",
]
