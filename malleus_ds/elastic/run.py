"""The loop of `malleus-run`: start, watch, and after a loss start again on what is left."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from malleus_ds.cluster import ClusterError
from malleus_ds.elastic.attempt import Attempt
from malleus_ds.elastic.devices import Device, Host, by_host, first_devices, next_devices
from malleus_ds.elastic.judge import Ending, Judgement, judge
from malleus_ds.elastic.launchers import launches
from malleus_ds.elastic.restart_plan import RestartPlan, make_restart_plan
from malleus_ds.elastic.run_files import PLAN, REQUEST, Order, Progress, Verdict, attempt_path, read_json
from malleus_ds.elastic.run_log import RunLog
from malleus_ds.environment import free_port
from malleus_ds.errors import USER_MISTAKE
from malleus_ds.files.reading import FileError
from malleus_ds.plan import PlanError

JOB_FAILED = 3
TOO_FEW_RANKS = 4

_SHARED_MEMORY = Path("/dev/shm")
_LONGEST_BACKOFF_S = 300.0
_VERDICT_S = 120.0
"""Beside the waiting for ranks and the planner: its start, and a slow disk."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run, where, and how often to start again.

    script: a path, or ``-m`` and a module; read_hosts: the hosts, as they are now; all_local: every host is
    this machine; backoff_s: before a restart, doubled for each further one without progress; grace_s: for the
    other ranks to end by themselves once one is lost; planning_s: time limit of the planner; runner_args: of
    DeepSpeed's runner; visible_devices: ids of this machine's devices by slot, empty where slots are the ids.
    """

    script: tuple[str, ...]
    arguments: tuple[str, ...]
    passes_local_rank: bool
    run_dir: Path
    read_hosts: Callable[[], tuple[Host, ...]]
    all_local: bool
    max_restarts: int
    min_ranks: int
    backoff_s: float
    grace_s: float
    planning_s: float
    runner_args: tuple[str, ...]
    visible_devices: tuple[str, ...] = ()


class RunEndedError(RuntimeError):
    """The job ended before it was done. code: exit code of `malleus-run`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Start:
    """What the next attempt starts with. plan: None for the script's own."""

    devices: tuple[Device, ...]
    fresh_hosts: tuple[str, ...]
    plan: RestartPlan | None = None


class Run:
    """A job over all its attempts."""

    def __init__(self, options: RunOptions, log: RunLog) -> None:
        """Raises `ClusterError` or `FileError` for wrong hosts."""
        self._options = options
        self._log = log
        self._hosts = options.read_hosts()
        self._num_wanted = len(first_devices(self._hosts))
        self._lost: dict[Device, str] = {}
        self._furthest_step = -1
        self._backoff_s = options.backoff_s
        self._memory = _SHARED_MEMORY / f"malleus-{secrets.token_hex(4)}"

    def run(self) -> None:
        """Until the job is done. Raises `RunEndedError`."""
        devices = first_devices(self._hosts)
        if len(devices) < self._options.min_ranks:
            raise RunEndedError(
                USER_MISTAKE,
                f"--min_ranks {self._options.min_ranks}: the hosts that are not spare have {len(devices)} "
                f"devices; give fewer",
            )
        start: _Start | None = _Start(devices, tuple(by_host(devices)))
        attempt = 0
        try:
            while start is not None:
                start = self._attempt(attempt, start)
                attempt += 1
        finally:
            for path in _SHARED_MEMORY.glob(f"{self._memory.name}-*"):  # what no attempt came to remove
                shutil.rmtree(path, ignore_errors=True)
        self._log.tell("done", "the job is done")

    def _attempt(self, number: int, start: _Start) -> _Start | None:
        """Returns what to start next, after the back-off; None when the job is done.

        Supervisors wait for the back-off, too: when it is interrupted, they tidy up on all hosts.
        """
        slots = by_host(start.devices)
        folder = self._order(number, start).save(self._options.run_dir)
        if start.plan is not None:
            start.plan.save(folder / PLAN)
        options = self._options
        commands = launches(
            slots, folder, free_port(), options.all_local, options.runner_args, options.visible_devices
        )
        on_hosts = ", ".join(f"{host}:{','.join(map(str, used))}" for host, used in slots.items())
        self._log.tell(
            "start",
            f"attempt {number}: starting {len(start.devices)} ranks on {on_hosts}",
            attempt=number,
            hosts=slots,
        )

        def tell_progress(progress: Progress) -> None:
            text = f"attempt {number}: training goes on at step {progress.first_step}"
            self._log.tell("training", text, attempt=number, step=progress.first_step)

        following: _Start | None = None
        grace_s = self._options.grace_s
        try:
            with Attempt(commands, folder, len(start.devices), grace_s, tell_progress) as running:
                notes = running.watch()
                has_progress = running.progress is not None or self._furthest_step >= 0
                judgement = judge(notes, has_progress)
                if judgement.ending is not Ending.DONE:
                    following = self._following(number, start, judgement, running.progress)
                stays = () if following is None else tuple(by_host(following.devices))
                if following is not None:
                    time.sleep(self._backoff_s)
                running.leave(Verdict(stays))
        finally:
            for host in slots:  # of this machine; supervisors do so on other ones
                if following is None or host not in by_host(following.devices):
                    shutil.rmtree(self._memory_dir(host), ignore_errors=True)
        return following

    def _order(self, number: int, start: _Start) -> Order:
        return Order(
            attempt=number,
            devices=start.devices,
            script=self._options.script,
            arguments=self._options.arguments,
            passes_local_rank=self._options.passes_local_rank,
            memory_dirs={host: str(self._memory_dir(host)) for host in by_host(start.devices)},
            fresh_hosts=start.fresh_hosts,
            has_plan=start.plan is not None,
            verdict_s=_VERDICT_S
            + self._options.grace_s
            + 2 * self._options.planning_s
            + max(self._options.backoff_s, _LONGEST_BACKOFF_S),
        )

    def _memory_dir(self, host: str) -> Path:
        return self._memory.with_name(f"{self._memory.name}-{host}")

    def _following(
        self, number: int, start: _Start, judgement: Judgement, progress: Progress | None
    ) -> _Start:
        """What to start after an attempt that failed. Raises `RunEndedError` when nothing can be."""
        self._tell_losses(number, start, judgement)
        if judgement.ending is Ending.MISTAKE:
            raise RunEndedError(USER_MISTAKE, f"not started again, for a mistake: {judgement.reason}")
        if judgement.ending is Ending.BROKEN:
            raise RunEndedError(
                JOB_FAILED, f"not started again: all ranks failed before the first step: {judgement.reason}"
            )
        if number >= self._options.max_restarts:
            raise RunEndedError(
                JOB_FAILED, f"not started again: {number} restarts were made, of --max_restarts {number}"
            )
        devices = self._next_devices(start, judgement)
        if len(devices) < self._options.min_ranks:
            raise RunEndedError(
                TOO_FEW_RANKS, f"{len(devices)} ranks are left; --min_ranks is {self._options.min_ranks}"
            )
        self._lengthen_backoff(number, progress)
        before = by_host(start.devices)
        fresh_hosts = tuple(host for host in by_host(devices) if host not in before)
        return _Start(devices, fresh_hosts, self._plan(devices))

    def _tell_losses(self, number: int, start: _Start, judgement: Judgement) -> None:
        for lost in judgement.lost:
            device = start.devices[lost.rank]
            text = f"attempt {number}: rank {lost.rank} ({device.host}, slot {device.slot}) {lost.how}"
            self._log.tell("lost", text, attempt=number, **asdict(device), **asdict(lost))
        if not judgement.lost and judgement.ending is Ending.LOSS:
            text = f"attempt {number}: ended, but no rank is known to be lost: {judgement.reason}"
            self._log.tell("lost", text, attempt=number, rank=None, how=judgement.reason)

    def _next_devices(self, start: _Start, judgement: Judgement) -> tuple[Device, ...]:
        lines = {host.name: host.text for host in self._hosts}
        for lost in judgement.lost:
            device = start.devices[lost.rank]
            self._lost[device] = lines[device.host]
        try:
            self._hosts = self._options.read_hosts()
        except (ClusterError, FileError) as error:
            self._log.tell("hosts", f"going on with the hosts as they were, because of a mistake: {error}")
        return next_devices(self._hosts, start.devices, self._lost, self._num_wanted)

    def _lengthen_backoff(self, number: int, progress: Progress | None) -> None:
        step = -1 if progress is None else progress.step
        if number > 0 and step <= self._furthest_step:
            self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)
        else:
            self._backoff_s = self._options.backoff_s
        self._furthest_step = max(step, self._furthest_step)

    def _plan(self, devices: tuple[Device, ...]) -> RestartPlan | None:
        """The planner's, for the job as rank 0 described it last; None when it did not get so far."""
        data = read_json(self._options.run_dir / REQUEST)
        if data is None:
            self._log.tell("plan", "no step was reached: the script makes its own plan")
            return None
        described = Order.load(attempt_path(self._options.run_dir, data["attempt"])).devices
        try:
            plan = make_restart_plan(data["request"], described, devices, self._options.planning_s)
        except PlanError as error:
            raise RunEndedError(TOO_FEW_RANKS, str(error)) from error
        self._log.tell("plan", f"the new plan:\n{plan.plan}", plan=plan.plan.to_dict())
        return plan
