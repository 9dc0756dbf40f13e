"""A trace is swept into times by kernel and part that add up to the step; the page has them where a trace is there."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
BENCHMARKS = PACKAGE / "benchmarks"
PAUSE = 20.0


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def swept(*spans: tuple[str, int, float, float]) -> tuple[dict[str, list[float]], float]:
    """name -> [launches, sum, exposed], and the gaps."""
    import engine_timeline

    found = engine_timeline.sweep(spans, PAUSE)
    return {name: figures for name, _, *figures in found["rows"]}, found["gaps"]


def test_a_dependent_that_starts_early_waits_at_the_first_ones_cost() -> None:
    # programmatic dependent launch: b's blocks are there from 6 on and wait until a ends at 10
    assert swept(("a", 7, 0, 10), ("b", 7, 6, 15), ("c", 7, 14, 16)) == (
        {"a": [1, 10, 10], "b": [1, 9, 5], "c": [1, 2, 1]},
        0,
    )


def test_the_earliest_that_still_runs_has_the_instant() -> None:
    # at 4..6 three run; the one that started last, and the one that ends last, would both be wrong
    assert swept(("a", 7, 0, 6), ("b", 8, 2, 20), ("c", 9, 4, 8))[0] == {
        "a": [1, 6, 6],
        "b": [1, 18, 14],
        "c": [1, 4, 0],
    }


def test_a_second_stream_is_exposed_where_the_first_has_nothing() -> None:
    rows, gaps = swept(("a", 7, 0, 100), ("b", 8, 20, 60), ("b", 8, 90, 105), ("a", 7, 107, 110))
    assert rows == {"a": [2, 103, 103], "b": [2, 55, 5]}
    assert gaps == 2


def test_gaps_are_short_and_waits_are_not_gaps() -> None:
    rows, gaps = swept(("a", 7, 0, 10), ("b", 7, 13, 20), ("a", 7, 40, 41), ("a", 7, 61.5, 62))
    assert rows == {"a": [3, 11.5, 11.5], "b": [1, 7, 7]}
    assert gaps == 3 + 20, "41 to 61.5 is a wait for the host"


def test_rows_are_in_the_order_of_first_starts_whatever_order_the_trace_has() -> None:
    assert list(swept(("b", 7, 5, 6), ("a", 7, 8, 9), ("c", 7, 0, 1))[0]) == ["c", "b", "a"]


def busy(times: list[tuple[float, float]]) -> float:
    """The union of spans, pauses below PAUSE included: what exposed times and gaps must add up to."""
    total, begin, end = 0.0, None, 0.0
    for first, last in sorted(times):
        if begin is None or first > end + PAUSE:
            total += end - begin if begin is not None else 0.0
            begin, end = first, last
        end = max(end, last)
    return total + (end - begin if begin is not None else 0.0)


def test_against_every_instant_by_itself() -> None:
    import engine_timeline

    rng = random.Random(5)
    for _ in range(50):
        spans = []
        for n in range(30):  # starts of their own: of two that start together either may be the first
            start = n + 30 * rng.randrange(0, 9) + rng.randrange(0, 2) * 300
            spans.append((f"k{rng.randrange(6)}", rng.randrange(3), float(start), float(start + rng.randrange(1, 40))))
        spans = list({start: span for span in spans for start in [span[2]]}.values())
        exposed: dict[str, int] = {}
        for instant in range(800):
            running = [(start, name) for name, _, start, end in spans if start <= instant < end]
            if running:
                name = min(running)[1]
                exposed[name] = exposed.get(name, 0) + 1
        rng.shuffle(spans)
        found = engine_timeline.sweep(spans, PAUSE)
        assert {name: row[2] for name, _, *row in found["rows"] if row[2]} == exposed
        whole = busy([(start, end) for _, _, start, end in spans])
        assert sum(row[4] for row in found["rows"]) + found["gaps"] == pytest.approx(whole, abs=1e-6)


ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, 4> >(R)"
GEMM = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT"


def labelled(*names: str, stream: int = 7) -> list[tuple[str, str]]:
    import engine_timeline

    return engine_timeline.labels([(name, stream, float(i), i + 1.0) for i, name in enumerate(names)])


def test_the_head_is_the_last_product_before_sampling() -> None:
    parts = [
        part for _, part in labelled(GEMM, "_attn_res_kernel", GEMM, "void cublasLt::splitKreduce_kernel<32>", ARGMAX)
    ]
    assert parts == ["projections", "AttnRes", *["head, sampling"] * 3]
    assert [part for _, part in labelled("vector_kernel", "dot_kernel", ARGMAX, ARGMAX, "vector_kernel")] == [
        "projections", "head, sampling", "head, sampling", "head, sampling", "projections",
    ]  # fmt: skip
    assert labelled("dot_kernel", ARGMAX)[0] == ("dot_kernel (head)", "head, sampling")


def test_neighbours_on_a_stream_say_whose_a_kernel_is() -> None:
    import engine_timeline

    topk = "void vllm::moe::single_group_topk::detail::single_group_topk_block_kernel<float>"
    situ, marlin = "void vllm::situ_and_mul_kernel<c10::BFloat16>", "void marlin_moe_wna16::Marlin<1125899906909960l>"
    assert [part for _, part in labelled(GEMM, GEMM, topk, marlin, situ, marlin, situ)] == [
        "projections", "experts", "experts", "experts", "experts", "experts", "experts",
    ]  # fmt: skip
    assert [part for _, part in labelled(GEMM, situ, GEMM)] == ["projections", "shared experts, dense", "projections"]
    two = [(marlin, 7, 0.0, 1.0), (situ, 8, 2.0, 3.0), (GEMM, 8, 3.0, 4.0), (topk, 7, 4.0, 5.0)]
    assert [part for _, part in engine_timeline.labels(two)] == [
        "experts", "shared experts, dense", "projections", "experts",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "short", "part"),
    [
        ("_Z25_flash_kda_fwd_recurrenceIN4cute9TiledCopyI", "_flash_kda_fwd_recurrence", "KDA"),
        ("void (anonymous namespace)::kda_decode_many_heads_kernel<4>(P)", "kda_decode_many_heads_kernel", "KDA"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<A> > >", None, "MLA"),
        ("void flash::flash_fwd_splitkv_mla_combine_kernel<float>", None, "MLA"),
        ("void humming<MmaOpClass, Shape<0u, 512u, 3584u>, Shape<8u, 256u, 128u> >", "humming 512x3584", "experts"),
        ("kernel_cutlass_kernel_________________0", "cute:________________0", "AttnRes"),
        ("kernel_cutlass_kernel_ptrbf16gmem_ptrbf16gmemalign16_ptrbf16gmem_i32", None, "projections"),
        (
            "kernel_cutlass_kernel_vllmmodel_executorkernelslinearcute_dsl_ll_bf16_dotprodLLBf16Dotprod_object_at_",
            "cute:ll_bf16_dotprodLLBf16Dotprod_object",
            "projections",
        ),
        ("void fused_a_gemm_kernel<1, 1536, 7168>", "fused_a_gemm_kernel", "projections"),
        ("nvjet_sm90_tss_128x256_64x4_1x2_h_bz_coopA_TNN", "nvjet_tss_128x256_64x4_1x2_h_bz_coopA_TN", "experts"),
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(x)", "rms_norm_kernel", "norms, glue"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >",
            "vectorized_elementwise_kernel:FillFunctor",
            "vLLM's own, the rest",
        ),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD ", "vLLM's own, the rest"),
    ],
)  # fmt: skip
def test_names(name: str, short: str | None, part: str) -> None:
    import engine_timeline

    assert engine_timeline.part_of(name) == part
    assert len(engine_timeline.shortened(name)) <= 40
    if short is not None:
        assert engine_timeline.shortened(name) == short[:40]


def _jitted(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_every_kernel_of_this_wheel_has_a_part() -> None:
    """But the one that packs weights when they are loaded."""
    import engine_timeline

    names = []
    for path in (PACKAGE / "src" / "k3_nvidia" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and _jitted(node):
                names.append(node.name)
    sources = [path.read_text() for path in (PACKAGE / "src" / "k3_nvidia" / "kernels" / "cuda").glob("*.cu")]
    names += [name for source in sources for name in re.findall(r"__global__ void [^;{]*?(\w+_cuda)\(", source)]
    assert len(names) > 30
    assert "kda_chunk_cuda" in names
    assert "w13_one_kernel" in names
    assert [n for n in names if engine_timeline.part_of(n) == engine_timeline.REST] == ["repack_kernel"]


def test_largest_kernels_of_the_recorded_engines_have_a_part() -> None:
    import engine_timeline

    lines = [json.loads(line) for line in (BENCHMARKS / "results" / "engine.jsonl").read_text().splitlines()]
    # a timeline's own lines hold (shortened name, part) pairs, small kernels that nobody claims among them
    timelines = [line for line in lines if line.get("part") == "timeline"]
    names = {name for line in lines if line.get("part") != "timeline" for name in line.get("kernels", [])}
    assert names
    assert all(line["parts"] == list(engine_timeline.PARTS) for line in timelines)
    assert [n for n in names if engine_timeline.part_of(n) == engine_timeline.REST] == []


def step(scale: float, kernels: int = 60) -> dict[str, Any]:
    import engine_timeline

    parts = engine_timeline.PARTS
    rows = [[f"a_kernel_of_{i}_and_{'x' * 20}", parts[i % 9], 2.0, scale * (i + 2), scale * i] for i in range(kernels)]
    return {"rows": rows, "gaps": 7.0}


def test_a_line_stays_small_and_its_parts_whole() -> None:
    import engine_timeline

    who = {"shape": "tp16", "impl": "ours", "experts": "k3-nvidia"}
    cases = {f"decode {n}": step(n) for n in (1, 8, 32, 128, 1024)}
    line = engine_timeline.line(who, cases)
    assert len(json.dumps(line)) < 6000
    assert line["part"] == "timeline"
    for n in (1, 8, 32, 128, 1024):
        case = line["cases"][f"decode {n}"]
        assert sum(case["parts"]) == pytest.approx(n * 60 * 59 / 2)
        assert case["us"] == case["gaps"] + sum(case["parts"])
        assert case["launches"] == 120
        assert len(case["rows"]) < 60
        assert len(case["parts"]) == len(engine_timeline.PARTS)
    name, part = line["kernels"][line["cases"]["decode 1024"]["rows"][-1][0]]
    assert name.startswith("a_kernel_of_59")
    assert line["parts"][part] == engine_timeline.PARTS[59 % 9]


def test_the_page_has_a_table_where_there_are_timelines(tmp_path: Path) -> None:
    import engine_rows
    import engine_timeline

    def line(impl: str, experts: str, scale: float) -> dict[str, Any]:
        who = {"shape": "tp16", "impl": impl, "experts": experts}
        return engine_timeline.line(who, {"decode 1": step(scale, 9)})

    rank = {"part": "rank", "shape": "tp16", "impl": "ours", "experts": "k3-nvidia", "decode_batch": 1, "ms": 2.0}
    (tmp_path / "engine.jsonl").write_text(json.dumps(rank) + "\n")
    assert "tables" not in json.loads(engine_rows.write(tmp_path).read_text()), "nothing to show"
    found = [rank, line("ours", "k3-nvidia", 9.0), line("ours", "k3-nvidia", 1.0)]
    found += [line("upstream", "marlin", 4.0), line("upstream", "auto", 3.0)]
    (tmp_path / "engine.jsonl").write_text("".join(json.dumps(f) + "\n" for f in found))
    path = engine_rows.write(tmp_path)
    ((title, rows),) = json.loads(path.read_text())["tables"].items()
    assert title.startswith("tp16")
    by = {row.pop("part"): row for row in rows}
    assert by["sum of parts"] == {"decode 1 ours": 36.0, "decode 1 theirs": 108.0}, "the later trace, the faster rival"
    assert by["whole"]["decode 1 ours"] == 36 + by["gaps"]["decode 1 ours"] == 43
    assert by["launches"]["decode 1 ours"] == 18
    assert by["sum of spans"]["decode 1 ours"] == 54
    assert by[engine_timeline.PARTS[1]]["decode 1 theirs"] == 3

    spec = importlib.util.spec_from_file_location("render_docs", PACKAGE.parents[1] / "ci" / "render_docs.py")
    assert spec is not None
    assert spec.loader is not None
    renderer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(renderer)
    page = renderer.recorded_section(path)
    assert f"### {title}" in page
    assert "| whole | 43 | 115 |" in page
