"""The pieces of a checkpoint: values as JSON, files of intervals, the manifest."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import FILE_NAME, GroupEntry, Manifest, StateEntry
from malleus_ds.checkpoint.part_file import Content, FileEntry, Interval, write_part
from malleus_ds.checkpoint.reading import IntervalReader, check_file, files_to_check
from malleus_ds.checkpoint.values import check_json, decode, encode
from malleus_ds.placement import LogicalTensor

DTYPES = [torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.float16, torch.uint8, torch.float64]

VALUES: list[Any] = [
    {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "names": ["a", ("b", 1)]},
    {1: "one", (2, 3): {"!": "looks like a tag"}},
    Counter({30: 1, 80: 2}),
    float("inf"),
    1e-323,
]


@pytest.mark.parametrize("value", VALUES)
def test_values_come_back_from_json(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, "value"))))
    assert back == value
    assert type(back) is type(value)


def test_scalars_keep_their_dtype() -> None:
    back = decode(json.loads(json.dumps(encode({"step": torch.tensor(7.0)}, "state"))))
    assert back["step"].dtype == torch.float32
    assert back["step"].item() == 7.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"epoch": {"best": torch.ones(2)}}, r"client_state\['epoch'\]\['best'\] is a Tensor"),
        ({"range": (1, 2)}, r"client_state\['range'\] is a tuple"),
        ({"list": [0, {3: 4}]}, r"client_state\['list'\]\[1\] has the key 3"),
        ({"path": Path("x")}, r"client_state\['path'\] is a PosixPath"),
    ],
)
def test_client_state_that_is_not_json_is_named(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_json(value, "client_state")


def test_state_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"LambdaLR\['lambdas'\]\[0\] is a function"):
        encode({"lambdas": [lambda step: step]}, "LambdaLR")


def contents() -> list[Content]:
    """One interval of each dtype, of odd lengths."""
    return [
        Content(Interval("parameter", f"t/{index}@x", 3, 8 + index), torch.arange(5 + index).to(dtype))
        for index, dtype in enumerate(DTYPES)
    ]


def test_a_file_is_what_safetensors_reads_and_its_checksum_is_sha256sum(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    entry = write_part(Disk(), path, contents())
    read = safetensors.torch.load_file(path)
    assert read.keys() == {content.interval.key for content in contents()}
    for content in contents():
        assert read[content.interval.key].dtype == content.values.dtype
        assert torch.equal(read[content.interval.key], content.values)
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_size])
    for content in contents():
        offset = 8 + header_size + header[content.interval.key]["data_offsets"][0]
        assert offset % content.values.element_size() == 0, "aligned"
    assert entry.num_bytes == path.stat().st_size
    assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_any_interval_is_read_from_any_cut(tmp_path: Path) -> None:
    whole = torch.randn(20)
    cuts = [0, 1, 7, 8, 20]
    files = [
        write_part(
            Disk(),
            tmp_path / f"{start}.safetensors",
            [Content(Interval("exp_avg", "w", start, stop), whole[start:stop])],
        )
        for start, stop in itertools.pairwise(cuts)
    ]
    with IntervalReader(tmp_path, files[::-1]) as reader:
        for start in range(20):
            for stop in range(start + 1, 21):
                assert torch.equal(reader.read(Interval("exp_avg", "w", start, stop)), whole[start:stop])
    with (
        IntervalReader(tmp_path, [*files[:1], *files[2:]]) as reader,
        pytest.raises(CheckpointError, match=r"manifest.json: no file has the elements \[1, 20\)"),
    ):
        reader.read(Interval("exp_avg", "w", 0, 20))


def test_each_file_is_checked_by_one_rank_and_the_bytes_are_spread() -> None:
    files = [FileEntry(f"rank_{rank}", 100 + rank, "", ()) for rank in range(8)]
    shares = [files_to_check(files, rank, 3) for rank in range(3)]
    assert sorted(entry.name for share in shares for entry in share) == [entry.name for entry in files]
    assert max(len(share) for share in shares) == 3
    assert len(files_to_check(files[:1], 0, 3)) == 1


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    entry = write_part(Disk(), path, contents())
    check_file(tmp_path, entry)
    intact = path.read_bytes()
    for index in range(0, len(intact), 37):
        path.write_bytes(intact[:index] + bytes([intact[index] ^ 1]) + intact[index + 1 :])
        with pytest.raises(CheckpointError, match=r"part.safetensors: damaged"):
            check_file(tmp_path, entry)
    path.write_bytes(intact[:-1])
    with pytest.raises(CheckpointError, match=r"part.safetensors: has \d+ bytes, but \d+ were written"):
        check_file(tmp_path, entry)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"part.safetensors: cannot be read \(No such file"):
        check_file(tmp_path, entry)


def manifest() -> Manifest:
    return Manifest(
        tensors=(LogicalTensor("0.weight", (2, 3), "float32", 4, (0, 5), None, True),),
        files=(FileEntry("rank_00000.safetensors", 10, "ab", (Interval("parameter", "0.weight", 0, 6),)),),
        optimizer="AdamW",
        groups=(GroupEntry({"lr": 0.1}, {"exp_avg": "float32"}, {"step": 3}),),
        lr_scheduler=StateEntry("WarmupLR", {"last_batch_iteration": 3}),
        loss_scaler=None,
        position={"global_steps": 3},
        seeds={"seed": 1},
        plan={},
        client_state={"epoch": 2},
    )


def test_manifest_round_trip() -> None:
    assert Manifest.parse(manifest().to_json(), Path(FILE_NAME)) == manifest()


def test_every_flipped_byte_of_a_manifest_is_noticed() -> None:
    text = manifest().to_json()
    for index in range(len(text)):
        damaged = text[:index] + bytes([text[index] ^ 1]) + text[index + 1 :]
        with pytest.raises(CheckpointError, match=FILE_NAME):
            Manifest.parse(damaged, Path(FILE_NAME))


def test_another_version_is_refused() -> None:
    data = json.loads(manifest().to_json())
    data["version"] = 2
    with pytest.raises(CheckpointError, match=r"manifest.json: format version 2, but .* reads 1"):
        Manifest.parse(json.dumps(data).encode(), Path(FILE_NAME))
