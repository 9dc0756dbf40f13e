"""KDA state copy: initial states out of the recurrent cache, final states back, compiled before the first request.

A KDA prefill gathers each request's state from its cache page, runs the chunked arithmetic, and scatters the final
states back. Two plans do the gather and the scatter, chosen from the device and the layout of the cache alone: a fused
Triton plan on Ascend 950, a masked byte copy everywhere else. The life of a plan is prepare, seal, publish
(:mod:`.startup`), at the end of the model runner's initialize_kv_cache (:mod:`.hooks`); serving (:mod:`.plan`) launches
stored objects and refuses what does not fit.
"""

from k3_ascend.state_copy import ops as ops  # registers the traced operators
from k3_ascend.state_copy.hooks import install
from k3_ascend.state_copy.layout import Layout, PlanKind, choose
from k3_ascend.state_copy.operators import state_gather, state_scatter
from k3_ascend.state_copy.plan import StateCopy, StateCopyLayer, of, without_null
from k3_ascend.state_copy.startup import Published, initialise, withdraw

__all__ = [
    "Layout",
    "PlanKind",
    "Published",
    "StateCopy",
    "StateCopyLayer",
    "choose",
    "initialise",
    "install",
    "of",
    "state_gather",
    "state_scatter",
    "withdraw",
    "without_null",
]
