"""Forms of the routed experts' weights on an NPU: how they are stored, and the two grouped products with SiTU between.

    bf16   MXFP4 unpacked (exact), or plain weights as they are       any generation; 4 times the bytes of MXFP4
    int8   one scale an output channel, activations int8 a token      A2, A3; a lossy requantisation of MXFP4
    w4a8   int4, one scale a group of inputs, activations int8        A2, A3; a lossy requantisation of MXFP4, or
           ModelSlim's own codes, then also with one scale a channel  (:mod:`k3_ascend.modelslim`)
    mxfp   MXFP4 as released, activations MXFP8                       950

Between the products stands the operator ``situ``, never a fused SwiGLU: vllm-ascend's expert layers fuse SwiGLU into
the quantised product (``npu_grouped_matmul_swiglu_quant`` and relatives), which would be another model. Rows arrive
sorted by expert from vllm-ascend's token dispatcher, already quantised where its dispatch does that.

Layouts are those that vllm-ascend 0.23 hands to ``npu_grouped_matmul`` for its own schemes (its quantization/methods):
weights [E, K, N], int4 packed along N, int4 scales as int64 whose low half holds fp32 bits, and the bias 8 * sum_k w s
that the int8-by-int4 product needs. Nothing here was run on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3_ascend.generation import Generation
from k3_core.contracts import mxfp4
from k3_core.errors import ConfigError

Activation = Callable[[Tensor], Tensor]

#: Input columns that share an int4 scale, as in ModelSlim's checkpoints.
INT4_GROUP = 256
FRACTAL_NZ = 29


@dataclass(frozen=True)
class Rows:
    """Rows sorted by expert: x [R, K], its scale where dispatch quantised it, and tokens a local expert [E] int64.

    counts are numbers of rows (``group_list_type`` 1) or their running sums (0).
    """

    x: Tensor
    scale: Tensor | None
    counts: Tensor
    group_list_type: int


class Bf16:
    """Plain products in bfloat16 on weights [E, K, N].

    All forms begin as zeros: with ``--load-format dummy`` nothing is put here, and other bytes may mean NaN.
    """

    quant_type = "NONE"

    def __init__(self, count: int, width: int, latent: int) -> None:
        dtype = torch.get_default_dtype()
        self.width = width
        self.w13 = torch.zeros(count, latent, 2 * width, dtype=dtype)
        self.w2 = torch.zeros(count, width, latent, dtype=dtype)

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """One expert's tensors, packed or plain."""
        gate, up, down = (_plain(parts, matrix, self.w13.dtype, self.w13.device) for matrix in ("w1", "w3", "w2"))
        self.w13[index, :, : self.width].copy_(gate.t())
        self.w13[index, :, self.width :].copy_(up.t())
        self.w2[index].copy_(down.t())

    def finish(self) -> None:
        """The layout that vllm-ascend's setting asks for."""
        self.w13, self.w2 = _layout(self.w13), _layout(self.w2)

    def mlp(self, rows: Rows, activation: Activation) -> Tensor:
        """[R, L] -> [R, L]."""
        gate_up = _grouped(rows.x, self.w13, rows)
        return _grouped(activation(gate_up), self.w2, rows)

    def tensors(self) -> dict[str, Tensor]:
        """All storage by name."""
        return {"w13": self.w13, "w2": self.w2}

    def weights(self) -> Any:
        """This object: it computes itself."""
        return self


class Int8:
    """int8 weights with a scale an output channel, int8 activations with a scale a token."""

    quant_type = "W8A8"
    LEVELS = 127

    def __init__(self, count: int, width: int, latent: int) -> None:
        self.width = width
        self.w13 = torch.zeros(count, latent, 2 * width, dtype=torch.int8)
        self.w2 = torch.zeros(count, width, latent, dtype=torch.int8)
        # The product's result has the dtype of the scale.
        self.w13_scale = torch.zeros(count, 2 * width, dtype=torch.bfloat16)
        self.w2_scale = torch.zeros(count, latent, dtype=torch.bfloat16)

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """One expert, requantised."""
        for matrix, codes, scales in self._places(index):
            values = _plain(parts, matrix, torch.float32, codes.device)
            scale = channel_scale(values, self.LEVELS)
            scales.copy_(scale)
            codes.copy_((values / scale.float()[:, None]).round().clamp(-self.LEVELS, self.LEVELS).t())

    def _places(self, index: int) -> tuple[tuple[str, Tensor, Tensor], ...]:
        half = self.width
        return (
            ("w1", self.w13[index, :, :half], self.w13_scale[index, :half]),
            ("w3", self.w13[index, :, half:], self.w13_scale[index, half:]),
            ("w2", self.w2[index], self.w2_scale[index]),
        )

    def finish(self) -> None:
        """The layout that vllm-ascend's setting asks for."""
        self.w13, self.w2 = _layout(self.w13), _layout(self.w2)

    def mlp(self, rows: Rows, activation: Activation) -> Tensor:
        """[R, L] -> [R, L]."""
        x, scale = _quantised(rows)
        gate_up = _grouped(x, self.w13, rows, scale=self.w13_scale, per_token=scale)
        inner, inner_scale = torch.ops.npu.npu_dynamic_quant(activation(gate_up))
        return _grouped(inner, self.w2, rows, scale=self.w2_scale, per_token=inner_scale)

    def tensors(self) -> dict[str, Tensor]:
        """All storage by name."""
        return {"w13": self.w13, "w13_scale": self.w13_scale, "w2": self.w2, "w2_scale": self.w2_scale}

    def weights(self) -> Any:
        """This object: it computes itself."""
        return self


class W4A8:
    """int4 weights with a scale a group of inputs (0: a channel), int8 activations with a scale a token."""

    quant_type = "W4A8"

    def __init__(self, count: int, width: int, latent: int, group: int = INT4_GROUP) -> None:
        for name, size in (("latent width", latent), ("expert width", width)):
            if size % (group or 8) or size % 8:
                raise ConfigError(f"int4 experts need a {name} that {group} divides, not {size}; use k3_experts int8")
        self.width, self.group = width, group
        self.w13 = torch.zeros(count, latent, 2 * width // 8, dtype=torch.int32)
        self.w2 = torch.zeros(count, width, latent // 8, dtype=torch.int32)
        self.w13_scale = torch.zeros(count, latent // (group or latent), 2 * width, dtype=torch.int64)
        self.w2_scale = torch.zeros(count, width // (group or width), latent, dtype=torch.int64)
        self.w13_bias = torch.zeros(count, 2 * width, dtype=torch.float32)
        self.w2_bias = torch.zeros(count, latent, dtype=torch.float32)

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """One expert, requantised."""
        for matrix in ("w1", "w2", "w3"):
            values = _plain(parts, matrix, torch.float32, self.w13.device)
            codes, scale = to_int4(values, self.group)
            self.put_codes(index, matrix, codes, scale)

    def put_codes(self, index: int, matrix: str, codes: Tensor, scale: Tensor) -> None:
        """One matrix of int4 codes: int8 [N, K] in -8 .. 7 and fp32 scales [N, K / group], [N, 1] per channel."""
        half = self.width
        packed = pack_int4(codes.t().contiguous())
        if self.group:
            scale = scale.half().float()  # the precision that the vendor's own conversion keeps
        bits = scale.t().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        bias = 8 * (codes.float() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)).sum(1)
        if matrix == "w2":
            places = self.w2[index], self.w2_scale[index], self.w2_bias[index]
        elif matrix == "w1":
            places = self.w13[index, :, : half // 8], self.w13_scale[index, :, :half], self.w13_bias[index, :half]
        else:
            places = self.w13[index, :, half // 8 :], self.w13_scale[index, :, half:], self.w13_bias[index, half:]
        for place, value in zip(places, (packed, bits, bias), strict=True):
            place.copy_(value)

    def finish(self) -> None:
        """The layout that vllm-ascend's setting asks for, of the bytes before they count as int32."""
        self.w13, self.w2 = (_layout(w.view(torch.int8)).view(torch.int32) for w in (self.w13, self.w2))

    def mlp(self, rows: Rows, activation: Activation) -> Tensor:
        """[R, L] -> [R, L]."""
        x, scale = _quantised(rows)
        rows = _counted(rows)
        gate_up = _grouped(x, self.w13, rows, scale=self.w13_scale, per_token=scale, bias=self.w13_bias)
        inner, inner_scale = torch.ops.npu.npu_dynamic_quant(activation(gate_up))
        return _grouped(inner, self.w2, rows, scale=self.w2_scale, per_token=inner_scale, bias=self.w2_bias)

    def tensors(self) -> dict[str, Tensor]:
        """All storage by name."""
        names = ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")
        return {name: getattr(self, name) for name in names}

    def weights(self) -> Any:
        """This object: it computes itself."""
        return self


class Mxfp:
    """MXFP4 weights as released, MXFP8 activations (950)."""

    quant_type = "W4A8MXFP"

    def __init__(self, count: int, width: int, latent: int) -> None:
        if latent % 64 or width % 64:
            raise ConfigError(f"MXFP4 experts on a 950 need widths that 64 divides, not {latent} and {width}")
        self.width = width
        self.w13 = torch.zeros(count, 2 * width, latent // 2, dtype=torch.uint8)
        self.w2 = torch.zeros(count, latent, width // 2, dtype=torch.uint8)
        self.w13_scale = torch.zeros(count, 2 * width, latent // mxfp4.GROUP_SIZE, dtype=torch.uint8)
        self.w2_scale = torch.zeros(count, latent, width // mxfp4.GROUP_SIZE, dtype=torch.uint8)

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """One expert, as it is."""
        half = self.width
        for kind, w13, w2 in (
            ("weight_packed", self.w13[index], self.w2[index]),
            ("weight_scale", self.w13_scale[index], self.w2_scale[index]),
        ):
            w13[:half].copy_(parts["w1", kind])
            w13[half:].copy_(parts["w3", kind])
            w2.copy_(parts["w2", kind])

    def finish(self) -> None:
        """Weights to the vendor's format as [E, K, N], scales to pairs as [E, K / 64, N, 2]."""
        self.w13, self.w2 = (self._format(w).transpose(1, 2) for w in (self.w13, self.w2))
        self.w13_scale, self.w2_scale = (
            s.unflatten(-1, (-1, 2)).transpose(1, 2) for s in (self.w13_scale, self.w2_scale)
        )

    def _format(self, weight: Tensor) -> Tensor:
        import torch_npu

        formatted: Tensor = torch_npu.npu_format_cast(
            weight, FRACTAL_NZ, customize_dtype=torch.float8_e4m3fn, input_dtype=torch_npu.float4_e2m1fn_x2
        )
        return formatted

    def mlp(self, rows: Rows, activation: Activation) -> Tensor:
        """[R, L] -> [R, L]."""
        if rows.scale is None:
            x, scale = torch.ops.npu.npu_dynamic_mx_quant(rows.x, dst_type=torch.float8_e4m3fn)
        else:
            x, scale = rows.x, _pairs(rows.scale)
        gate_up = self._product(x, scale, self.w13, self.w13_scale, rows)
        inner, inner_scale = torch.ops.npu.npu_dynamic_mx_quant(activation(gate_up), dst_type=torch.float8_e4m3fn)
        return self._product(inner, inner_scale, self.w2, self.w2_scale, rows)

    def _product(self, x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, rows: Rows) -> Tensor:
        import torch_npu

        result: Tensor = torch_npu.npu_grouped_matmul(
            [x],
            [weight],
            antiquant_scale=[weight_scale],
            per_token_scale=[scale],
            group_list=rows.counts,
            split_item=2,
            group_type=0,
            group_list_type=rows.group_list_type,
            output_dtype=torch.bfloat16,
            weight_dtype=torch_npu.float4_e2m1fn_x2,
            per_token_scale_dtype=torch_npu.float8_e8m0fnu,
        )[0]
        return result

    def tensors(self) -> dict[str, Tensor]:
        """All storage by name."""
        return {"w13": self.w13, "w13_scale": self.w13_scale, "w2": self.w2, "w2_scale": self.w2_scale}

    def weights(self) -> Any:
        """This object: it computes itself."""
        return self


Form = Bf16 | Int8 | W4A8 | Mxfp
FORMS: dict[str, type[Any]] = {"bf16": Bf16, "int8": Int8, "w4a8": W4A8, "mxfp": Mxfp}
_ON: dict[str, tuple[Generation, ...]] = {
    "bf16": tuple(Generation),
    "int8": (Generation.A2, Generation.A3),
    "w4a8": (Generation.A2, Generation.A3),
    "mxfp": (Generation.A950,),
}


def choose(want: str | None, quantised: bool, generation: Generation, widths: tuple[int, ...]) -> str:
    """The form of the experts: the wanted one (``additional_config`` key ``k3_experts``), or the generation's own.

    widths: latent and expert width of this rank. Raises ConfigError for a form that cannot be used here, with the
    reason and those that can.
    """
    possible = [name for name in FORMS if _refusal(name, quantised, generation, widths) is None]
    if want is None:
        if not quantised:
            return "bf16"
        return next(name for name in ("mxfp", "w4a8", "int8") if name in possible)
    unknown = not isinstance(want, str) or want not in FORMS
    why = f"it is not one of {', '.join(FORMS)}" if unknown else _refusal(want, quantised, generation, widths)
    if why is not None:
        raise ConfigError(f"k3_experts {want!r} cannot be used: {why}; possible here: {', '.join(possible)}")
    return want


def _refusal(name: str, quantised: bool, generation: Generation, widths: tuple[int, ...]) -> str | None:
    if generation not in _ON[name]:
        return f"it is for {', '.join(g.value for g in _ON[name])}, this is {generation.value}"
    if name == "mxfp" and not quantised:
        return "the checkpoint's experts are not stored as MXFP4"
    if name == "w4a8" and any(w % INT4_GROUP for w in widths):
        return f"groups of {INT4_GROUP} do not divide the widths {widths}"
    return None


# --------------------------------------------------------------------------------------------------------- quantisation


def channel_scale(values: Tensor, levels: int) -> Tensor:
    """bfloat16 scale of each output channel of [N, K]: the largest value becomes ``levels``; zero channels get 1."""
    largest = values.abs().amax(1)
    return torch.where(largest > 0, largest / levels, 1.0).to(torch.bfloat16)


def to_int4(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """int8 codes in -8 .. 7 and fp32 scales [N, K / group] of values [N, K]; the largest magnitude of a group is 7."""
    grouped = values.unflatten(1, (-1, group))
    largest = grouped.abs().amax(-1)
    # Scales are kept in half precision on the way to the device; codes are chosen for the scale that will be used.
    scale = torch.where(largest > 0, largest / 7, 1.0).half().float()
    codes = (grouped / scale.unsqueeze(-1)).round().clamp(-8, 7)
    return codes.flatten(1).to(torch.int8), scale


def pack_int4(codes: Tensor) -> Tensor:
    """int8 codes [K, N] -> int32 [K, N / 8]: two a byte along N, the even column in the low nibble."""
    low, high = codes[:, 0::2], codes[:, 1::2]
    packed = (low & 0x0F) | (high << 4)
    return packed.contiguous().view(torch.int32)


def _plain(parts: dict[tuple[str, str], Tensor], matrix: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values [N, K] of one matrix, packed or plain. Unpacking to bfloat16 is exact."""
    plain = parts.get((matrix, "weight"))
    if plain is not None:
        return plain.to(device=device, dtype=dtype)
    packed, scale = parts[matrix, "weight_packed"], parts[matrix, "weight_scale"]
    return mxfp4.unpack(packed.to(device), scale.to(device), dtype)


# ------------------------------------------------------------------------------------------------------------- products


def _grouped(
    x: Tensor,
    weight: Tensor,
    rows: Rows,
    *,
    scale: Tensor | None = None,
    per_token: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """One product of each expert's rows with its matrix: [R, K] by [E, K, N] -> [R, N] in bfloat16."""
    import torch_npu

    optional = {"scale": scale, "per_token_scale": per_token, "bias": bias}
    result: Tensor = torch_npu.npu_grouped_matmul(
        [x],
        [weight],
        **{name: [tensor] for name, tensor in optional.items() if tensor is not None},
        group_list=rows.counts,
        split_item=2,
        group_type=0,
        group_list_type=rows.group_list_type,
        output_dtype=None if scale is None else torch.bfloat16,
    )[0]
    return result


def _quantised(rows: Rows) -> tuple[Tensor, Tensor]:
    """The rows in int8 with a scale a token: as dispatched, or quantised here."""
    if rows.scale is not None:
        return rows.x, rows.scale
    x, scale = torch.ops.npu.npu_dynamic_quant(rows.x)
    return x, scale


def _counted(rows: Rows) -> Rows:
    """The same with numbers of rows: the int8-by-int4 product takes no running sums."""
    if rows.group_list_type == 1:
        return rows
    counts = torch.cat([rows.counts[:1], torch.diff(rows.counts)])
    return Rows(rows.x, rows.scale, counts, 1)


def _pairs(scale: Tensor) -> Tensor:
    """Scales of MXFP8 rows as the product takes them: [R, K / 64, 2]."""
    return scale.unflatten(-1, (-1, 2)) if scale.dim() == 2 else scale


def _layout(weight: Tensor) -> Tensor:
    """vllm-ascend's data layout of a matrix: fractal where its setting ``weight_nz_mode`` says so."""
    if weight.device.type != "npu":
        return weight
    from vllm_ascend.utils import maybe_trans_nz

    formatted: Tensor = maybe_trans_nz(weight)
    return formatted
