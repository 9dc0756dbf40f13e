"""Checkpoints: which tensors there are, which part of each a rank needs, reading, verifying, writing."""

from k3_core.checkpoint.a_log import normalize_a_log
from k3_core.checkpoint.names import canonical_name
from k3_core.checkpoint.reader import CheckpointReader
from k3_core.checkpoint.slicing import (
    Shard,
    Topology,
    check_topology,
    expert_range,
    expert_width,
    pad_expert,
    shard_plan,
    tensor_shard,
    tp_sizes,
    vocab_range,
)
from k3_core.checkpoint.table import TensorSpec, tensor_table
from k3_core.checkpoint.tiny import write_tiny
from k3_core.checkpoint.tiny_config import tiny_config
from k3_core.checkpoint.verify import Manifest, check_values, verify_headers
from k3_core.contracts.mxfp4 import pack as pack_mxfp4
from k3_core.contracts.mxfp4 import quantise as quantise_mxfp4
from k3_core.contracts.mxfp4 import unpack as unpack_mxfp4

__all__ = [
    "CheckpointReader",
    "Manifest",
    "Shard",
    "TensorSpec",
    "Topology",
    "canonical_name",
    "check_topology",
    "check_values",
    "expert_range",
    "expert_width",
    "normalize_a_log",
    "pack_mxfp4",
    "pad_expert",
    "quantise_mxfp4",
    "shard_plan",
    "tensor_shard",
    "tensor_table",
    "tiny_config",
    "tp_sizes",
    "unpack_mxfp4",
    "verify_headers",
    "vocab_range",
    "write_tiny",
]
