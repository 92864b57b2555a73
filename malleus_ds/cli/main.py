"""The `malleus` command."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

import malleus_ds
from malleus_ds.cli import checkpoint, demo, plan, simulate
from malleus_ds.cli.errors import INTERRUPTED, JOB_FAILED, JobFailedError
from malleus_ds.errors import USER_MISTAKE, is_user_mistake

_EXIT_CODES = """\
exit codes:
  0  done
  1  a bar does not hold
  2  a mistake in what was given: an argument, a path, a config
  3  the job failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="malleus",
        description="Malleable hybrid-parallel training on DeepSpeed: plans that change while a job runs.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"malleus_ds {malleus_ds.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    checkpoint.add_parser(commands)
    demo.add_parser(commands)
    plan.add_parser(commands)
    simulate.add_parser(commands)
    args = parser.parse_args(arguments)
    # As Ctrl-C: a command that is told to end also ends the job that it started.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(args.run(args))
    except ValueError as error:
        if not is_user_mistake(error):
            raise
        print(f"malleus: {error}", file=sys.stderr)
        return USER_MISTAKE
    except JobFailedError as error:
        print(f"malleus: {error}", file=sys.stderr)
        return JOB_FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
