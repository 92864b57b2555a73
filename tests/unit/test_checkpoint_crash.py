"""Whenever a writer dies, the checkpoint before it or the new one loads, whole."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from malleus_ds.checkpoint.background import BackgroundSave
from malleus_ds.checkpoint.directory import begin, commit, discard, find, latest_tag
from malleus_ds.checkpoint.disk import Disk
from malleus_ds.checkpoint.errors import CheckpointError
from malleus_ds.checkpoint.manifest import FILE_NAME, Manifest, file_from_dict, file_to_dict, read_manifest
from malleus_ds.checkpoint.part_file import Content, FileEntry, Interval, write_part
from malleus_ds.checkpoint.reading import IntervalReader, check_files

NUM_RANKS = 2
NUM_ELEMENTS = 50


class Died(BaseException):
    """The writer's process is gone."""


class MortalDisk(Disk):
    """Dies instead of its operation number ``death`` (from 0); half-way through it when that is a write."""

    def __init__(self, death: int) -> None:
        self.death = death
        self.num_operations = 0

    def _count(self) -> bool:
        self.num_operations += 1
        return self.num_operations > self.death

    def _live(self) -> None:
        if self._count():
            raise Died

    def make_directory(self, path: Path) -> None:
        self._live()
        super().make_directory(path)

    @contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        self._live()
        with super().create(path) as file:
            yield file
            self._live()

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self._count():
            super().write(file, data[: len(data) // 2])
            raise Died
        super().write(file, data)

    def sync_directory(self, path: Path) -> None:
        self._live()
        super().sync_directory(path)

    def rename(self, old: Path, new: Path) -> None:
        self._live()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._live()
        super().remove(path)

    def remove_directory(self, path: Path) -> None:
        self._live()
        super().remove_directory(path)


def manifest(files: tuple[FileEntry, ...]) -> Manifest:
    return Manifest((), files, "SGD", (), None, None, {}, {}, {}, {})


def part(rank: int, value: float) -> list[Content]:
    values = torch.full((NUM_ELEMENTS,), value)
    interval = Interval("parameter", "weight", rank * NUM_ELEMENTS, (rank + 1) * NUM_ELEMENTS)
    return [Content(interval, values)]


def save(disk: Disk, folder: Path, tag: str, value: float) -> None:
    """What the ranks of a job do, one after the other; ``value`` fills the state."""
    directory = begin(disk, folder, tag)
    files = tuple(
        write_part(disk, directory / f"rank_{rank:05d}.safetensors", part(rank, value))
        for rank in range(NUM_RANKS)
    )
    commit(disk, directory, tag, manifest(files).to_json(), save_latest=True)


def load(folder: Path) -> float:
    """The value of the newest checkpoint; asserts that it is whole."""
    tag = latest_tag(folder)
    assert tag is not None
    directory = find(folder, tag)
    content = Manifest.parse(read_manifest(directory), directory / FILE_NAME)
    check_files(directory, content.files)
    with IntervalReader(directory, content.files) as reader:
        values = reader.read(Interval("parameter", "weight", 0, NUM_RANKS * NUM_ELEMENTS))
    (value,) = values.unique().tolist()
    return float(value)


def crash(folder: Path, tag: str, value: float, death: int) -> bool:
    """Save until ``death``; whether the writer died."""
    try:
        save(MortalDisk(death), folder, tag, value)
    except Died:
        return True
    return False


def num_operations(folder: Path, tag: str) -> int:
    disk = MortalDisk(10**9)
    save(disk, folder, tag, 0.0)
    return disk.num_operations


@pytest.mark.parametrize("tag", ["same", "other"])
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_one(tmp_path: Path, tag: str) -> None:
    save(Disk(), tmp_path / "start", "same", 1.0)
    shutil.copytree(tmp_path / "start", tmp_path / "counted")
    total = num_operations(tmp_path / "counted", tag)
    assert total > 20
    loaded = []
    for death in range(total):
        folder = tmp_path / f"crash_{death}"
        shutil.copytree(tmp_path / "start", folder)
        assert crash(folder, tag, 2.0, death)
        loaded.append(load(folder))
        assert loaded[-1] in (1.0, 2.0)
        save(Disk(), folder, tag, 3.0)
        assert load(folder) == 3.0
        names = {path.name for path in folder.iterdir()}
        assert names == {"same", tag, "latest"}, "the next save of a tag clears what a crash left of it"
    assert loaded == sorted(loaded), "from some operation on it is the new one"
    assert {1.0, 2.0} == set(loaded)


def test_crashes_of_saves_after_crashes(tmp_path: Path) -> None:
    save(Disk(), tmp_path / "start", "same", 1.0)
    choice = random.Random(7)
    for trial in range(60):
        folder = tmp_path / f"trial_{trial}"
        shutil.copytree(tmp_path / "start", folder)
        possible = {1.0}
        for value in (2.0, 3.0, 4.0):
            crash(folder, "same", value, choice.randrange(45))
            possible.add(value)
            loaded = load(folder)
            assert loaded in possible
            possible = {loaded}


def save_forever(folder: Path, connection: Connection) -> None:
    for value in range(1, 10**6):
        save(Disk(), folder, f"tag{value % 2}", float(value))
        connection.send(value)


def test_a_killed_process_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    choice = random.Random(3)
    for trial in range(10):
        folder = tmp_path / str(trial)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=save_forever, args=(folder, sender))
        process.start()
        sender.close()
        assert receiver.recv() == 1
        time.sleep(choice.uniform(0, 0.05))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        last = 1
        with contextlib.suppress(EOFError):
            while True:
                last = receiver.recv()
        assert load(folder) in (last, last + 1)


class FullDisk(Disk):
    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device")


class StuckDisk(Disk):
    def __init__(self) -> None:
        self.answers = threading.Event()

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        assert self.answers.wait(60)
        super().write(file, data)


class TestBackground:
    def start(self, folder: Path, disks: list[Disk], timeout_s: float = 60.0) -> list[BackgroundSave]:
        directory = begin(Disk(), folder, "tag")

        def finish(entries: object) -> None:
            files = tuple(entry for entry in entries if entry is not None)  # type: ignore[attr-defined]
            commit(Disk(), directory, "tag", manifest(files).to_json(), save_latest=True)

        def background(rank: int, disk: Disk) -> BackgroundSave:
            path = directory / f"rank_{rank:05d}.safetensors"

            def write() -> FileEntry:
                return write_part(disk, path, part(rank, 5.0))

            return BackgroundSave(disk, directory, rank, len(disks), write, finish, timeout_s)

        return [background(rank, disk) for rank, disk in enumerate(disks)]

    def test_the_checkpoint_is_there_without_another_word(self, tmp_path: Path) -> None:
        saves = self.start(tmp_path, [Disk(), Disk()])
        assert [save.wait() for save in saves] == [None, None]
        assert load(tmp_path) == 5.0
        assert len(list((tmp_path / "tag").iterdir())) == NUM_RANKS + 1

    def test_one_rank_that_fails_is_named_and_rank_0_does_not_wait_for_it(self, tmp_path: Path) -> None:
        saves = self.start(tmp_path, [Disk(), FullDisk()])
        errors = [save.wait_for_part() for save in saves]
        assert errors[0] is None
        assert errors[1] is not None
        assert "rank_00001.safetensors: cannot be written (No space left on device)" in errors[1]
        saves[0].give_up()
        assert "another rank" in str(saves[0].wait())
        discard(Disk(), saves[0].directory)
        assert list(tmp_path.iterdir()) == []

    def test_it_says_that_it_is_not_over_yet(self, tmp_path: Path) -> None:
        stuck = StuckDisk()
        (save,) = self.start(tmp_path, [stuck])
        assert [save.part_ends_within(0.01), save.ends_within(0.01)] == [False, False]
        stuck.answers.set()
        assert [save.part_ends_within(60), save.ends_within(60)] == [True, True]

    def test_a_save_that_was_too_late_makes_no_checkpoint_later(self, tmp_path: Path) -> None:
        """``latest`` would go back behind a newer one."""
        stuck = StuckDisk()
        (late,) = self.start(tmp_path, [stuck], timeout_s=0.1)
        assert "was not written within 0.1 s" in str(late.wait_for_part())
        late.give_up()
        save(Disk(), tmp_path, "newer", 6.0)
        stuck.answers.set()
        deadline_s = time.monotonic() + 30
        while not late.is_over and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert latest_tag(tmp_path) == "newer"
        assert "was given up" in str(late.wait())


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"tag exists and is no checkpoint of malleus_ds: remove it"):
        save(Disk(), tmp_path, "tag", 1.0)
    assert (tmp_path / "tag" / "thesis.tex").exists()


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "latest", "latest.tmp", "x.replaced", "x.tmp-1"])
def test_tags_that_cannot_be_names(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="tag is"):
        find(tmp_path, tag)


def test_a_tag_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    save(Disk(), tmp_path, "step7", 1.0)
    with pytest.raises(CheckpointError, match=r"step8: there is no such checkpoint; .* has step7"):
        find(tmp_path, "step8")


def test_files_round_trip_through_the_manifest(tmp_path: Path) -> None:
    entry = write_part(Disk(), tmp_path / "rank_00000.safetensors", part(0, 1.0))
    assert file_from_dict(json.loads(json.dumps(file_to_dict(entry)))) == entry

    def test_a_disk_that_does_not_answer_is_not_waited_for_for_ever(self, tmp_path: Path) -> None:
        disk = StuckDisk()
        saves = self.start(tmp_path, [Disk(), disk], timeout_s=0.5)
        error = saves[1].wait_for_part()
        assert [saves[1].part_ends_within(60), saves[1].ends_within(60)] == [True, True]
        assert "rank 1's part was not written within 0.5 s" in str(error)
        assert "malleus.checkpoint.timeout_s" in str(error)
        assert "another rank" in str(saves[0].wait())
        assert [save.is_over for save in saves] == [True, False]
        disk.answers.set()
