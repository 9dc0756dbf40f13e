"""Everything that touches vLLM and is common to all wheels, and the reference model that serves on a CPU.

plugin        k3-core's entry point
registration  which installed wheel acts, and the steps that tell vLLM about it
versions      supported releases of vLLM and transformers
compat        the differences between those releases, all in one module
limits        what the reference refuses before weights load
config        configuration classes for releases of vLLM that lack them
tokenizer     the checkpoint's vocabulary as a vLLM tokenizer
renderer      chats to token ids, by segments
processor     images to patches and placeholders
parsers       model output to reasoning, content and tool calls
backends      what the state cache and the latent cache ask of vLLM
model         the multimodal reference model; text_model and layers below it
"""
