from __future__ import annotations

import pytest

from malleus_ds.detector.calibration import (
    CalibrationError,
    LayerClass,
    LayerMeasurement,
    calibrate,
    split_overhead,
)


def layer_time(mean_s: float, num_micro_batches: int = 4, **num_bytes: int) -> LayerMeasurement:
    return LayerMeasurement(num_micro_batches, mean_s * num_micro_batches, **num_bytes)


def classes_of(*names: str) -> list[LayerClass]:
    return [LayerClass(name) for name in names]


def test_layers_of_a_class_cost_the_same_and_a_slow_rank_does_not_raise_them() -> None:
    names = ["Embedding", "Block", "Block", "Block", "Block", "Head"]
    measurements = [
        {0: layer_time(0.002), 1: layer_time(0.010), 2: layer_time(0.012)},
        {3: layer_time(0.0300), 4: layer_time(0.0340), 5: layer_time(0.006)},  # 3 times slower
        {0: layer_time(0.002), 1: layer_time(0.011), 2: layer_time(0.011)},
        {3: layer_time(0.0105), 4: layer_time(0.0115), 5: layer_time(0.002)},
    ]
    profile = calibrate(measurements, classes_of(*names), [400, 1000, 1000, 1000, 1000, 40])
    # Means of Block per rank: 0.011, 0.032, 0.011, 0.011.
    assert profile.layer_times_s == pytest.approx((0.002, 0.011, 0.011, 0.011, 0.011, 0.002))
    assert [layer.name for layer in profile.layers] == names
    assert [layer.state_bytes for layer in profile.layers] == [800, 2000, 2000, 2000, 2000, 80]
    assert [layer.optimizer_bytes for layer in profile.layers] == [800, 2000, 2000, 2000, 2000, 80]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", (200, 200)), ("bfloat16", (300, 600)), ("float16", (300, 600)), (None, (200, 200))],
)
def test_memory_counts_fp32_gradients_moments_and_masters(
    dtype: str | None, expected: tuple[int, int]
) -> None:
    kinds = [LayerClass("Block", parameter_dtype=dtype)]
    (layer,) = calibrate([{0: layer_time(0.01)}], kinds, [100]).layers
    assert (layer.state_bytes, layer.optimizer_bytes) == expected


def test_half_of_the_ranks_may_be_slow() -> None:
    measurements = [{0: layer_time(mean_s)} for mean_s in (0.010, 0.0257, 0.0375, 0.010, 0.0542, 0.010)]
    assert calibrate(measurements, classes_of("Block"), [8]).layer_times_s == pytest.approx((0.010,))


def test_a_mean_weighs_micro_batches_not_layers() -> None:
    measurements = [{0: LayerMeasurement(1, 0.02), 1: LayerMeasurement(3, 0.03)}]
    profile = calibrate(measurements, classes_of("Block", "Block"), [8, 8])
    assert profile.layer_times_s == pytest.approx((0.0125, 0.0125))


def test_unmeasured_layers_cost_nothing_only_without_parameters() -> None:
    profile = calibrate([{0: layer_time(0.01)}, {}], classes_of("Block", "reshape"), [8, 0])
    assert profile.layer_times_s == pytest.approx((0.01, 0.0))
    with pytest.raises(CalibrationError, match=r"layer 1 \(Head\) has 16 bytes of parameters"):
        calibrate([{0: layer_time(0.01)}], classes_of("Block", "Head"), [8, 16])


def test_layers_of_one_type_with_other_shapes_are_another_class() -> None:
    kinds = [LayerClass("Block", parameter_shapes=((8, size),)) for size in (8, 16, 8)]
    measurements = [{0: layer_time(0.01), 1: layer_time(0.05), 2: layer_time(0.03)}]
    assert calibrate(measurements, kinds, [8, 16, 8]).layer_times_s == pytest.approx((0.02, 0.05, 0.02))


def test_memory_of_activations_and_messages() -> None:
    measurements = [
        {0: layer_time(0.01, input_bytes=900, output_bytes=64, kept_bytes=900)},
        {0: layer_time(0.01, input_bytes=900, output_bytes=64, kept_bytes=1000)},
        {
            1: layer_time(0.01, input_bytes=64, output_bytes=128, kept_bytes=300),
            2: layer_time(0.01, input_bytes=128, output_bytes=512, kept_bytes=200),
        },
    ]
    profile = calibrate(measurements, classes_of("Embedding", "Block", "Head"), [8, 8, 8])
    assert [layer.activation_bytes for layer in profile.layers] == [1000, 300, 200 + 512]
    assert profile.message_bytes == 128  # The first layer's input and the last one's output stay.


def test_the_loss_counts_for_the_last_layer_alone() -> None:
    measurements = [{0: layer_time(0.01), 1: layer_time(0.01)}]
    profile = calibrate(measurements, classes_of("Block", "Block"), [8, 8], loss_s=0.004)
    assert profile.layer_times_s == pytest.approx((0.01, 0.014))


@pytest.mark.parametrize(
    ("others_s", "last_s", "expected"),
    [
        ([0.001, 0.002, 0.009], [0.005, 0.007, 0.006], (0.002, 0.004)),
        ([0.003], [0.001], (0.003, 0.0)),  # Noise: no loss takes less than nothing.
        ([], [0.005, 0.007, 0.006], (0.006, 0.0)),  # All stages are last ones.
        ([-0.001], [], (0.0, 0.0)),
        ([], [], (0.0, 0.0)),
    ],
)
def test_overhead_and_loss(others_s: list[float], last_s: list[float], expected: tuple[float, float]) -> None:
    assert split_overhead(others_s, last_s) == pytest.approx(expected)


def test_bad_input() -> None:
    with pytest.raises(CalibrationError, match="layer_classes has 1 entries and parameter_bytes 2"):
        calibrate([], classes_of("Block"), [8, 8])
    with pytest.raises(CalibrationError, match="layer 7 was measured; the model has 1"):
        calibrate([{7: layer_time(0.01)}], classes_of("Block"), [8])
