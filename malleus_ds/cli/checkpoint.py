"""`malleus checkpoint`: what is in a checkpoint, and other layouts of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malleus_ds.cli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from malleus_ds.checkpoint.opening import Checkpoint
    from malleus_ds.checkpoint.stock.layout import StockLayout

_DTYPES = ("float32", "bfloat16", "float16")
_DEEPSPEED, _SAFETENSORS, _HUGGING_FACE = "deepspeed", "safetensors", "huggingface"

_EPILOG = """\
examples:
  malleus checkpoint show checkpoints
  malleus checkpoint import stock_checkpoints checkpoints
      what DeepSpeed's pipeline engine saved; a job's load_checkpoint also reads it directly
  malleus checkpoint export checkpoints stock --format deepspeed --num-stages 4 --zero-stage 1
      for a job of DeepSpeed's with 4 pipeline stages, 1 data-parallel rank (--num-replicas) and ZeRO-1
  malleus checkpoint export checkpoints llama --format huggingface --num-heads 32
      for transformers.AutoModelForCausalLM.from_pretrained("llama")
A directory of checkpoints stands for its latest; --tag gives another one. docs/checkpoints.md says what each
layout carries.
"""


def add_parser(commands: Any) -> None:
    """commands: of `argparse.ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "checkpoint",
        help="show a checkpoint; read and write DeepSpeed's layout and Hugging Face's",
        description="Shows and converts checkpoints, without a job. Pickles are read without running them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="what is in a checkpoint, ours or DeepSpeed's")
    show.add_argument("path", metavar="DIR", type=Path)
    show.add_argument("--json", action="store_true", help="as JSON")
    _add_source(show)
    show.set_defaults(run=_show)

    imports = actions.add_parser("import", help="make a checkpoint of ours from another layout")
    imports.add_argument("path", metavar="DIR", type=Path)
    imports.add_argument("target", metavar="OUR_DIR", type=Path, help="directory for checkpoints of ours")
    imports.add_argument("--format", choices=(_DEEPSPEED, _HUGGING_FACE), default=_DEEPSPEED)
    imports.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of the weights, the job's compute dtype (huggingface; default: as they are)",
    )
    _add_source(imports)
    imports.set_defaults(run=_naming_files(_import))
    _add_export(actions)


def _add_export(actions: Any) -> None:
    export = actions.add_parser("export", help="write another layout")
    export.add_argument("path", metavar="DIR", type=Path)
    export.add_argument("target", metavar="OUT_DIR", type=Path)
    export.add_argument("--format", choices=(_DEEPSPEED, _SAFETENSORS, _HUGGING_FACE), required=True)
    _add_source(export)
    stock = export.add_argument_group("deepspeed")
    stages = stock.add_mutually_exclusive_group()
    stages.add_argument("--num-stages", metavar="N", type=int, help="pipeline stages of the job")
    stages.add_argument("--boundaries", metavar="0,...", help="the first layer of each stage, and the end")
    stock.add_argument(
        "--partition",
        choices=("parameters", "uniform"),
        default="parameters",
        help="the module's partition_method, which divides the layers (default: parameters)",
    )
    stock.add_argument(
        "--num-replicas", metavar="N", type=int, default=1, help="data-parallel ranks (default: 1)"
    )
    stock.add_argument(
        "--zero-stage", choices=(0, 1), type=int, help="of the job (default: weights only, without optimizer)"
    )
    weights = export.add_argument_group("safetensors, huggingface")
    weights.add_argument("--dtype", choices=_DTYPES, help="default: as they are; float32: the masters")
    weights.add_argument(
        "--shard-gb", metavar="GB", type=float, default=5.0, help="largest file (default: 5)"
    )
    llama = export.add_argument_group("huggingface (models of malleus_ds.models.llama)")
    llama.add_argument("--num-heads", metavar="N", type=int, help="query heads")
    llama.add_argument("--rope-base", metavar="X", type=float, default=10_000.0, help="default: 10000")
    llama.add_argument("--norm-epsilon", metavar="X", type=float, default=1e-5, help="default: 1e-5")
    llama.add_argument("--max-positions", metavar="N", type=int, default=2048, help="default: 2048")
    export.set_defaults(run=_naming_files(_export))


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tag", help="default: the latest")
    parser.add_argument(
        "--tied",
        metavar="KEY=LAYER,LAYER",
        action="append",
        default=[],
        help="layers that share a module, in a checkpoint of DeepSpeed's without ZeRO, which does not say so",
    )


def _open(args: argparse.Namespace) -> Checkpoint:
    from malleus_ds.checkpoint.opening import open_path

    ties: dict[str, tuple[int, ...]] = {}
    for text in args.tied:
        key, _, layers = text.partition("=")
        ties[key] = _numbers("--tied", text, layers)
    checkpoint = open_path(args.path, args.tag, ties)
    if checkpoint.left_out:
        print(f"malleus: left out, as it is not JSON: {', '.join(checkpoint.left_out)}", file=sys.stderr)
    return checkpoint


def _numbers(option: str, value: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {value}: give layers as numbers with commas between them") from error


def _show(args: argparse.Namespace) -> int:
    import json

    facts = describe(_open(args))
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:{width}}  {value if isinstance(value, str | int) else json.dumps(value)}")
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `malleus checkpoint show` says; sizes in elements and bytes."""
    from malleus_ds.checkpoint.stock.layout import num_layers

    manifest = checkpoint.manifest
    trained = [tensor for tensor in manifest.tensors if tensor.group is not None]
    files = [entry.num_bytes for entry in manifest.files]
    return {
        "path": str(checkpoint.directory),
        "layout": "malleus_ds" if files else "DeepSpeed",
        **{name: manifest.position[name] for name in ("global_steps", "global_samples", "skipped_steps")},
        "layers": num_layers(manifest),
        "tensors": len(manifest.tensors),
        "elements": sum(tensor.num_elements for tensor in manifest.tensors),
        "trained": sum(tensor.num_elements for tensor in trained),
        "dtypes": sorted({tensor.dtype for tensor in manifest.tensors}),
        "optimizer": manifest.optimizer or ("unknown" if manifest.groups else "none"),
        "states": [sorted(group.states) for group in manifest.groups],
        "lr_scheduler": None if manifest.lr_scheduler is None else manifest.lr_scheduler.type,
        "loss_scaler": None if manifest.loss_scaler is None else manifest.loss_scaler.type,
        "files": len(files),
        "bytes": sum(files),
        "plan": manifest.plan or None,
        "client_state": sorted(manifest.client_state),
    }


def _naming_files(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """What the system refuses is an error that names the file."""

    def run(args: argparse.Namespace) -> int:
        try:
            return action(args)
        except OSError as error:
            raise UsageError(
                f"{error.filename or args.target}: {error.strerror}: give a directory that can be written"
            ) from error

    return run


def _import(args: argparse.Namespace) -> int:
    from malleus_ds.checkpoint.importing import write_checkpoint

    if args.format == _HUGGING_FACE:
        from malleus_ds.checkpoint.huggingface import read_llama, read_llama_shape

        manifest, contents = read_llama(args.path, _dtype(args.dtype))
        path = write_checkpoint(args.target, args.tag or "imported", manifest, contents)
        print(f"wrote {path}: load it with load_module_only=True into {read_llama_shape(args.path)}")
        return 0
    checkpoint = _open(args)
    if checkpoint.manifest.files:
        raise UsageError(f"{checkpoint.directory}: is a checkpoint of malleus_ds already")
    from malleus_ds.checkpoint.stock.reading import StockCheckpoint

    assert isinstance(checkpoint, StockCheckpoint)
    tag = checkpoint.directory.name
    print(f"wrote {write_checkpoint(args.target, tag, checkpoint.manifest, checkpoint.contents)}")
    return 0


def _export(args: argparse.Namespace) -> int:
    checkpoint = _open(args)
    checkpoint.check_share(0, 1)  # other layouts have no checksums that would tell damage later
    if args.format == _DEEPSPEED:
        from malleus_ds.checkpoint.stock.writing import write_stock

        path = write_stock(checkpoint, args.target, checkpoint.directory.name, _layout(args, checkpoint))
        print(f"wrote {path}")
        return 0
    from malleus_ds.checkpoint.weights import own_names, write_weights

    weights, documents = own_names(checkpoint), {}
    if args.format == _HUGGING_FACE:
        from malleus_ds.checkpoint.huggingface import llama_document, llama_shape, llama_weights

        weights = llama_weights(checkpoint.manifest)
        if args.num_heads is None:
            raise UsageError("--num-heads is missing: the tensors do not tell it; give the model's num_heads")
        shape = llama_shape(checkpoint.manifest, args.num_heads, args.rope_base, args.norm_epsilon)
        dtype = args.dtype or weights[0].tensor.dtype
        documents = {"config.json": llama_document(shape, dtype, args.max_positions)}
    if not args.shard_gb > 0:
        raise UsageError(f"--shard-gb {args.shard_gb}: it must be positive")
    shard_bytes = int(args.shard_gb * 10**9)
    write_weights(checkpoint, args.target, weights, _dtype(args.dtype), shard_bytes, documents)
    print(f"wrote {args.target}")
    return 0


def _layout(args: argparse.Namespace, checkpoint: Checkpoint) -> StockLayout:
    from malleus_ds.checkpoint.stock.layout import StockLayout
    from malleus_ds.checkpoint.stock.writing import divide_layers

    boundaries: Sequence[int]
    if args.boundaries is not None:
        boundaries = _numbers("--boundaries", args.boundaries, args.boundaries)
    elif args.num_stages is not None:
        boundaries = divide_layers(checkpoint.manifest, args.num_stages, args.partition)
    else:
        raise UsageError("--num-stages is missing: give the job's pipeline stages, or their --boundaries")
    return StockLayout(tuple(boundaries), args.num_replicas, args.zero_stage)


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)
