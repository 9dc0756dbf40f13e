"""Deciding which installed wheel serves Kimi K3 in this process, and telling vLLM about it.

Every wheel (k3-core, k3-nvidia, k3-amd, k3-ascend) has one ``vllm.general_plugins`` entry point that describes itself
as a :class:`Wheel` and calls :func:`register`. vLLM runs all of them, in every process, in an order that depends on
``sys.path``; the decision below does not depend on that order: the wheel whose vendor is the platform's acts, all
others stay silent. ``K3_IMPL`` overrides the platform for comparisons and for running a vendor's model on a CPU.

Nothing here initialises a device and nothing here raises: what cannot be done is said in one line, and vLLM is left
as it was. The steps that change vLLM return their own undo, so that a failure half-way is rolled back.
"""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from k3_core import CONTRACT_VERSION
from k3_core.vllm import versions

ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")
ENTRY_POINT_GROUP = "vllm.general_plugins"
#: vendor -> the name of the wheel's entry point
WHEELS = {"reference": "k3_core", "nvidia": "k3_nvidia", "amd": "k3_amd", "ascend": "k3_ascend"}
UPSTREAM = "upstream"

Undo = Callable[[], None]
Step = Callable[[], Undo]


@dataclass(frozen=True)
class Wheel:
    """What a distribution says about itself.

    Attributes:
        name: distribution name, for messages.
        version: distribution version, for messages.
        vendor: ``reference``, ``nvidia``, ``amd`` or ``ascend``.
        models: architecture -> ``"module:Class"``, imported by vLLM only when such a model is loaded. Empty while a
            wheel has no model yet: then it never acts.
        contracts: versions of k3-core's contracts the wheel was built against.
        vllm, transformers: specifiers of supported releases.
        config_hook: ``"module:Class"`` of a class with ``verify_and_update_model_config(model_config)`` and
            ``verify_and_update_config(vllm_config)``, called for our architectures before any weight is read.
        steps: further changes to vLLM that this wheel alone needs.
    """

    name: str
    version: str
    vendor: str
    models: Mapping[str, str]
    contracts: frozenset[int]
    vllm: str
    transformers: str
    config_hook: str | None = None
    steps: tuple[Step, ...] = field(default=(), repr=False)


@dataclass
class _State:
    """What this process has decided so far."""

    active: Wheel | None = None
    served: str = ""
    undo: list[Undo] = field(default_factory=list)
    said: set[str] = field(default_factory=set)


_state = _State()


def register(wheel: Wheel) -> bool:
    """Register ``wheel`` with vLLM if it is the one to act in this process; idempotent, never raises.

    Returns:
        True when this wheel is the acting one after the call.
    """
    try:
        return _register(wheel)
    except Exception as error:  # a plugin that raises would take vLLM down with it
        _rollback()
        _say(logging.ERROR, f"{wheel.name} {wheel.version}: registration failed, vLLM is left as it was: {error!r}")
        return False


def active() -> Wheel | None:
    """The wheel that acts in this process, or None."""
    return _state.active


def announce() -> None:
    """Log which wheel serves the model that is being configured; called by the configuration hook.

    vLLM 0.32 sets its log up after plugins are loaded, so an INFO line written while registering would be lost.
    """
    if _state.served:
        _say(logging.INFO, _state.served)


def unregister() -> None:
    """Undo everything :func:`register` did in this process (for tests and interactive comparison)."""
    _rollback()
    _state.said.clear()


def _register(wheel: Wheel) -> bool:
    if _state.active is not None:
        if _state.active.name != wheel.name and _state.active.vendor == wheel.vendor:
            _say(
                logging.WARNING,
                f"{wheel.name} {wheel.version}: {_state.active.name} {_state.active.version} already serves Kimi K3 "
                f"as '{wheel.vendor}' in this process; {wheel.name} does nothing. Uninstall one of them.",
            )
        return _state.active.name == wheel.name
    choice, why = choose(os.environ.get("K3_IMPL"), _platform())
    if choice is None:
        _say(logging.ERROR if why.startswith("K3_IMPL") else logging.INFO, f"{why}; vLLM is left as it is")
        return False
    if choice == UPSTREAM:
        _say(logging.INFO, "K3_IMPL=upstream: Kimi K3 is served by vLLM's own implementation")
        return False
    if choice != wheel.vendor:
        _say(logging.INFO, f"{wheel.name} {wheel.version} is not used here: Kimi K3 is '{choice}' ({why})")
        _report_absent(choice, why)
        return False
    refusal = refuse(wheel)
    if refusal:
        _say(logging.ERROR, f"{wheel.name} {wheel.version} does nothing and vLLM is left as it was: {refusal}")
        return False
    _apply(_steps(wheel))
    _state.active = wheel
    _state.served = f"{wheel.name} {wheel.version} serves Kimi K3 and Kimi-Linear ('{wheel.vendor}', {why})"
    return True


def choose(override: str | None, platform: str | None) -> tuple[str | None, str]:
    """Which vendor is to act, and why.

    Args:
        override: the value of ``K3_IMPL``; None or empty leaves the choice to the platform.
        platform: ``reference``, ``nvidia``, ``amd`` or ``ascend``, or None for a platform no wheel is made for.

    Returns:
        ``(vendor, reason)``; vendor is None when nothing is to be registered, ``"upstream"`` when that was asked for.
    """
    if override:
        known = (*WHEELS, UPSTREAM)
        if override not in known:
            return None, f"K3_IMPL={override!r} is unknown; use one of {', '.join(sorted(known))}"
        return override, f"K3_IMPL={override}"
    if platform is None:
        return None, "no Kimi K3 implementation is made for this platform"
    return platform, "chosen by platform"


def refuse(wheel: Wheel) -> str | None:
    """Why ``wheel`` must not act here (contract or version mismatch, no model), in one line; None when it may."""
    if CONTRACT_VERSION not in wheel.contracts:
        wanted = ", ".join(str(version) for version in sorted(wheel.contracts))
        return (
            f"it was built for contract version {wanted} but k3-core {_core_version()} has version "
            f"{CONTRACT_VERSION}; install matching releases"
        )
    mismatch = versions.mismatch(wheel.vllm, wheel.transformers)
    if mismatch:
        return mismatch
    if not wheel.models:
        return "this release has no model yet"
    return None


def _steps(wheel: Wheel) -> Iterable[Step]:
    from k3_core.vllm import compat

    for architecture, target in wheel.models.items():
        yield lambda a=architecture, t=target: compat.register_model(a, t)  # type: ignore[misc]
        yield lambda a=architecture: compat.register_config_hook(a, wheel.config_hook, announce)  # type: ignore[misc]
    yield compat.register_config_classes
    yield lambda: compat.register_tokenizer("kimi_k3", "k3_core.vllm.tokenizer", "KimiK3Tokenizer")
    yield lambda: compat.register_renderer("kimi_k3", "k3_core.vllm.renderer", "KimiK3Renderer")
    yield compat.register_parsers
    yield from wheel.steps


def _apply(steps: Iterable[Step]) -> None:
    for step in steps:
        _state.undo.append(step())


def _rollback() -> None:
    while _state.undo:
        _state.undo.pop()()
    _state.active, _state.served = None, ""


def _platform() -> str | None:
    """The vendor of vLLM's current platform, found without touching a device."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return "nvidia"
    if current_platform.is_rocm():
        return "amd"
    if current_platform.is_cpu():
        return "reference"
    if getattr(current_platform, "device_type", None) == "npu":
        return "ascend"
    return None


def _report_absent(choice: str, why: str) -> None:
    """Say it, once, when the chosen vendor's wheel is not installed: then nobody will act."""
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    if WHEELS[choice] not in {entry_point.name for entry_point in entry_points}:
        distribution = WHEELS[choice].replace("_", "-")
        level = logging.ERROR if why.startswith("K3_IMPL") else logging.INFO
        _say(
            level, f"Kimi K3 for '{choice}' ({why}) needs {distribution}, which is not installed; vLLM is left as it is"
        )


def _core_version() -> str:
    from k3_core import __version__

    return __version__


def _say(level: int, message: str) -> None:
    """Log ``message`` once; vLLM's worker processes repeat what the first process said at DEBUG only."""
    if message in _state.said:
        return
    _state.said.add(message)
    if multiprocessing.parent_process() is not None:
        level = logging.DEBUG
    _logger().log(level, message)


def _logger() -> logging.Logger:
    # A child of vLLM's own logger: vLLM installs a handler there and nowhere else, so other names would be silent.
    return logging.getLogger("vllm.plugins.k3")
