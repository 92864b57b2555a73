"""The division of layers over equal pipelines, against every division written out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_ds.model_profile import LayerProfile, ModelProfile
from malleus_ds.pipe.partitioning import balanced_boundaries, num_stages_of, partition_layers
from malleus_ds.plan import PlanError


def parts_of(weights: Sequence[Any], boundaries: Sequence[int]) -> list[list[Any]]:
    return [list(weights[start:stop]) for start, stop in itertools.pairwise(boundaries)]


def sums(weights: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    return [sum(part) for part in parts_of(weights, boundaries)]


def partition(method: Any, num_stages: int, names: Sequence[str], **options: Any) -> list[int]:
    return partition_layers(method, num_stages, names, lambda: [1] * len(names), **options)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_division_has_a_smaller_largest_part_or_more_equal_parts(weights: list[int], data: Any) -> None:
    num_parts = data.draw(st.integers(1, len(weights)))
    boundaries = balanced_boundaries(weights, num_parts)
    assert [boundaries[0], boundaries[-1], len(boundaries)] == [0, len(weights), num_parts + 1]
    assert all(parts_of(weights, boundaries)), "a stage without a layer"

    def badness(cuts: Sequence[int]) -> tuple[int, int, int, int]:
        each = sums(weights, cuts)
        num_bare = sum(weights[stop - 1] == 0 for stop in cuts[1:])
        return (
            max(each),
            sum(s**2 for s in each),
            num_bare,
            sum((b - a) ** 2 for a, b in itertools.pairwise(cuts)),
        )

    everything = itertools.combinations(range(1, len(weights)), num_parts - 1)
    assert badness(boundaries) == min(badness([0, *cuts, len(weights)]) for cuts in everything)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_each_stage_has_a_layer_of_the_type_where_there_are_enough(kinds: list[bool], data: Any) -> None:
    num_stages = data.draw(st.integers(1, len(kinds)))
    names = ["Transformer" if kind else "Norm" for kind in kinds]
    if not any(kinds):
        with pytest.raises(PlanError, match=r"'type:transformer' matches no layer: name one of \['Norm'\]"):
            partition("type:transformer", num_stages, names)
        return
    counts = sums(kinds, partition("type:transformer", num_stages, names))
    assert sum(counts) == sum(kinds)
    assert max(counts) - min(counts) <= 1  # so none is without, where there are enough


@given(st.integers(1, 60), st.data())
def test_uniform_stages_differ_by_one_layer_at_most(num_layers: int, data: Any) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    sizes = [
        len(part)
        for part in parts_of(range(num_layers), partition("uniform", num_stages, ["x"] * num_layers))
    ]
    assert sum(sizes) == num_layers
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("weights", "num_parts", "largest"),
    [([6, 3, 2, 1, 7, 9, 3], 4, 10), ([1, 7, 2, 2, 3], 4, 7), ([1, 9, 3, 2], 3, 9)],
)
@pytest.mark.parametrize("method", ["parameters", "best", "profile"])
def test_largest_parts_that_others_miss(
    method: str, weights: list[int], num_parts: int, largest: int
) -> None:
    costs = weights if method == "profile" else None
    boundaries = partition_layers(method, num_parts, ["x"] * len(weights), lambda: weights, costs)
    assert max(sums(weights, boundaries)) == largest


@pytest.mark.parametrize(("num_layers", "num_stages"), [(5, 4), (38, 8), (7, 2), (30, 4), (40, 16)])
def test_equal_layers_on_stages_that_do_not_divide_them(num_layers: int, num_stages: int) -> None:
    for method in ("uniform", "parameters", "type:Layer"):
        sizes = [
            len(p) for p in parts_of(range(num_layers), partition(method, num_stages, ["Layer"] * num_layers))
        ]
        assert sum(sizes) == num_layers
        assert {max(sizes), min(sizes)} <= {num_layers // num_stages, num_layers // num_stages + 1}


def test_42_transformer_layers_with_others_on_16_stages() -> None:
    names = ["Embedding", *["TransformerLayer"] * 42, "Norm", "Head"]
    stages = parts_of(names, partition("type:transformer", 16, names))
    counts = [stage.count("TransformerLayer") for stage in stages]
    assert sum(counts) == 42
    assert set(counts) == {2, 3}


def test_layers_without_weight_go_with_what_follows_them() -> None:
    weights = [0, 2, 0, 1, 1, 1, 1, 0, 0, 2, 0]
    boundaries = partition("profile", 4, ["x"] * 11, layer_costs=weights)
    assert parts_of(weights, boundaries) == [[0, 2], [0, 1, 1], [1, 1], [0, 0, 2, 0]]


def test_costs_may_be_a_profile_of_an_earlier_run() -> None:
    profile = ModelProfile(tuple(LayerProfile("x", time_s=time_s) for time_s in (0.3, 0.1, 0.1, 0.1)))
    assert partition("profile", 2, ["x"] * 4, layer_costs=profile) == [0, 1, 4]


@pytest.mark.parametrize("method", [[0, 1, 6], [(0, 1), (1, 6)], ([0, 1], [1, 6]), list(np.array([0, 1, 6]))])
def test_ranges_and_boundaries_are_taken_as_they_are(method: Any) -> None:
    assert num_stages_of(method) == 2
    assert partition(method, 2, ["x"] * 6) == [0, 1, 6]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ([(0, 1), (2, 6)], "a stage ends at 1, but the next begins at 2"),
        ([(0, 3), (2, 6)], "a stage ends at 3, but the next begins at 2"),
        ([(0, 1), (1, 5)], "from 0 to the number of layers, 6"),
        ([0, 1, 7], "from 0 to the number of layers, 6"),
        ([1, 2, 6], "from 0 to the number of layers, 6"),
        ([0, 0, 6], "at least one layer per stage"),
        ([0, 2, 4, 6], "describes 3 stages, but num_stages is 2"),
        ([(0, 2, 6)], "use 'uniform', 'parameters'"),
        ([0, (1, 6)], "use 'uniform', 'parameters'"),
        ([], "use 'uniform', 'parameters'"),
        ("fastest", "partition_method is 'fastest': use 'uniform', 'parameters'"),
        ("profile", "needs measured times: pass layer_costs="),
        ("type:(", "no valid pattern"),
    ],
)
def test_wrong_methods_are_refused(method: Any, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        partition(method, 2, ["x"] * 6)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([1.0] * 5, "layer_costs has 5 entries for 6 layers"),
        ([1.0] * 5 + [-1.0], r"layer_costs[5] is -1.0"),
        ([1.0] * 5 + [float("nan")], r"layer_costs[5] is nan"),
    ],
)
def test_wrong_costs_are_refused(costs: list[float], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        partition("profile", 2, ["x"] * 6, layer_costs=costs)
    assert words in str(caught.value)
    with pytest.raises(PlanError, match="set it to 'profile'"):
        partition("uniform", 2, ["x"] * 6, layer_costs=[1.0] * 6)


@pytest.mark.parametrize("method", ["uniform", "parameters", "best", "type:x"])
def test_fewer_layers_than_stages_are_refused(method: str) -> None:
    with pytest.raises(PlanError, match=r"3 layers cannot fill 5 stages.*leaves ranks standby"):
        partition(method, 5, ["x"] * 3)
