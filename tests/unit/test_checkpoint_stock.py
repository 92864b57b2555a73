"""DeepSpeed's layout without its engine: there and back, wrong files, and files that would run code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor, nn

from malleus_ds.checkpoint import CheckpointError
from malleus_ds.checkpoint.manifest import GroupEntry
from malleus_ds.checkpoint.opening import open_path
from malleus_ds.checkpoint.part_file import Interval
from malleus_ds.checkpoint.stock.pickles import read_pickle
from malleus_ds.checkpoint.stock.reading import open_stock
from malleus_ds.checkpoint.stock.scalars import optimizer_name
from malleus_ds.cli.main import main
from tests.checkpoints import write_own
from tests.distributed.checkpoint_reference import Whole, assert_same_state, stored

TIES = {"embedding": (0, 4)}


def model(dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    """Five layers, of which the first and the last are tied, and the third has no tensors. The order of the
    modules is not that of the alphabet."""
    torch.manual_seed(0)
    layers = {"1": nn.LayerNorm(6), "3": nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7, bias=False))}
    tied = nn.ModuleDict({"embedding": nn.Embedding(7, 6)})
    return nn.ModuleDict({"tied_modules": tied, **layers}).to(dtype)


def whole(directory: Path, modules: nn.Module) -> Whole:
    return stored(directory, {name: tuple(p.shape) for name, p in modules.named_parameters()})


def run(*arguments: object) -> int:
    return main(["checkpoint", *map(str, arguments)])


def export(source: Path, target: Path, *arguments: object) -> None:
    assert run("export", source, target, "--format", "deepspeed", *arguments) == 0


@pytest.mark.parametrize("has_ties", [True, False])
@pytest.mark.parametrize(
    ("dtype", "arguments"),
    [
        (torch.float32, ("--boundaries", "0,2,5", "--zero-stage", 0)),
        (torch.float32, ("--num-stages", 2, "--num-replicas", 3, "--zero-stage", 1)),
        (torch.bfloat16, ("--num-stages", 1, "--num-replicas", 4, "--zero-stage", 1)),
    ],
)
def test_there_and_back(
    dtype: torch.dtype, arguments: tuple[object, ...], has_ties: bool, tmp_path: Path
) -> None:
    modules = model(dtype)
    own = write_own(modules, tmp_path / "own", TIES, has_optimizer=True)
    export(own, tmp_path / "stock", *arguments)
    names = [path.name for path in (tmp_path / "stock/step3").glob("*optim_states.pt")]
    assert all(name.startswith("bf16_") == (dtype == torch.bfloat16) for name in names)
    ties = ["--tied", "embedding=0,4"] if has_ties else []
    code = run("import", tmp_path / "stock", tmp_path / "back", *ties)
    if not has_ties and 0 in arguments:
        assert code == 2, "without ZeRO, no file tells"
        return
    assert code == 0
    assert_same_state(whole(tmp_path / "back/step3", modules), whole(own, modules))
    before, after = (open_path(tmp_path / name).manifest for name in ("own", "back"))
    kept = ("optimizer", "lr_scheduler", "position", "client_state", *(["tensors"] if has_ties else []))
    for name in kept:
        assert getattr(after, name) == getattr(before, name), name
    (group,) = after.groups
    assert (group.options, group.shared) == (before.groups[0].options, before.groups[0].shared)
    assert after.in_order == has_ties, "all uses of a tie are known only when they are given"


def test_weights_alone(tmp_path: Path) -> None:
    modules = model()
    export(write_own(modules, tmp_path / "own", TIES), tmp_path / "stock", "--num-stages", 3)
    layer = torch.load(tmp_path / "stock/step3/layer_03-model_states.pt", weights_only=True)
    assert list(layer) == ["0.weight", "0.bias", "1.weight"]
    assert torch.load(tmp_path / "stock/step3/layer_02-model_states.pt", weights_only=True) == OrderedDict()
    assert run("import", tmp_path / "stock", tmp_path / "back", "--tied", "embedding=0,4") == 0
    assert run("export", tmp_path / "back", tmp_path / "plain", "--format", "safetensors") == 0
    assert_same_state(whole(tmp_path / "back/step3", modules), whole(tmp_path / "own/step3", modules))


def change_pickle(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_fused_masters_without_zero(tmp_path: Path) -> None:
    """DeepSpeed's FP16_Optimizer has one flat master, and Adam's state of it, per group."""
    modules = model(torch.float16)
    export(write_own(modules, tmp_path / "own", TIES), tmp_path / "stock", "--num-stages", 1)
    flat = torch.cat([parameter.detach().float().view(-1) for parameter in modules.parameters()])
    state = {"step": torch.tensor(2.0), "exp_avg": flat + 1, "exp_avg_sq": flat + 2}
    options = {"lr": 0.1, "bias_correction": True, "params": [0]}

    def fuse(content: dict[str, Any]) -> None:
        content["optimizer"] = {
            **{"dynamic_loss_scale": True, "cur_scale": 1024.0, "cur_iter": 5, "clip_grad": 0.0},
            "optimizer_state_dict": {"state": {0: state}, "param_groups": [options]},
            "fp32_groups_flat": [flat],
        }

    change_pickle(tmp_path / "stock/step3/mp_rank_00_model_states.pt", fuse)
    opened = open_path(tmp_path / "stock", ties=TIES)
    assert opened.manifest.optimizer == "FusedAdam"
    assert opened.manifest.loss_scaler is not None
    assert opened.manifest.loss_scaler.state == {"cur_scale": 1024.0, "cur_iter": 5}
    with opened.reader() as reader:
        for name, parameter in modules.named_parameters():
            for index, kind in enumerate(("master", "exp_avg", "exp_avg_sq")):
                values = reader.read(Interval(kind, name, 1, parameter.numel()))
                torch.testing.assert_close(values, parameter.detach().float().view(-1)[1:] + index)


@pytest.mark.parametrize("is_listed", [True, False])
def test_frozen_parameters_without_zero(is_listed: bool, tmp_path: Path) -> None:
    """Some programs give the optimizer all parameters, others those that are trained; a job knows which."""
    modules = model()
    own = write_own(modules, tmp_path / "own", TIES, has_optimizer=True, frozen="1.bias")
    export(own, tmp_path / "stock", "--num-stages", 2, "--zero-stage", 0)
    tensors = open_path(own).manifest.tensors
    names = [name for name, _ in modules.named_parameters()]
    assert names[:3] == ["tied_modules.embedding.weight", "1.weight", "1.bias"]

    def list_frozen(content: dict[str, Any]) -> None:
        optimizer = content["optimizer"]
        count = len(optimizer["param_groups"][0]["params"])
        moved = {index: index + (index >= 2) for index in range(count)}
        optimizer["state"] = {moved[index]: state for index, state in optimizer["state"].items()}
        optimizer["param_groups"][0]["params"] = list(range(count + 1))

    if is_listed:
        change_pickle(tmp_path / "stock/step3/mp_rank_00_model_states.pt", list_frozen)
    opened = open_stock(tmp_path / "stock/step3", tensors)
    assert opened.manifest.tensors == tensors
    with opened.reader() as reader:
        for name, parameter in modules.named_parameters():
            wanted = Interval("exp_avg", name, 0, parameter.numel())
            if name == "1.bias":
                assert not reader.has("exp_avg", name)
            else:
                assert torch.equal(reader.read(wanted), parameter.detach().view(-1) + 1)


class Touches:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    "name",
    ["layer_01-model_states.pt", "mp_rank_01_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"],
)
def test_a_pickle_runs_nothing(name: str, is_zip: bool, tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    export(
        write_own(model(), tmp_path / "own", TIES, has_optimizer=True),
        stock,
        *("--num-stages", 2, "--num-replicas", 2, "--zero-stage", 1),
    )
    path, trap = stock / "step3" / name, tmp_path / "executed"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "trap": Touches(trap)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError) as caught:
        open_path(stock)
    assert str(caught.value).startswith(f"{path}: names {os.mkdir.__module__}.mkdir, which could run code")
    assert not trap.exists()
    path.write_bytes(pickle.dumps(Touches(trap), protocol=2))
    with pytest.raises(CheckpointError, match=str(path)):
        open_path(stock)
    assert not trap.exists()


def edit(name: str, **entries: Any) -> Callable[[Path], None]:
    return lambda directory: change_pickle(directory / name, lambda content: content.update(entries))


def shorten(directory: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].resize_(3)

    change_pickle(directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt", change)


def other_rate(directory: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 0.7

    change_pickle(directory / "zero_pp_rank_0_mp_rank_01_optim_states.pt", change)


def fewer_paddings(directory: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["param_alignment_paddings"] = [[0]]

    change_pickle(directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt", change)


def elastic(directory: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"] = []

    change_pickle(directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt", change)


def cut(directory: Path) -> None:
    shutil.copy(directory / "layer_01-model_states.pt", directory / "layer_01-model_01-model_states.pt")


def without(pattern: str) -> Callable[[Path], None]:
    return lambda directory: [path.unlink() for path in directory.glob(pattern)]  # type: ignore[return-value]


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (without("layer_*"), "has no files layer_"),
    (without("mp_rank_00*"), "mp_rank_00_model_states.pt: is missing"),
    (without("zero_pp_rank_0_mp_rank_01*"), "zero_pp_rank_0_mp_rank_01_optim_states.pt: is missing"),
    (without("mp_rank_01*"), "mp_rank_01_model_states.pt: is missing"),
    (without("zero_pp_rank_1*"), "zero_pp_rank_1_mp_rank_00_optim_states.pt: is missing"),
    (without("layer_01*"), "state of '1.weight', which no file layer_* has"),
    (edit("layer_01-model_states.pt", weight=Tensor(5)), "'1.weight' has 5 elements"),
    (edit("mp_rank_00_model_states.pt", dp_world_size=None), "do not hold what DeepSpeed writes"),
    (cut, "layer_01-model_01-model_states.pt: a part of a layer"),
    (
        edit("mp_rank_01_model_states.pt", global_steps=9),
        "of step 9, but mp_rank_00_model_states.pt is of step 3",
    ),
    (edit("layer_01-model_states.pt", weight=3), "'weight' is a int"),
    (lambda directory: (directory / "layer_01-model_states.pt").write_bytes(b"no"), "damaged, or not"),  # type: ignore[list-item, return-value]
    (shorten, "but 3 in zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    (other_rate, "group 0 has other options in another stage"),
    (elastic, "elastic_checkpoint false"),
    (fewer_paddings, "do not hold what DeepSpeed writes (ValueError"),
]


@pytest.mark.parametrize(("damage", "message"), FAULTS)
def test_wrong_files_are_named(
    damage: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = tmp_path / "stock"
    own = write_own(model(torch.float16), tmp_path / "own", TIES, has_optimizer=True)
    export(own, stock, "--num-stages", 2, "--num-replicas", 2, "--zero-stage", 1)
    damage(stock / "step3")
    assert run("import", stock, tmp_path / "back") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low = write_own(model(torch.bfloat16), tmp_path / "low", TIES, has_optimizer=True)
    old = write_own(model(), tmp_path / "old", TIES, has_optimizer=True, in_order=False)
    bare = write_own(model(), tmp_path / "bare", TIES)
    clash = write_own(model(), tmp_path / "clash", TIES, client_state={"optimizer": 1})
    stages = ("--num-stages", 2)
    for source, arguments, message in (
        (low, (*stages, "--zero-stage", 0), "use zero_stage 1"),
        (old, (*stages, "--zero-stage", 1), "does not know the order"),
        (bare, (*stages, "--zero-stage", 1), "has no optimizer state"),
        (clash, stages, "client_state has ['optimizer']"),
        (bare, (), "--num-stages is missing"),
        (bare, ("--num-stages", 9), "num_stages is 9: give 1 to 5"),
        (bare, ("--boundaries", "0,9"), "boundaries are [0, 9]"),
        (bare, ("--boundaries", "0,x"), "--boundaries 0,x"),
        (bare, (*stages, "--num-replicas", 0), "num_replicas is 0"),
        (tmp_path / "absent", stages, "there is no such directory"),
        (bare, (*stages, "--tag", "other"), "there is no such checkpoint"),
    ):
        assert run("export", source, tmp_path / "out", "--format", "deepspeed", *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("malleus:") == 1
        assert not (tmp_path / "out").exists()
    export(bare, tmp_path / "out", *stages)
    assert run("export", bare, tmp_path / "out", "--format", "deepspeed", *stages) == 2
    assert "exists: give another" in capsys.readouterr().err
    assert run("import", tmp_path / "out", tmp_path / "bare") == 2
    assert f"{bare} exists: give another" in capsys.readouterr().err
    for layout in ("safetensors", "deepspeed"):
        target = bare / "manifest.json" / "out"
        assert run("export", bare, target, "--format", layout, *stages) == 2
        assert "Not a directory" in capsys.readouterr().err
    path = bare / "rank_00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run("export", bare, tmp_path / "damaged", "--format", "safetensors") == 2
    assert f"{path}: damaged" in capsys.readouterr().err
    assert not (tmp_path / "damaged").exists()


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = write_own(model(), tmp_path / "own", TIES, has_optimizer=True)
    export(own, tmp_path / "stock", "--num-stages", 2, "--zero-stage", 1)
    capsys.readouterr()
    facts = {}
    for name in ("own", "stock"):
        assert run("show", tmp_path / name, "--json", "--tied", "embedding=0,4") == 0
        facts[name] = json.loads(capsys.readouterr().out)
    num_elements = sum(parameter.numel() for parameter in model().parameters())
    for fact in facts.values():
        assert (fact["elements"], fact["trained"], fact["layers"]) == (num_elements, num_elements, 5)
        assert (fact["optimizer"], fact["states"]) == ("AdamW", [["exp_avg", "exp_avg_sq"]])
    assert [fact["layout"] for fact in facts.values()] == ["malleus_ds", "DeepSpeed"]
    assert run("show", own) == 0
    assert f"elements        {num_elements}\n" in capsys.readouterr().out


def test_client_state_that_is_not_json_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(write_own(model(), tmp_path / "own", TIES), tmp_path / "stock", "--num-stages", 1)
    name = "mp_rank_00_model_states.pt"
    edit(name, rng=Tensor([1.0]), epoch=7)(tmp_path / "stock/step3")
    assert run("import", tmp_path / "stock", tmp_path / "back", "--tied", "embedding=0,4") == 0
    assert "left out, as it is not JSON: rng" in capsys.readouterr().err
    assert open_path(tmp_path / "back").manifest.client_state == {"epoch": 7}


def test_optimizers_are_known_by_their_options() -> None:
    """As torch and DeepSpeed name them; AdamW is that of the tests with jobs."""
    for options, name in (
        ("amsgrad decoupled_weight_decay", "Adam"),
        ("bias_correction betas", "FusedAdam"),
        ("bias_correction amsgrad", "DeepSpeedCPUAdam"),
        ("momentum nesterov", "SGD"),
        ("etas step_sizes", ""),
    ):
        assert optimizer_name([GroupEntry(dict.fromkeys(options.split(), False), {}, {})]) == name


class OfOldPython:
    """Pickled as Python 3.11.2 pickles a member of an enumeration."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[type, str]]:
        return getattr, (self.owner, self.name)


def test_zero_stages_of_an_old_python(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"zero_stage": OfOldPython(ZeroStageEnum, "gradients")}, path)
    assert read_pickle(path) == {"zero_stage": 2}
    for owner, name in ((ZeroStageEnum, "__class__"), (LossScaler, "disabled")):
        torch.save({"zero_stage": OfOldPython(owner, name)}, path)
        with pytest.raises(CheckpointError, match=r"file\.pt: names getattr, which could run code"):
            read_pickle(path)
