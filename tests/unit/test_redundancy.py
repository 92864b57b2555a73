"""Redundancy without ranks: who keeps what, what counts, and what is whole."""

from __future__ import annotations

import itertools
import resource
import signal
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_ds.checkpoint.part_file import Content, Interval
from malleus_ds.config import ConfigError, parse_config
from malleus_ds.pipe.in_memory import memory_directory
from malleus_ds.redundancy import copying
from malleus_ds.redundancy.errors import RedundancyError
from malleus_ds.redundancy.gathering import locate
from malleus_ds.redundancy.keeper import Arrangement, check_room
from malleus_ds.redundancy.part import Part, PartHeader, lay_out, map_part, read_header
from malleus_ds.redundancy.partners import copy_ranks
from malleus_ds.redundancy.survey import Generation, listing, newest


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), min_size=1, max_size=12))
def test_each_share_has_its_copy_on_the_next_node(ranks: list[tuple[int, int]]) -> None:
    node_of = {rank: node for rank, (node, _) in enumerate(ranks)}
    num_bytes = [size for _, size in ranks]
    nodes = sorted(set(node_of.values()))
    partners = copy_ranks(num_bytes, node_of)
    for rank, partner in enumerate(partners):
        if len(nodes) == 1 or not num_bytes[rank]:
            assert partner is None
            continue
        assert partner is not None
        assert node_of[partner] == nodes[(nodes.index(node_of[rank]) + 1) % len(nodes)]
    for node in nodes:
        loads = [
            sum(num_bytes[rank] for rank, partner in enumerate(partners) if partner == keeper)
            for keeper in node_of
            if node_of[keeper] == node
        ]
        assert max(loads) - min(loads) <= max(num_bytes)


def header(rank: int = 0, num_bytes: int = 10, sections: tuple = ()) -> PartHeader:  # type: ignore[type-arg]
    return PartHeader("run-1", 7, rank, (("a", "b"), ("b", "a"), ()), num_bytes, "model", sections, "{}")


def test_nothing_is_overwritten_before_the_device_has_met_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's collectives return before the ranks have met, so the host must wait for them."""
    met, told = threading.Event(), []

    class Event:
        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            assert met.wait(10)
            told.append("met")

    monkeypatch.setattr(copying, "get_accelerator", lambda: SimpleNamespace(Event=Event))

    def parts() -> tuple[None, dict[int, Part]]:
        told.append("parts")
        return None, {}

    group: Any = None
    running = copying.Copying(parts, group, timedelta(seconds=10), torch.device("cuda", 0))
    running.wait(0.1)
    assert told == ["record"]
    met.set()
    running.wait()
    assert told == ["record", "met", "parts"]


def test_a_part_counts_only_while_it_is_whole(tmp_path: Path) -> None:
    stem = tmp_path / "run-1" / "rank_00000.own.0"
    part = Part(stem)
    part.begin(10).fill_(3)
    assert read_header(stem) is None
    part.finish(header().to_json())
    assert read_header(stem) == header()
    assert map_part(stem, 10).tolist() == [3] * 10
    assert listing(tmp_path) == {("run-1", 7): {0: header().hosts}}

    part.begin(10)
    assert read_header(stem) is None
    part.finish(header(num_bytes=11).to_json())
    assert read_header(stem) is None, "bytes are missing"
    part.finish(header().to_json()[:-3])
    assert read_header(stem) is None
    assert listing(tmp_path) == {}
    part.remove()
    assert list(stem.parent.iterdir()) == []
    assert listing(tmp_path / "absent") == {}


def test_a_full_memory_is_an_error_and_no_signal(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(RedundancyError, match=r"part.bin: cannot hold 5000 bytes .*more memory"):
            Part(tmp_path / "part").begin(5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


TWO_SHARES = {0: (("a", "b"), ("b", "a"), ()), 1: (("a", "b"), ("b", "a"), ())}


def test_the_newest_whole_generation() -> None:
    only_0, both = {0: TWO_SHARES[0]}, TWO_SHARES
    assert newest([{}, {}]) == (None, "the memory of the present hosts is empty")
    assert newest([{("r", 4): both}, {("r", 4): only_0}]) == (Generation("r", 4, {0: (0, 1), 1: (0,)}), "")
    # Two halves of a generation are not a whole of two.
    found, why = newest([{("r", 5): only_0, ("r", 4): both}, {("s", 5): {1: TWO_SHARES[1]}}])
    assert found == Generation("r", 4, {0: (0,), 1: (0,)})
    assert (
        "of step 5 these shares of parameters and optimizer state are lost: rank 0's (kept by a and b)" in why
    )
    found, why = newest([{("r", 5): only_0}, {("r", 5): only_0}])
    assert found is None
    assert why.endswith("are lost: rank 1's (kept by b and a)")


@settings(deadline=None)
@given(st.data())
def test_intervals_are_found_whatever_they_were_cut_into(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    values = torch.rand(size, dtype=torch.float64).float()
    parts: dict[int, list[Content]] = {0: [], 1: [], 2: []}
    for start, stop in itertools.pairwise(cuts):
        content = Content(Interval("exp_avg", "weight", start, stop), values[start:stop])
        parts[data.draw(st.integers(0, 2))].append(content)
    parts[1].append(Content(Interval("parameter", "weight", 0, 3), torch.zeros(3, dtype=torch.bfloat16)))
    headers, memory = {}, {}
    for source, contents in parts.items():
        sections, ordered, num_bytes = lay_out(contents)
        headers[source] = header(source, num_bytes, sections)
        assert PartHeader.parse(headers[source].to_json()) == headers[source]
        blocks = [content.values.view(torch.uint8) for content in ordered]
        memory[source] = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.uint8)
        assert memory[source].numel() == num_bytes
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    (found,) = locate([Interval("exp_avg", "weight", start, stop)], headers)
    blocks = [memory[piece.source][piece.start : piece.stop] for piece in found.pieces]
    assert torch.equal(torch.cat(blocks).view(torch.float32), values[start:stop])
    assert locate([Interval("parameter", "weight", 1, 3)], headers)[0].pieces[0].source == 1
    with pytest.raises(
        RedundancyError, match=rf"no part has the elements \[{size}, {size + 1}\) of 'exp_avg'"
    ):
        locate([Interval("exp_avg", "weight", start, size + 1)], headers)


def test_wrong_settings_name_the_key_and_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"malleus.redundancy.interval_steps: .*, but it is 0"):
        parse_config({"redundancy": {"interval_steps": 0}})
    with pytest.raises(ConfigError, match=r"malleus.redundancy.copies: unknown key"):
        parse_config({"redundancy": {"copies": 2}})
    monkeypatch.delenv("MALLEUS_MEMORY_DIR", raising=False)
    with pytest.raises(ConfigError, match=r"directory is null and MALLEUS_MEMORY_DIR is not set"):
        memory_directory(None)
    monkeypatch.setenv("MALLEUS_MEMORY_DIR", str(tmp_path))
    assert memory_directory(None) == tmp_path
    assert memory_directory("/dev/shm/job") == Path("/dev/shm/job")


def test_what_a_rank_keeps() -> None:
    arrangement = Arrangement.make(
        "plan", "run-1", [10, 0, 30, 20], ["a", "a", "b", "b"], {0: 0, 1: 0, 2: 1, 3: 1}
    )
    assert arrangement.partners == (2, None, 0, 1)
    assert arrangement.hosts == (("a", "b"), (), ("b", "a"), ("b", "a"))
    assert [arrangement.generation_bytes(rank) for rank in range(4)] == [40, 20, 40, 20]


def test_a_memory_that_is_too_small_is_known_before_the_first_copy(tmp_path: Path) -> None:
    arrangement = Arrangement.make("plan", "run-1", [10**18, 10**18], ["a", "b"], {0: 0, 1: 1})
    directory = tmp_path / "memory"
    message = rf"directory is '{directory}' on a: has room for .* take {4 * 10**18}"
    with pytest.raises(RedundancyError, match=message):
        check_room(directory, "a", arrangement, [0])
    check_room(directory, "a", Arrangement.make("plan", "run-1", [5, 5], ["a", "b"], {0: 0, 1: 1}), [0])
