from __future__ import annotations

import math

import pytest

from malleus_ds.cluster import ClusterError, Node, check_rates, node_ranks, parse_hostfile


def test_hostfile_with_comments_and_blank_lines() -> None:
    text = "# two nodes\n\nworker-1 slots=2\n  worker-2   slots=3  # the big one\n"
    nodes = parse_hostfile(text)
    assert nodes == (Node("worker-1", 2), Node("worker-2", 3))
    assert node_ranks(nodes) == ((0, 1), (2, 3, 4))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a slots=2\nhost lots=8\n", ["line 2", "'host lots=8'", "slots="]),
        ("a slots=2 gpus=1\n", ["line 1", "'a slots=2 gpus=1'"]),
        ("a slots=2\n\na slots=4\n", ["line 3", "'a slots=4'", "line 1"]),
        ("a slots=0\n", ["line 1", "at least 1"]),
        ("a slots=-2\n", ["line 1", "at least 1"]),
        ("# nothing\n", ["no host"]),
        ("", ["no host"]),
    ],
)
def test_wrong_hostfiles_are_refused(text: str, parts: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_hostfile(text)
    assert all(part in str(caught.value) for part in parts)


def test_rates_may_be_infinite() -> None:
    check_rates([1.0, 0.9, math.inf], 3)


@pytest.mark.parametrize("rate", [math.nan, 0.0, -1.0, -math.inf])
def test_wrong_rates_name_the_rank(rate: float) -> None:
    with pytest.raises(ClusterError, match="rank 1"):
        check_rates([1.0, rate], 2)


def test_rates_of_other_ranks_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"3 straggling rates for 2 ranks"):
        check_rates([1.0, 1.0, 1.0], 2)
