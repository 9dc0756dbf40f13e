"""Kimi K3 for vLLM: configuration, checkpoint, chat, multimodal processing, contracts and the reference model."""

__version__ = "0.1.0"

#: Version of the contracts between k3-core and the vendor wheels (operator signatures, schedule, loaders).
#: A vendor wheel states the versions it was built against and refuses any other by name.
CONTRACT_VERSION = 1
