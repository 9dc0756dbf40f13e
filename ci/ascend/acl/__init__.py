"""Stand-in for CANN's Python binding ``acl``, as far as vllm-ascend imports it; it can do nothing."""
