"""The mathematics of Kimi K3, one module a part.

Each module states the formula, shapes, dtypes, source and the tolerance an implementation is held to. The functions
are plain PyTorch, readable against the formula, in fp32 for BF16 and fp32 inputs and in fp64 for fp64 inputs.

attn_res  attention residuals: the schedule of the bank and the mix
kda       Kimi Delta Attention: convolution, gates, recurrence, chunked form, output norm, speculative verify
mla       gated multi-head latent attention without positions, unabsorbed and absorbed
moe       router and latent mixture of experts, whole, tensor-parallel and expert-parallel
situ      the SiTU-GLU activation (and SwiGLU for Kimi-Linear)
mxfp4     the packed expert weights
norm      RMS norms with the reference's rounding points
vision    tower, projector, positions
"""

from k3_core.contracts import attn_res, kda, mla, moe, mxfp4, norm, situ, vision

__all__ = ["attn_res", "kda", "mla", "moe", "mxfp4", "norm", "situ", "vision"]
