"""Every error k3-core raises on purpose. Each message says what is wrong, where, and what to do about it."""


class K3Error(ValueError):
    """Base of all deliberate refusals; a ValueError, so that servers answer 400 where the cause is a request."""


class ConfigError(K3Error):
    """A configuration that cannot describe Kimi K3 (missing key, contradiction, unsupported value)."""


class CheckpointError(K3Error):
    """A checkpoint whose tensors are missing, unknown, damaged or of the wrong shape or dtype."""


class ImageError(K3Error):
    """An image that cannot be used as input."""


class ChatError(K3Error):
    """A conversation, tool declaration or option that cannot be encoded."""


class UnsupportedError(K3Error):
    """A combination of versions, hardware or flags that cannot work."""
