"""Trains a GPT on text, with pipelines that re-plan themselves when a device slows down.

Start it with one process per device, in any of these ways:

    mpirun -n 8 python launcher/train.py --deepspeed_config configs/demo.json
    deepspeed --num_accelerators 8 launcher/train.py --deepspeed_config configs/demo.json
    python launcher/train.py --deepspeed_config configs/demo.json --steps 2
"""

from __future__ import annotations

import argparse
import math
import time

import deepspeed
import torch
import torch.distributed as dist

import malleus_ds
from malleus_ds.data import VOCABULARY_SIZE, ByteTextDataset
from malleus_ds.launch import run_job
from malleus_ds.models import GPTConfig, VocabParallelLoss, gpt_layers
from malleus_ds.pipe.interruption import describe_parts
from malleus_ds.plan import ParallelPlan
from malleus_ds.report.measurements import End, Event, MeasurementWriter, Start, Step


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="training steps, with those of a checkpoint (default: %(default)s)",
    )
    parser.add_argument("--data", help="text file or folder (default: the sources of Python's library)")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--num_stages", type=int, help="stages of each pipeline at the start (default: 4, or fewer)"
    )
    start.add_argument(
        "--plan", metavar="FILE", help="the plan at the start, as JSON (default: equal pipelines)"
    )
    parser.add_argument(
        "--num_blocks", type=int, default=16, help="transformer blocks (default: %(default)s)"
    )
    parser.add_argument("--hidden_size", type=int, default=32, help="hidden units (default: %(default)s)")
    parser.add_argument("--num_heads", type=int, default=4, help="attention heads (default: %(default)s)")
    parser.add_argument(
        "--sequence_length", type=int, default=64, help="tokens per sample (default: %(default)s)"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="probability (default: %(default)s)")
    parser.add_argument(
        "--measurements", metavar="FILE", help="append what is measured to FILE, as JSON lines"
    )
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="go on from the latest checkpoint in DIR, or from memory, and save there at the end",
    )
    parser.add_argument(
        "--save_interval", type=int, metavar="N", help="also save to --checkpoints after every N steps"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    args: argparse.Namespace = deepspeed.add_config_arguments(parser).parse_args()
    if args.save_interval is not None and (args.checkpoints is None or args.save_interval < 1):
        parser.error(f"--save_interval {args.save_interval}: give at least 1, and --checkpoints DIR")
    return args


def build_engine(args: argparse.Namespace) -> malleus_ds.MalleusPipelineEngine:
    """The model, its data and the engine: what differs from plain DeepSpeed is two names."""
    malleus_ds.init_distributed()
    dataset = ByteTextDataset(args.sequence_length, args.data)
    model = GPTConfig(
        vocabulary_size=VOCABULARY_SIZE,
        hidden_size=args.hidden_size,
        num_heads=args.num_heads,
        num_blocks=args.num_blocks,
        sequence_length=args.sequence_length,
        dropout=args.dropout,
    )
    module = malleus_ds.MalleusPipelineModule(
        gpt_layers(model),
        num_stages=args.num_stages or math.gcd(4, dist.get_world_size()),
        loss_fn=VocabParallelLoss(),
        partition_method="type:Block",
        plan=None if args.plan is None else ParallelPlan.load(args.plan),
    )
    engine, _, _, _ = malleus_ds.initialize(
        args=args, model=module, model_parameters=list(module.parameters()), training_data=dataset
    )
    return engine


def train(
    engine: malleus_ds.MalleusPipelineEngine, args: argparse.Namespace, writer: MeasurementWriter
) -> None:
    """Plain training steps; the engine re-plans and migrates by itself inside of ``train_batch``."""
    engine.resume(args.checkpoints)
    loop = engine.control_loop
    is_speaker = engine.global_rank == 0
    num_told = 0
    for step in range(engine.global_steps, args.steps):
        began = time.perf_counter()
        loss = engine.train_batch().item()
        duration_s = time.perf_counter() - began
        is_due = step + 1 == args.steps or (args.save_interval and (step + 1) % args.save_interval == 0)
        if args.checkpoints is not None and is_due:
            engine.save_checkpoint(args.checkpoints)
        if not is_speaker:
            continue
        print(f"step {step}: loss {loss:.4f}, {duration_s:.3f} s", flush=True)
        writer.write(Step(step, duration_s, loss, loop.estimator.rates if loop else ()))
        for event in loop.events[num_told:] if loop else ():
            parts = event.details.get("parts_s")
            told = "" if parts is None else f" ({describe_parts(parts)})"
            print(f"step {event.step}: {event.kind}{told}", flush=True)
            writer.write(Event(event.step, event.kind, event.details))
            num_told += 1


def summary(engine: malleus_ds.MalleusPipelineEngine) -> End:
    """Counts over all ranks. Collective."""
    device = engine.device_emulation
    counts = [device.num_calls, device.num_overruns] if device else [0, 0]
    counts += [switch.migration.sent_bytes for switch in engine.switches]
    totals = torch.tensor(counts, dtype=torch.int64, device=engine.device)
    dist.all_reduce(totals)
    num_calls, num_overruns, *sent_bytes = totals.tolist()
    return End(tuple(sent_bytes), num_calls, num_overruns)


def main() -> None:
    args = parse_arguments()
    engine = build_engine(args)
    with MeasurementWriter(args.measurements if engine.global_rank == 0 else None) as writer:
        writer.write(Start(dist.get_world_size(), engine.plan.to_dict()))
        train(engine, args, writer)
        writer.write(summary(engine))
    engine.destroy()


if __name__ == "__main__":
    run_job(main)
