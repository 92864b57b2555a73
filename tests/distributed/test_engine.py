"""The engine's contract beyond exactness: agreement, errors, evaluation, data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from malleus_ds import MalleusPipelineModule, initialize
from malleus_ds.config import ConfigError
from malleus_ds.data.order import DataError
from malleus_ds.models.gpt import gpt_layers, gpt_loss
from malleus_ds.pipe.agreement import AgreementError
from malleus_ds.pipe.rng import layer_seed
from malleus_ds.placement import LayoutError
from malleus_ds.plan import ParallelPlan, PlanError
from tests.distributed.reference import (
    BASE_SEED,
    CLIP_NORM,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    NUM_MICRO_BATCHES,
    Result,
    Tokens,
    assert_same_training,
    build_all,
    config,
    gather_parameters,
    gpt,
    make_engine,
    plan,
    single_process,
    train,
)
from tests.harness import DistributedTest

TWO_AND_ONE = plan(([(2, 0, 5), (0, 5, 8)], 5), ([(1, 0, 8)], 3), standby=(3,))
ONE_AND_THREE = plan(([(3, 0, 8)], 2), ([(1, 0, 1), (2, 1, 7), (0, 7, 8)], 6))


class TestAgreement(DistributedTest):
    world_size = 4
    timeout_s = 60.0

    def test_one_rank_has_another_plan(self) -> None:
        own = ONE_AND_THREE if dist.get_rank() == 2 else TWO_AND_ONE
        with pytest.raises(AgreementError, match=r"rank 0 and ranks \[2\] have different plans"):
            make_engine(own)

    def test_one_rank_has_a_wrong_plan(self) -> None:
        wrong = plan(([(2, 0, 5), (0, 5, 7)], 5), ([(1, 0, 8)], 3), standby=(3,))
        own = wrong if dist.get_rank() == 1 else TWO_AND_ONE
        with pytest.raises(
            PlanError if dist.get_rank() == 1 else AgreementError, match=r"pipeline 0|rank 1 failed"
        ):
            make_engine(own)

    def test_one_rank_has_another_model(self) -> None:
        shape = gpt()
        if dist.get_rank() == 1:
            shape = type(shape)(24, 32, 2, 6, 8, 0.2)
        with pytest.raises(LayoutError, match="ranks 0 and 1 hold different models"):
            make_engine(TWO_AND_ONE, gpt_layers(shape))

    def test_one_rank_has_other_layers(self) -> None:
        layers = gpt_layers(gpt())
        if dist.get_rank() == 2:
            layers[3] = LayerSpec(nn.Linear, 16, 16)
        with pytest.raises(AgreementError, match=r"ranks \[2\] have different layers"):
            make_engine(TWO_AND_ONE, layers)

    def test_one_rank_has_another_config(self) -> None:
        ds_config = config(seed=dist.get_rank() // 3)
        with pytest.raises(AgreementError, match=r"ranks \[3\] have different configs or seeds"):
            make_engine(TWO_AND_ONE, ds_config=ds_config)

    def test_unknown_key_on_one_rank(self) -> None:
        ds_config = config(**({"bukket_bytes": 1} if dist.get_rank() == 0 else {}))
        kind = ConfigError if dist.get_rank() == 0 else AgreementError
        with pytest.raises(kind, match=r"malleus\.bukket_bytes: unknown key"):
            make_engine(TWO_AND_ONE, ds_config=ds_config)

    def test_reconfigure_with_different_plans(self) -> None:
        engine = make_engine(TWO_AND_ONE)
        other = ONE_AND_THREE if dist.get_rank() == 3 else TWO_AND_ONE
        with pytest.raises(AgreementError, match="different plans"):
            engine.reconfigure(other)
        assert engine.plan == TWO_AND_ONE


def summed_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the valid tokens, and their number."""
    valid = labels % 3 > 0
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses * valid).sum(), valid.sum()


class TestUserErrors(DistributedTest):
    world_size = 2

    def test_a_plan_without_pipelines(self) -> None:
        with pytest.raises(PlanError, match="the plan has no pipeline"):
            make_engine(ParallelPlan(()))

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"zero_optimization": {"stage": 2}}, r"zero_optimization\.stage is 2"),
            ({"train_batch_size": 15}, "train_batch_size is 15.*16 in all"),
            ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu is 1"),
            (
                {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
                r"data_types\.grad_accum_dtype is .bf16.: .*accumulated in fp32",
            ),
            ({"malleus": {"detector": {"window_steps": 0}}}, r"malleus\.detector\.window_steps.*but it is 0"),
            ({"malleus": {"timeout_s": "60"}}, r"malleus\.timeout_s: .*but it is '60'"),
            ({"malleus": []}, "must be an object"),
            ({"malleus": {"nodes": [[0], [0]]}}, r"malleus\.nodes lists the ranks \[0, 0\]"),
            (
                {"malleus": {"emulation": {"layer_ms": 1, "events": [{"step": 0, "rank": 2, "rate": 2}]}}},
                r"malleus\.emulation\.events\[0\]\.rank is 2",
            ),
            (
                {"malleus": {"emulation": {"layer_ms": 1, "layer_weights": [1]}}},
                "layer_weights has 1 entries",
            ),
            ({"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}, "optimizer.type is 'Lamb'"),
            ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}, "optimizer.type is 'OneBitAdam'"),
            ({"malleus": {"trace": "/no/such/folder/trace.jsonl"}}, r"malleus\.trace is|rank 0 failed"),
            ({"zero_optimization": True}, "zero_optimization is True"),
            ({"train_batch_size": "auto"}, "train_batch_size is 'auto'"),
        ],
    )
    def test_wrong_config(self, changes: dict[str, Any], match: str) -> None:
        first = plan(([(0, 0, 8)], 4), ([(1, 0, 8)], 4))
        with pytest.raises((ConfigError, PlanError, AgreementError), match=match):
            make_engine(first, ds_config={**config(), **changes})

    def test_iterable_data(self) -> None:
        class Stream(torch.utils.data.IterableDataset[Tensor]):
            def __iter__(self) -> Any:
                return iter(())

        with pytest.raises(DataError, match="data_iter"):
            make_engine(
                plan(
                    (
                        [
                            (0, 0, 8),
                        ],
                        4,
                    ),
                    ([(1, 0, 8)], 4),
                ),
                data=Stream(),
            )

    def test_a_switch_must_keep_the_batch(self) -> None:
        engine = make_engine(plan(([(0, 0, 8)], 4), ([(1, 0, 8)], 4)))
        fewer = plan(([(0, 0, 8)], 4), ([(1, 0, 8)], 3))
        for other in (fewer, replace(engine.plan, micro_batch_size=1)):
            with pytest.raises(PlanError, match="a switch must keep both"):
                engine.reconfigure(other)

    def test_no_optimizer(self) -> None:
        ds_config = config()
        del ds_config["optimizer"]
        with pytest.raises(ConfigError, match="optimizer is None in the config"):
            make_engine(plan(([(0, 0, 8)], 4), ([(1, 0, 8)], 4)), ds_config=ds_config)

    def test_parameters_of_another_module(self) -> None:
        module = MalleusPipelineModule(gpt_layers(gpt()), num_stages=1, loss_fn=gpt_loss)
        stale = [nn.Parameter(torch.ones(3)), *module.parameters()]
        with pytest.raises(ConfigError, match=r"shape \(3,\).*not in the module"):
            initialize(model=module, model_parameters=stale, config=config())

    def test_number_of_stages_must_divide_the_world(self) -> None:
        with pytest.raises(PlanError, match=r"num_stages \(3\) must divide the world size \(2\)"):
            make_engine(None, num_stages=3)


class TestUse(DistributedTest):
    world_size = 4

    def test_num_stages_gives_equal_pipelines(self) -> None:
        engine = make_engine(None, num_stages=2, partition_method="uniform")
        expected = ParallelPlan.homogeneous(8, 4, 2, NUM_MICRO_BATCHES // 2, MICRO_BATCH_SIZE)
        assert engine.plan == expected
        assert engine.gradient_accumulation_steps() == engine.micro_batches == NUM_MICRO_BATCHES // 2
        assert_same_training(train(engine, 3), single_process(gpt_layers(gpt()), gpt_loss, 3))

    def test_eval_batch_before_between_and_after(self) -> None:
        """The mean over all micro-batches of all pipelines; training is as without evaluation."""
        specs = gpt_layers(gpt())
        engine = make_engine(TWO_AND_ONE)
        modules, functions = build_all(specs)
        modules.eval()
        start, stop = engine._micro_batch_range()
        data = Tokens()

        def batches(first: int, last: int) -> list[tuple[Tensor, Tensor]]:
            return [
                torch.utils.data.default_collate([data[2 * i], data[2 * i + 1]]) for i in range(first, last)
            ]

        def expected_loss() -> float:
            modules.load_state_dict(gather_parameters(engine))
            total = 0.0
            with torch.no_grad():
                for tokens, labels in batches(0, NUM_MICRO_BATCHES):
                    value = tokens
                    for function in functions:
                        value = function(value)
                    total += gpt_loss(value, labels).item() / NUM_MICRO_BATCHES
            return total

        losses = []
        for _ in range(2):
            for _ in range(2):
                loss = engine.eval_batch(iter(batches(start, stop)))
                assert loss.item() == pytest.approx(expected_loss(), rel=1e-5)
            losses.append(engine.train_batch().item())
        more = engine.eval_batch(iter(batches(0, 3)), num_micro_batches=3)
        assert torch.isfinite(more)
        expected = single_process(specs, gpt_loss, 2)
        torch.testing.assert_close(losses, expected.losses, rtol=1e-5, atol=0)

    def test_own_iterator_is_pulled_by_each_pipeline(self) -> None:
        engine = make_engine(TWO_AND_ONE)
        data = Tokens()
        start, stop = engine._micro_batch_range()
        pulled = []

        def batches() -> Any:
            for step in range(2):
                for index in range(start, stop):
                    first = (step * NUM_MICRO_BATCHES + index) * MICRO_BATCH_SIZE
                    pulled.append((step, index))
                    yield torch.utils.data.default_collate([data[first], data[first + 1]])

        iterator = batches()
        losses = [engine.train_batch(iterator).item() for _ in range(2)]
        torch.testing.assert_close(
            losses, single_process(gpt_layers(gpt()), gpt_loss, 2).losses, rtol=1e-5, atol=0
        )
        if engine.is_first_stage() or engine.is_last_stage():
            assert len(pulled) == 2 * (stop - start)

    def test_a_loss_may_return_its_sum_and_weight(self) -> None:
        """Micro-batches of different numbers of valid tokens give the mean over all tokens, and its
        gradient."""
        specs = gpt_layers(gpt())
        engine = make_engine(TWO_AND_ONE, specs, loss_fn=summed_loss)
        result = train(engine, 1)
        modules, functions = build_all(specs)
        parameters = dict(modules.named_parameters())
        optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE)
        data = Tokens()
        total, weight = torch.zeros(()), torch.zeros(())
        for index in range(NUM_MICRO_BATCHES):
            value, labels = torch.utils.data.default_collate([data[2 * index], data[2 * index + 1]])
            for layer, function in enumerate(functions):
                torch.manual_seed(layer_seed(BASE_SEED, 0, index, layer))
                value = function(value)
            part, count = summed_loss(value, labels)
            total, weight = total + part, weight + count
        (total / weight).backward()
        norm = float(nn.utils.clip_grad_norm_(parameters.values(), CLIP_NORM))
        optimizer.step()
        expected = Result([(total / weight).item()], [norm], {n: p.detach() for n, p in parameters.items()})
        assert_same_training(result, expected)

    def test_a_user_iterator_does_not_outlive_a_switch(self) -> None:
        engine = make_engine(TWO_AND_ONE, data=None)
        data = Tokens()

        def batches(step: int) -> Any:
            for index in range(*engine._micro_batch_range()):
                first = (step * NUM_MICRO_BATCHES + index) * MICRO_BATCH_SIZE
                yield torch.utils.data.default_collate([data[first], data[first + 1]])

        iterator = batches(0)
        losses = [engine.train_batch(iterator).item()]
        engine.reconfigure(ONE_AND_THREE)
        with pytest.raises(DataError, match="made for the plan before the switch"):
            engine.train_batch(iterator)
        losses.append(engine.train_batch(batches(1)).item())
        expected = single_process(gpt_layers(gpt()), gpt_loss, 2).losses
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)

    @pytest.mark.parametrize(
        "schedule",
        [
            {"type": "WarmupLR", "params": {"warmup_max_lr": LEARNING_RATE, "warmup_num_steps": 5}},
            {"type": "LinearLR", "params": {"start_factor": 0.1, "total_iters": 5}},
        ],
        ids=["deepspeed", "torch"],
    )
    def test_scheduler_and_learning_rate_live_through_switches(self, schedule: dict[str, Any]) -> None:
        engine = make_engine(TWO_AND_ONE, ds_config={**config(), "scheduler": schedule})
        rates = []
        for next_plan in (ONE_AND_THREE, TWO_AND_ONE, ONE_AND_THREE, TWO_AND_ONE):
            engine.reconfigure(next_plan)
            engine.train_batch()
            rates.append(engine.get_lr()[0])
        gathered: list[list[float]] = [[] for _ in range(4)]
        dist.all_gather_object(gathered, rates)
        assert gathered == [rates] * 4
        assert rates == sorted(rates)
        assert rates[-1] > rates[0]
