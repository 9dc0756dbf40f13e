"""Checkpoints: which tensors there are, which part of each a rank needs, reading, verifying, writing."""

from k3_core.checkpoint.a_log import normalize_a_log
from k3_core.checkpoint.names import canonical_name
from k3_core.checkpoint.table import TensorSpec, tensor_table
from k3_core.checkpoint.tiny import write_tiny
from k3_core.checkpoint.tiny_config import tiny_config
from k3_core.contracts.mxfp4 import pack as pack_mxfp4
from k3_core.contracts.mxfp4 import quantise as quantise_mxfp4
from k3_core.contracts.mxfp4 import unpack as unpack_mxfp4

__all__ = [
    "TensorSpec",
    "canonical_name",
    "normalize_a_log",
    "pack_mxfp4",
    "quantise_mxfp4",
    "tensor_table",
    "tiny_config",
    "unpack_mxfp4",
    "write_tiny",
]
