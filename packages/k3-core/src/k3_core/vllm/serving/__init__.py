"""What the vendors' full models share and that touches vLLM: everything but the layer order and the kernels.

A vendor writes the order of its layers (``model.py``), its layers' use of kernels and its own limits; from here come

modules       matrices of one rank, norms, the gated MLP, and what loading needs to know
dispatch      which implementation of an operator runs here, and why
library       vLLM's own fused experts as an implementation
cache         sizes of states and of cache pages
kda_metadata  what KDA layers need to know about an engine step
kda_layer     weights, projections and cache interface of a KDA layer
moe_layer     router, routed experts in the latent space, shared experts beside
mla_layer     a gated NoPE-MLA layer over vLLM's attention
mla_cpu       its attention call on a CPU, for tests
attn_res      the mix of attention residuals as a layer
stack         the text stack around the layers: stages, hand-off, auxiliary states, names
experts       where routed experts live in the released layout, and how they arrive
beside        a second stream for what of a layer does not depend on the first
reductions    how partial results of experts are summed over ranks
vision        the vision tower, data-parallel over ranks
loading       filling a model, every tensor straight to its final place
outer         what vLLM asks of the text model and of the multimodal model around the layers
limits        what no wheel serves, refused before weights load
warmup        meeting every kernel variant before the first request

Written for vLLM 0.32 and 0.33. Nothing here knows a vendor.
"""
