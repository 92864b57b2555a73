"""`malleus-run`: starts a job, watches it, and goes on without the ranks that it loses."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from malleus_ds.cli.errors import INTERRUPTED, UsageError
from malleus_ds.elastic.devices import Host, parse_hosts
from malleus_ds.elastic.run import JOB_FAILED, TOO_FEW_RANKS, Run, RunEndedError, RunOptions
from malleus_ds.elastic.run_files import LOG
from malleus_ds.elastic.run_log import RunLog
from malleus_ds.errors import USER_MISTAKE, is_user_mistake
from malleus_ds.files.reading import read_text

_DESCRIPTION = """\
Starts a training script with one process per device, and watches it. When ranks are lost (killed, out
of memory, crashed, hanging, or their host is gone), the other ranks end with a named error, and the job
starts again on the devices that are left: the planner makes a plan for them, the script loads its last
checkpoint under that plan, and training goes on with the same global batch.

The script saves checkpoints and loads the last one when it starts, as launcher/train.py does:
  engine.load_checkpoint(directory); for step in range(engine.global_steps, num_steps): ...
"""
_DETAILS = f"""\
hosts:
  A hostfile is DeepSpeed's: '<host> slots=<devices>' per line. '# spare' behind a host keeps it back until
  devices are lost. The file is read again at each restart: a new host joins, one that is gone leaves, and a
  lost device comes back once the line of its host has changed in any way ('# repaired at noon').
  Several hosts are reached over ssh by DeepSpeed's runner (pdsh); all need the same paths and see --run_dir.

each rank finds in its environment, beside what deepspeed sets:
  MALLEUS_HOST        its host's name in the hostfile
  MALLEUS_MEMORY_DIR  a directory in its host's memory that outlives the processes, not the job
  MALLEUS_RUN_DIR     --run_dir
  MALLEUS_ATTEMPT     0, 1, 2, ...
  MALLEUS_PLAN        after a loss: the file with the plan; MalleusPipelineModule takes it by itself

examples:
  malleus-run --num_accelerators 8 launcher/train.py --deepspeed_config config.json \\
      --checkpoints kept --save_interval 50
  malleus-run --hostfile hosts --spare_hosts worker-9 --max_restarts 20 train.py
  malleus-run --hostfile hosts --local_hosts train.py      try it: all hosts are this machine

exit codes:
  0    done
  {USER_MISTAKE}    a mistake in what was given, here or to the script: not started again
  {JOB_FAILED}    failed: the restarts are used up, or all ranks failed before the first step
  {TOO_FEW_RANKS}    too few ranks are left, or no plan exists for them
  {INTERRUPTED}  interrupted
"""
_HOSTFILE = "/job/hostfile"  # DeepSpeed's default
_COUNT_DEVICES = "from deepspeed.accelerator import get_accelerator; print(get_accelerator().device_count())"
_COUNT_LIMIT_S = 120.0
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job to its end; returns the exit code."""
    args = _parser().parse_args(arguments)
    # A closed terminal ends the job as Ctrl-C does, but not under nohup.
    ending = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in ending}
    try:
        options = _options(args)
        log = RunLog(options.run_dir / LOG)
        run = Run(options, log)
        options.run_dir.mkdir(parents=True, exist_ok=True)
        try:
            run.run()
        except RunEndedError as error:
            log.tell("ended", str(error), code=error.code)
            return error.code
        except KeyboardInterrupt:
            log.tell("ended", "interrupted", code=INTERRUPTED)
            return INTERRUPTED
    except ValueError as error:
        if not is_user_mistake(error):
            raise
        print(f"malleus-run: {error}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="malleus-run",
        usage="malleus-run [options] script [arguments of the script]",
        description=_DESCRIPTION,
        epilog=_DETAILS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hosts = parser.add_argument_group("where")
    where = hosts.add_mutually_exclusive_group()
    where.add_argument("--hostfile", metavar="FILE", help=f"default: {_HOSTFILE}, where there is one")
    where.add_argument(
        "--num_accelerators",
        "--num_gpus",
        type=int,
        metavar="N",
        help="on this machine alone, on N devices (default: all, where there is no hostfile)",
    )
    hosts.add_argument("--spare_hosts", default="", metavar="A,B", help="hosts of the file to keep back")
    hosts.add_argument(
        "--local_hosts", action="store_true", help="all hosts of the file are this machine: for trials"
    )
    hosts.add_argument(
        "--runner_args", default="", metavar="'...'", help="more options for DeepSpeed's runner, as one text"
    )
    again = parser.add_argument_group("after a loss")
    again.add_argument("--max_restarts", type=int, default=3, metavar="N", help="default: %(default)s")
    again.add_argument(
        "--min_ranks", type=int, default=1, metavar="N", help="give up with fewer (default: %(default)s)"
    )
    again.add_argument(
        "--backoff_s",
        type=float,
        default=5.0,
        metavar="S",
        help="wait so long before a restart, and twice as long each time without progress "
        "(default: %(default)s)",
    )
    again.add_argument(
        "--grace_s",
        type=float,
        default=30.0,
        metavar="S",
        help="the other ranks may take so long to end; who still runs then hangs (default: %(default)s)",
    )
    again.add_argument(
        "--planning_s", type=float, default=10.0, metavar="S", help="of the planner (default: %(default)s)"
    )
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--run_dir",
        metavar="DIR",
        help="log and files of the run, on a disk that all hosts share (default: a new one in malleus_runs/)",
    )
    job.add_argument("--module", action="store_true", help="the script is a module, as in python -m")
    job.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument("script", help="Python program that each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _options(args: argparse.Namespace) -> RunOptions:
    """Raises `UsageError`, before anything starts."""
    for name, least in (("max_restarts", 0), ("min_ranks", 1), ("backoff_s", 0), ("grace_s", 0)):
        value = getattr(args, name)
        if not value >= least:
            raise UsageError(f"--{name} {value}: give at least {least}")
    if not args.planning_s > 0:
        raise UsageError(f"--planning_s {args.planning_s}: give more than 0")
    if args.num_accelerators is not None and args.num_accelerators < 1:
        raise UsageError(f"--num_accelerators {args.num_accelerators}: give at least 1")
    hostfile = args.hostfile or (_HOSTFILE if Path(_HOSTFILE).exists() else None)
    if args.num_accelerators is not None:
        hostfile = None
    spare_hosts = [name for name in args.spare_hosts.split(",") if name]
    for given, name in ((spare_hosts, "--spare_hosts"), (args.local_hosts, "--local_hosts")):
        if given and hostfile is None:
            raise UsageError(f"{name}: give the hosts with --hostfile FILE")
    this_machine: tuple[Host, ...] = ()
    visible_devices: tuple[str, ...] = ()
    if hostfile is None:
        this_machine = (Host("localhost", args.num_accelerators or _count_devices()),)
        visible_devices = _visible_devices(this_machine[0].num_slots)

    def read_hosts() -> tuple[Host, ...]:
        return this_machine if hostfile is None else parse_hosts(read_text(hostfile), spare_hosts)

    return RunOptions(
        script=_script(args),
        arguments=tuple(args.arguments),
        passes_local_rank=not args.no_local_rank,
        run_dir=_run_dir(args.run_dir),
        read_hosts=read_hosts,
        all_local=args.local_hosts,
        max_restarts=args.max_restarts,
        min_ranks=args.min_ranks,
        backoff_s=args.backoff_s,
        grace_s=args.grace_s,
        planning_s=args.planning_s,
        runner_args=_runner_args(args.runner_args),
        visible_devices=visible_devices,
    )


def _runner_args(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--runner_args {text!r}: {error}; write it as in a shell") from error


def _script(args: argparse.Namespace) -> tuple[str, ...]:
    if args.module:
        sys.path.insert(0, os.getcwd())  # as python -m has it
        try:
            found = importlib.util.find_spec(args.script) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise UsageError(f"--module {args.script}: no such module; give one that python -m runs")
        return ("-m", args.script)
    if not Path(args.script).is_file():
        raise UsageError(f"{args.script}: no such script; give the path of a Python program")
    return (str(Path(args.script).resolve()),)


def _run_dir(given: str | None) -> Path:
    if given is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        return Path("malleus_runs", name).resolve()
    path = Path(given).resolve()
    if (path / LOG).exists():
        raise UsageError(f"--run_dir {given}: has the files of another run; give a new directory")
    if path.exists() and not path.is_dir():
        raise UsageError(f"--run_dir {given}: not a directory; give a new one")
    return path


def _visible_devices(num_slots: int) -> tuple[str, ...]:
    """Which devices of this machine the job may use, by slot; empty for the first ones."""
    given = os.environ.get(_VISIBLE_DEVICES, "")
    ids = tuple(word.strip() for word in given.split(",") if word.strip())
    if not ids or ids == ("-1",) or os.environ.get("DS_ACCELERATOR") == "cpu":
        return ()
    if len(ids) < num_slots:
        raise UsageError(
            f"--num_accelerators {num_slots}: {_VISIBLE_DEVICES} is {given}; give at most {len(ids)}, or "
            f"unset it"
        )
    return ids


def _count_devices() -> int:
    """Of this machine, as DeepSpeed counts them; in a process of its own, because it loads torch."""
    command = [sys.executable, "-c", _COUNT_DEVICES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_LIMIT_S, check=True)
        return max(1, int(done.stdout.split()[-1]))
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UsageError(
            f"cannot count this machine's devices ({error}); give --num_accelerators N"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
