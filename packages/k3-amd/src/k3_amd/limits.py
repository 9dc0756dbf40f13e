"""What this wheel does not serve beyond what none does: GPUs that its kernels are not built for, forms of experts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from k3_amd import platform
from k3_core.config import K3Config
from k3_core.vllm.serving.limits import ServingHook


class AmdHook(ServingHook):
    """vLLM's configuration hook for this wheel's models."""

    wheel = "k3-amd"
    settings = (*ServingHook.settings, "k3_experts")

    @classmethod
    def device_reasons(cls, vllm_config: Any, config: K3Config) -> Iterator[str]:
        """Another platform or architecture, or no Triton. The first of them is enough: the rest follows from it."""
        refused = platform.refusal()
        if refused is not None:
            yield refused
        elif find_spec("triton") is None:
            yield "Triton is not installed, and every kernel needs it; use the image's own build of PyTorch and Triton"
        else:
            yield from _form_reasons(vllm_config)


#: k3_experts -> architectures whose matrix instructions take the form.
FORMS = {"unpacked": ("gfx942", "gfx950"), "scaled": ("gfx950",), "mxfp8": ("gfx950",)}


def _form_reasons(vllm_config: Any) -> Iterator[str]:
    extra = getattr(vllm_config, "additional_config", None)
    form = extra.get("k3_experts") if isinstance(extra, dict) else None
    if form is None:
        return
    arch = platform.architecture()
    possible = [name for name, places in FORMS.items() if arch in places]
    if form not in possible:
        known = isinstance(form, str) and form in FORMS
        why = f"needs {' or '.join(FORMS[form])}" if known else f"is none of {', '.join(FORMS)}"
        yield f"k3_experts {form!r} {why}; on {arch} possible: {', '.join(possible)}, or leave it out"
