"""Every way a checkpoint can be wrong gives one clear CheckpointError before weights load (values: while they do)."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3_core.checkpoint import CheckpointReader, verify_headers, write_tiny
from k3_core.checkpoint.tiny import INDEX_NAME
from k3_core.errors import CheckpointError, ConfigError

LAYER = "language_model.model.layers."
SECOND = "model-00002-of-000008.safetensors"
ROUTER = LAYER + "1.block_sparse_moe.gate.weight"
BIAS = LAYER + "1.block_sparse_moe.gate.e_score_correction_bias"
CONV = LAYER + "1.self_attn.q_conv1d.weight"
A_LOG = LAYER + "1.self_attn.A_log"
PACKED = LAYER + "1.block_sparse_moe.experts.3.w1.weight_packed"
SCALE = LAYER + "1.block_sparse_moe.experts.3.w1.weight_scale"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("pristine"), "k3")


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "checkpoint")


def edit(folder, change, shard=SECOND, index=None):
    """Rewrite one shard through `change(tensors)`, and the index through `index(weight_map)`."""
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard)
    if index is not None:
        edit_index(folder, index)


def edit_index(folder, change):
    content = json.loads((folder / INDEX_NAME).read_text())
    change(content["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(content))


def refusal(folder):
    with pytest.raises(CheckpointError) as error:
        verify_headers(folder)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 1600, "one message must stay readable"
    return message


def test_a_good_checkpoint(pristine):
    manifest = verify_headers(pristine)
    index = json.loads((pristine / INDEX_NAME).read_text())
    assert set(manifest) == set(index["weight_map"])
    assert manifest.total_bytes == index["metadata"]["total_size"]
    assert {name: manifest[name].shard for name in manifest} == index["weight_map"]
    assert list(manifest.by_shard()) == sorted(set(index["weight_map"].values()))


def test_missing_shard(folder):
    (folder / SECOND).unlink()
    message = refusal(folder)
    assert f"shard missing (1): {SECOND}" in message
    assert "Fetch the named file again" in message


def test_truncated_shard(folder):
    with (folder / SECOND).open("r+b") as file:
        file.truncate(700_000)
    message = refusal(folder)
    assert f"shard damaged (1): {SECOND}: cut short, 700000 of 810816 bytes are there" in message
    assert "layers.1." in message  # the first tensor that is lost


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_shard_truncated_in_its_header(folder, size):
    with (folder / SECOND).open("r+b") as file:
        file.truncate(size)
    message = refusal(folder)
    assert SECOND in message
    assert "cut short" in message or "not a safetensors file" in message


def test_trailing_bytes(folder):
    with (folder / SECOND).open("ab") as file:
        file.write(b"\0" * 3)
    assert f"{SECOND}: 3 bytes follow its last tensor" in refusal(folder)


def rewrite_header(path, change):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize("key", ["shape", "data_offsets"])
@pytest.mark.parametrize("change", [float, lambda number: -number, str])
def test_shapes_and_offsets_are_counts(folder, key, change):
    """`8.0` would pass for 8 here and be refused only by the reader that opens the shard."""
    rewrite_header(
        folder / SECOND, lambda header: header[ROUTER].update({key: [change(n) for n in header[ROUTER][key]]})
    )
    assert f"{SECOND}: its header is damaged" in refusal(folder)


def test_nesting_deeper_than_json_is_read(folder):
    deep = b"[" * 100_000 + b"]" * 100_000
    (folder / SECOND).write_bytes(struct.pack("<Q", len(deep)) + deep)
    assert f"{SECOND}: its header is damaged (RecursionError" in refusal(folder)
    (folder / INDEX_NAME).write_bytes(deep)
    assert "cannot be read as JSON (RecursionError" in refusal(folder)


def test_damaged_headers(folder):
    rewrite_header(folder / SECOND, lambda header: header[ROUTER].update(shape=[9, 256]))
    assert f"{SECOND}: {ROUTER} is declared BF16 [9, 256] but holds 4096 bytes" in refusal(folder)
    rewrite_header(folder / SECOND, lambda header: header[ROUTER].pop("dtype"))
    assert f"{SECOND}: its header is damaged (KeyError: 'dtype')" in refusal(folder)
    (folder / SECOND).write_bytes(struct.pack("<Q", 4) + b"{{{{")
    assert f"{SECOND}: its header is damaged" in refusal(folder)


def test_missing_tensor(folder):
    edit(folder, lambda tensors: tensors.pop(CONV), index=lambda index: index.pop(CONV))
    message = refusal(folder)
    assert f"tensor missing (1): {CONV}, expected F32 [128, 1, 4], found nothing" in message


def test_tensor_that_only_the_index_knows(folder):
    edit(folder, lambda tensors: tensors.pop(CONV))
    message = refusal(folder)
    assert f"the index places {CONV} in {SECOND}, which does not hold it" in message


def test_tensor_that_the_index_does_not_know(folder):
    edit_index(folder, lambda index: index.pop(CONV))
    assert f"tensor not in the index (1): {CONV} in {SECOND}" in refusal(folder)


def test_index_that_points_elsewhere(folder):
    edit_index(folder, lambda index: index.update({CONV: "model-00001-of-000008.safetensors"}))
    assert f"{CONV} is in {SECOND}, the index says model-00001-of-000008.safetensors" in refusal(folder)


def test_unexpected_tensor(folder):
    name = LAYER + "93.eh_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(2, 3)}), index=lambda i: i.update({name: SECOND}))
    message = refusal(folder)
    assert f"unexpected tensor (1): {SECOND}: {name} (F32 [2, 3])" in message
    assert "MTP are not supported" in message


@pytest.mark.parametrize(
    ("name", "dtype", "expected", "advice"),
    [
        (BIAS, torch.bfloat16, "expected F32, found BF16", "kept in F32"),
        (CONV, torch.bfloat16, "expected F32, found BF16", "kept in F32"),
        (A_LOG, torch.bfloat16, "expected F32, found BF16", "kept in F32"),
        (ROUTER, torch.float32, "expected BF16, found F32", "Convert"),
        (ROUTER, torch.float16, "expected BF16, found F16", "Convert"),
        (PACKED, torch.bfloat16, "expected U8, found BF16", "Only the routed experts are stored packed"),
        (SCALE, torch.int8, "expected U8, found I8", "Only the routed experts are stored packed"),
        (SCALE, torch.float8_e8m0fnu, "expected U8, found F8_E8M0", "Only the routed experts are stored packed"),
    ],
)
def test_wrong_dtype(folder, name, dtype, expected, advice):
    edit(folder, lambda tensors: tensors.update({name: tensors[name].float().to(dtype)}))
    message = refusal(folder)
    assert f"wrong dtype (1): {SECOND}: {name}, {expected}" in message
    assert advice in message


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (ROUTER, (256, 8), "expected [8, 256], found [256, 8]"),
        (PACKED, (64, 32), "expected [64, 64], found [64, 32]"),
        (A_LOG, (3,), "expected [4], found [3]"),
        (A_LOG, (1, 1, 6, 1), "expected [4], found [1, 1, 6, 1]"),
        (LAYER + "1.self_attn.dt_bias", (4, 32), "expected [128], found [4, 32]"),
    ],
)
def test_wrong_shape(folder, name, shape, expected):
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=tensors[name].dtype)}))
    assert f"wrong shape (1): {SECOND}: {name}, {expected}" in refusal(folder)


@pytest.mark.parametrize("shape", [(4,), (6,), (128,), (1, 1, 4, 1)])
def test_a_log_shapes_that_fit(folder, shape):
    stored = torch.zeros(shape)
    edit(folder, lambda tensors: tensors.update({A_LOG: stored}))
    assert CheckpointReader(folder).read(A_LOG).shape == (4,)


def test_tensor_in_two_shards(folder):
    third = "model-00003-of-000008.safetensors"
    router = load_file(folder / SECOND)[ROUTER]
    edit(folder, lambda tensors: tensors.update({ROUTER: router}), shard=third)
    message = refusal(folder)
    assert f"tensor stored twice (1): {ROUTER} in {SECOND} as {ROUTER} and in {third} as {ROUTER}" in message


def test_tensor_under_an_old_and_a_new_name(folder):
    old = CONV.replace("language_model.model.", "language_model.")
    edit(folder, lambda t: t.update({old: t[CONV].clone()}), index=lambda index: index.update({old: SECOND}))
    assert f"tensor stored twice (1): {CONV} in {SECOND}" in refusal(folder)


def test_many_problems_stay_one_short_message(folder):
    def change(tensors):
        for name in list(tensors):
            if ".experts." in name and name.endswith("weight_scale"):
                tensors[name] = tensors[name].to(torch.int8)
            elif ".experts." in name:
                tensors.pop(name)
        tensors["model.extra"] = torch.zeros(1)

    edit(
        folder,
        change,
        index=lambda index: [
            index.pop(n) for n in list(index) if n.startswith(LAYER + "1.") and n.endswith("weight_packed")
        ],
    )
    message = refusal(folder)
    assert "tensor missing (24)" in message
    assert "; and 21 more" in message
    assert "wrong dtype (24)" in message
    assert "unexpected tensor (1)" in message


def test_index_problems(folder):
    for text in ("{}", "[]", "3", '{"weight_map": ["a"]}', '{"weight_map": null}'):
        (folder / INDEX_NAME).write_text(text)
        assert f"{folder / INDEX_NAME}: has no weight_map object" in refusal(folder)
        assert "fetch this file again" in refusal(folder)
    (folder / INDEX_NAME).write_text("")
    assert f"{folder / INDEX_NAME}: cannot be read as JSON" in refusal(folder)
    (folder / INDEX_NAME).write_text('{"weight_map": {"a": "b", "c": 5}}')
    assert "maps c to 5, which is no file name" in refusal(folder)
    (folder / INDEX_NAME).write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    assert "'../../etc/passwd', which is not a plain file name" in refusal(folder)
    (folder / INDEX_NAME).unlink()
    assert "holds neither" in refusal(folder)


def test_one_file_without_an_index(pristine, tmp_path):
    tensors = {}
    for shard in pristine.glob("*.safetensors"):
        tensors |= load_file(shard)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(pristine / "config.json", tmp_path)
    assert len(verify_headers(tmp_path)) == len(tensors)


def test_older_layout_is_read_under_the_released_names(pristine, folder):
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        renamed = {
            name.replace("language_model.model.", "language_model.")
            .replace("mm_projector.proj.0", "mm_projector.linear_1")
            .replace("mm_projector.proj.2", "mm_projector.linear_2")
            .replace(".weight_packed", ".weight"): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, shard)
    (folder / INDEX_NAME).write_text(
        json.dumps({"weight_map": {n: s.name for s in folder.glob("*.safetensors") for n in load_file(s)}})
    )
    expected = dict(CheckpointReader(pristine).tensors(copy=True))
    found = dict(CheckpointReader(folder).tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_config_that_does_not_belong(folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder)
    assert "tensor missing (24)" in message
    assert "wrong shape (8)" in message
    config["text_config"].pop("num_experts")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="num_experts is missing"):
        verify_headers(folder)


def test_kimi_linear_small_tensors_may_be_f32(tmp_path):
    folder = write_tiny(tmp_path, "linear")
    shard = "model-00001-of-000008.safetensors"

    def widen(tensors):
        for name in tensors:
            if "conv1d" in name or name.endswith(("o_norm.weight", "dt_bias")):
                tensors[name] = tensors[name].float()

    edit(folder, widen, shard=shard)
    assert len(verify_headers(folder)) == 279
    router = "model.layers.1.block_sparse_moe.gate.weight"
    edit(folder, lambda t: t.update({router: t[router].float()}), shard="model-00002-of-000008.safetensors")
    assert "expected BF16, found F32" in refusal(folder)


def test_nan_scale_is_found_while_reading(folder):
    def poison(tensors):
        tensors[SCALE][5, 1] = 255
        tensors[SCALE][6, 0] = 255

    edit(folder, poison)
    reader = CheckpointReader(folder)  # headers cannot show it
    with pytest.raises(CheckpointError) as error:
        list(reader.tensors())
    assert f"{SECOND}: {SCALE}: 2 of 256 scale bytes are 255, which is NaN; expected 0..254" in str(error.value)
    assert len(list(reader.tensors(check=False))) == len(reader.manifest)


def test_a_log_tail_is_checked_while_reading(folder):
    edit(folder, lambda tensors: tensors.update({A_LOG: torch.tensor([0.0, 0.1, 0.2, 0.3, 0.0, 0.5])}))
    with pytest.raises(CheckpointError, match="tail is not zero"):
        list(CheckpointReader(folder).tensors())


def test_shard_that_changes_after_verification(folder):
    reader = CheckpointReader(folder)
    with (folder / SECOND).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="changed since it was verified"):
        list(reader.tensors())
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match="changed since it was verified"):
        list(reader.tensors())
