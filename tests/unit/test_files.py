"""Model, cluster, rate and host files: what they mean, and that every fault is told in a line."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from malleus_ds.cluster import Links
from malleus_ds.files import (
    FileError,
    cluster_from_hostfile,
    load_cluster,
    load_model,
    make_request,
    parse_rates,
    published_cluster,
)
from malleus_ds.model_profile import LayerProfile
from tests.harness import REPOSITORY, run_command

GIB = 2**30
MIB = 2**20
MODEL = """\
num_micro_batches: 12
micro_batch_size: 2
micro_batch_sizes: {1: 0.55, 2: 1.0, 4: 1.9, 5: 2.4}
rho: {2: 1.0, 1: 1.9}
cluster: {num_nodes: 2, devices_per_node: 4}
memory: {capacity_mib: 1000, reserve_mib: 100, device_mib: 50.5}
message_mib: 8
embedding_mib: 7
layers:
  - {name: embedding, time_ms: 1, state_mib: 3}
  - {count: 4, time_ms: 1e1, state_mib: 10, optimizer_mib: 60, gradient_mib: 5, activation_mib: [2, 5]}
  - {name: head, time_ms: 3, optimizer_ms: 2, activation_mib: 1}
"""
CLUSTER = """\
nodes:
  - {host: a, devices: 2, memory_gib: 80}
  - {devices: 3, memory_gib: 40}
rates: {0: 2.57, "4": inf}
links: {intra_gb_per_s: 200, inter_gb_per_s: 25}
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_model_file(tmp_path: Path) -> None:
    model = load_model(written(tmp_path, "mine.yaml", MODEL))
    assert (model.name, model.num_micro_batches, model.micro_batch_size) == ("mine", 12, 2)
    assert (model.num_nodes, model.devices_per_node) == (2, 4)
    assert (model.memory_bytes, model.reserve_bytes) == (900 * MIB, 100 * MIB)
    profile = model.profile
    assert profile.rho == ((2, 1.0), (1, 1.9))
    assert profile.tau == ((1, 0.55), (2, 1.0), (4, 1.9), (5, 2.4))
    assert (profile.device_bytes, profile.message_bytes) == (50.5 * MIB, 8 * MIB)
    block = LayerProfile("block", 0.01, 10 * MIB, 60 * MIB, 0, (2 * MIB, 5 * MIB), 5 * MIB)
    assert profile.layers[1:5] == (block,) * 4
    assert len(profile.layers) == 6
    assert profile.layers[0] == LayerProfile("embedding", 0.001, state_bytes=10 * MIB, activation_table=(0,))
    assert profile.layers[5].state_bytes == 7 * MIB
    assert profile.layers[5].optimizer_s == 0.002
    assert [profile.layers[5].activations(number) for number in (1, 2, 3)] == [MIB, 2 * MIB, 3 * MIB]


def test_model_file_as_json_means_the_same(tmp_path: Path) -> None:
    data = {
        "name": "same",
        "num_micro_batches": 4,
        "rho": {"2": 1.0, "1": 2},
        "cluster": {"num_nodes": 1, "devices_per_node": 2},
        "memory": {"capacity_mib": 100},
        "layers": {"count": 3, "time_ms": 5},
    }
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in data.items())
    as_json = load_model(written(tmp_path, "model.json", json.dumps(data)))
    assert as_json == load_model(written(tmp_path, "model.yaml", text))
    assert as_json.profile.rho == ((2, 1.0), (1, 2.0))
    assert as_json.profile.layer_times_s == (0.005,) * 3


def test_keys_may_be_merged_and_replaced_in_yaml(tmp_path: Path) -> None:
    layers = "layers:\n  - &block {count: 2, time_ms: 5}\n  - {<<: *block, time_ms: 7}\n"
    model = load_model(written(tmp_path, "m.yaml", MODEL.split("layers:")[0] + layers))
    assert model.profile.layer_times_s == (0.005, 0.005, 0.007, 0.007)


def test_cluster_file(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, "c.yaml", CLUSTER))
    assert cluster.hosts == ("a", "node-1")
    assert cluster.nodes == ((0, 1), (2, 3, 4))
    assert cluster.rates == (2.57, 1.0, 1.0, 1.0, math.inf)
    assert cluster.memory_bytes == (80 * GIB, 40 * GIB)
    assert cluster.links == Links(200e9, 25e9)


def test_cluster_file_as_json_with_little_in_it(tmp_path: Path) -> None:
    text = '{"nodes": [{"devices": 2, "memory_gib": 80}, {"devices": 2, "memory_gib": 80}]}'
    cluster = load_cluster(written(tmp_path, "c.json", text))
    assert cluster.memory_bytes == 80 * GIB
    assert cluster.rates == (1.0,) * 4
    assert cluster.links is None


def test_example_cluster_is_what_its_comments_say() -> None:
    cluster = load_cluster(REPOSITORY / "configs/example_cluster.yaml")
    assert [len(ranks) for ranks in cluster.nodes] == [8, 8, 4]
    assert {rank: rate for rank, rate in enumerate(cluster.rates) if rate != 1} == {0: 2.57, 9: math.inf}


def test_hostfile(tmp_path: Path) -> None:
    cluster = cluster_from_hostfile(written(tmp_path, "hosts", "a slots=2\nb slots=1\n"))
    assert (cluster.hosts, cluster.nodes, cluster.rates) == (("a", "b"), ((0, 1), (2,)), (1.0,) * 3)


@pytest.mark.parametrize(
    "source", ['{"0": 5.42, "2": "inf"}', '{"0": 5.42, "2": Infinity}', {0: 5.42, "2": math.inf}]
)
def test_rates(source: str) -> None:
    assert parse_rates(source, 3) == (5.42, 1.0, math.inf)


@pytest.mark.parametrize(("name", "text"), [("r.json", '{"1": 3}'), ("r.yaml", "1: 3\n")])
def test_rates_from_a_file(tmp_path: Path, name: str, text: str) -> None:
    assert parse_rates(str(written(tmp_path, name, text)), 2) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ('{"0": -5}', ["--rates", "rank 0", "-5", "positive"]),
        ('{"0": 0}', ["rank 0", "positive"]),
        ('{"0": NaN}', ["rank 0", "nan", "positive"]),
        ('{"8": 2}', ["rank 8", "8 devices", "0 to 7"]),
        ('{"-1": 2}', ["rank -1", "0 to 7"]),
        ('{"a": 2}', ["'a'", "not a rank"]),
        ('{"0": "fast"}', ["rank 0", "'fast'", "not a number"]),
        ('{"0": true}', ["rank 0", "True", "not a number"]),
        ('{"0": 1, "0": 2}', ["'0'", "twice"]),
        ({0: 1, "0": 2}, ["rank 0", "twice"]),
        ("{", ["--rates", "not JSON", "line 1, column 2"]),
        ("no-such-file.json", ["no-such-file.json", "no such file"]),
    ],
)
def test_wrong_rates_are_refused_in_one_line(source: str, parts: list[str]) -> None:
    with pytest.raises(FileError) as caught:
        parse_rates(source, 8)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("memory_gib: 80", "memory_gb: 80", ["nodes[0].memory_gb", "unknown key", "80", "'memory_gib'"]),
        ("links:", "network:", ["network", "unknown key", "allowed are nodes, rates, links"]),
        ("inter_gb_per_s", "inter_gb_s", ["links.inter_gb_s", "'inter_gb_per_s'"]),
        (", inter_gb_per_s: 25", "", ["links.inter_gb_per_s", "missing"]),
        ("devices: 2", "devices: two", ["nodes[0].devices", "'two'", "whole number"]),
        ("devices: 2", "devices: 0", ["nodes[0].devices", "0", "at least 1"]),
        ("memory_gib: 80", "memory_gib: .nan", ["nodes[0].memory_gib", "nan"]),
        (", memory_gib: 40", "", ["nodes[1].memory_gib", "missing", "for all nodes or for none"]),
        ("0: 2.57", "0: -2.57", ["rates", "rank 0", "-2.57", "positive"]),
        ("0: 2.57", "0: .nan", ["rates", "rank 0", "nan", "positive"]),
        ("0: 2.57", "5: 2.57", ["rates", "rank 5", "5 devices", "0 to 4"]),
        ("0: 2.57", "4: 2.57", ["'4'", "twice", "line 4"]),
        ("links:", "nodes: []\nlinks:", ["'nodes'", "twice", "line 5"]),
        ("rates: {", "rates: [", ["not YAML", "line 4"]),
        ("host: a", "host: 3", ["nodes[0].host", "3", "quotes"]),
        (CLUSTER, "", ["empty"]),
        (CLUSTER, "- 1", ["[1]", "key: value"]),
        (CLUSTER, "nodes: []", ["nodes", "at least one"]),
        (CLUSTER, "a: !!python/object:os.system x", ["not YAML", "line 1"]),
    ],
)
def test_wrong_cluster_files_are_refused_in_one_line_per_fault(
    tmp_path: Path, old: str, new: str, parts: list[str]
) -> None:
    assert old in CLUSTER
    path = written(tmp_path, "bad.yaml", CLUSTER.replace(old, new, 1))
    with pytest.raises(FileError) as caught:
        load_cluster(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert any(all(part in line for part in parts) for line in lines), lines


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("rho: {2: 1.0", "rho: {2: 1.1", ["rho", "2", "1.1", "1.0"]),
        ("rho: {2: 1.0", "rho: {3: 1.0", ["rho", "3", "powers of two"]),
        ("rho: {2: 1.0, 1: 1.9}", "rho: {}", ["rho", "at least one"]),
        ("2: 1.0, 4: 1.9", "4: 1.9", ["micro_batch_sizes", "profiled size 2", "2: 1.0"]),
        ("capacity_mib: 1000", "capacity_mib: 150", ["memory", "capacity_mib (150)", "larger"]),
        ("count: 4", "counts: 4", ["layers[1].counts", "unknown key", "'count'"]),
        ("time_ms: 1e1", "time_ms: -1", ["layers[1].time_ms", "-1", "at least 0"]),
        ("time_ms: 1e1", "time_ms: slow", ["layers[1].time_ms", "'slow'", "number"]),
        ("activation_mib: [2, 5]", "activation_mib: [2, x]", ["layers[1].activation_mib[1]", "'x'"]),
        ("num_micro_batches: 12\n", "", ["num_micro_batches", "missing"]),
        ("num_micro_batches: 12", "num_micro_batches: 12.5", ["num_micro_batches", "12.5", "whole"]),
        ("{num_nodes: 2, devices_per_node: 4}", "8", ["cluster", "8", "key: value"]),
    ],
)
def test_wrong_model_files_are_refused_in_one_line_per_fault(
    tmp_path: Path, old: str, new: str, parts: list[str]
) -> None:
    assert old in MODEL
    path = written(tmp_path, "bad.yaml", MODEL.replace(old, new, 1))
    with pytest.raises(FileError) as caught:
        load_model(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert any(all(part in line for part in parts) for line in lines), lines


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = "nodes: [" + "{devices: 0}, " * 7 + "]\n"
    with pytest.raises(FileError) as caught:
        load_cluster(written(tmp_path, "bad.yaml", text))
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert "nodes[4].devices" in lines[4]
    assert "2 more" in lines[5]


@pytest.mark.parametrize("text", ["", "# nothing\n", "host lots=8\n"])
def test_wrong_hostfiles_name_the_file(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, "hosts", text)
    with pytest.raises(FileError, match="slots=") as caught:
        cluster_from_hostfile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, part in ((tmp_path, "cannot be read"), (tmp_path / "none.yaml", "no such"), (binary, "UTF-8")):
        for load in (load_cluster, cluster_from_hostfile, load_model):
            with pytest.raises(FileError, match=part):
                load(path)


def test_unknown_model_names_those_there_are() -> None:
    with pytest.raises(FileError, match="7b: no such model; give 32b, 70b, 110b or the path"):
        load_model("7b")


def test_request_of_the_published_cluster(tmp_path: Path) -> None:
    model = load_model(written(tmp_path, "m.yaml", MODEL))
    assert published_cluster(model).nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    request = make_request(model)
    assert request.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert request.rates == (1.0,) * 8
    assert (request.num_micro_batches, request.micro_batch_size, request.global_batch_size) == (12, 2, 24)
    assert request.micro_batch_sizes == (1, 2, 4)  # Fives do not make up 24.
    assert request.memory_bytes == 900 * MIB
    assert (request.links, request.message_s) == (None, 0.0)


def test_request_of_another_cluster(tmp_path: Path) -> None:
    model = load_model(written(tmp_path, "m.yaml", MODEL))
    cluster = load_cluster(written(tmp_path, "c.yaml", CLUSTER))
    request = make_request(model, cluster, rates=(1.0, 2.0, 1.0, 1.0, 1.0), global_batch_size=30)
    assert request.rates == (1.0, 2.0, 1.0, 1.0, 1.0)
    assert (request.num_micro_batches, request.global_batch_size) == (15, 30)
    assert request.micro_batch_sizes == (1, 2, 5)
    assert request.memory_bytes == (80 * GIB - 100 * MIB, 40 * GIB - 100 * MIB)
    assert request.links == cluster.links
    assert request.message_s == pytest.approx(2 * 8 * MIB / 25e9)


def test_request_refuses_what_does_not_fit(tmp_path: Path) -> None:
    model = load_model(written(tmp_path, "m.yaml", MODEL))
    for size in (25, 0, -2):
        with pytest.raises(FileError, match=f"global batch {size}: .* multiple of .* size 2"):
            make_request(model, global_batch_size=size)
    small = written(tmp_path, "c.yaml", CLUSTER.replace("memory_gib: 40", "memory_gib: 0.05"))
    with pytest.raises(FileError, match=r"memory_gib of the cluster is 0\.05"):
        make_request(model, load_cluster(small))


def test_nothing_heavy_is_loaded_before_use() -> None:
    heavy = "{'torch', 'pydantic', 'yaml', 'numpy', 'scipy', 'cvxpy', 'rich'}"
    code = f"import sys, malleus_ds.files; print({heavy} & sys.modules.keys())"
    assert run_command([sys.executable, "-c", code], timeout_s=60).stdout.strip() == "set()"


def test_planning_page_has_every_key_with_its_default() -> None:
    """Each table of the reference, in the order of the page."""
    from malleus_ds.files import schema

    sections: tuple[type[BaseModel], ...] = (
        schema.ModelSchema,
        schema.LayerSchema,
        schema.ProfiledClusterSchema,
        schema.MemorySchema,
        schema.ClusterSchema,
        schema.NodeSchema,
        schema.LinksSchema,
    )
    rows = [
        (key, "required" if field.is_required() else f"`{json.dumps(field.get_default())}`")
        for section in sections
        for key, field in section.model_fields.items()
    ]
    text = (REPOSITORY / "docs/planning.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", text, flags=re.MULTILINE) == rows


def test_examples_of_the_planning_page_can_be_loaded(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/planning.md").read_text(encoding="utf-8")
    cluster, model = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert cluster == (REPOSITORY / "configs/example_cluster.yaml").read_text(encoding="utf-8")
    loaded = load_model(written(tmp_path, "model.yaml", model))
    assert len(loaded.profile.layers) == 26
    request = make_request(loaded, load_cluster(REPOSITORY / "configs/example_cluster.yaml"))
    assert request.world_size == 20
