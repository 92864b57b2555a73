"""Real text as bytes: by default the source of the running interpreter's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from malleus_ds.data.order import DataError

BEGIN_OF_DOCUMENT = 256
"""Token before the first byte of each file; tokens 0 to 255 are the bytes themselves."""

VOCABULARY_SIZE = 264
"""256 bytes and 8 specials, of which one is used: a multiple of 8, so that 8 ranks can cut it."""

TEXT_SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".xml", ".json", ".csv", ".tsv"),
    *(".py", ".sh", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".js", ".ts", ".go", ".rs"),
)

# Third-party packages differ between machines; test folders hold files that are no proper text.
_EXCLUDED_FOLDERS = frozenset(["site-packages", "dist-packages", "test", "tests", "idle_test"])


class ByteTextDataset(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Next-byte prediction over non-overlapping windows of a text corpus.

    sequence_length: tokens of a window, ``L``; path: a text file, or a folder whose files with a
    suffix of `TEXT_SUFFIXES` are read in the order of their relative paths, None for the standard
    library's ``.py`` files; max_bytes: read no more text than this.
    Item ``i`` is ``(tokens, labels)``, both int64 ``[L]``, with ``labels[k]`` the token after
    ``tokens[k]``. The corpus takes 2 bytes of memory per byte of text. Raises `DataError`.
    """

    def __init__(
        self, sequence_length: int, path: str | Path | None = None, max_bytes: int | None = None
    ) -> None:
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}; it must be at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise DataError(f"max_bytes is {max_bytes}; it must be at least 1, or None for all text")
        root = Path(sysconfig.get_path("stdlib")) if path is None else Path(path)
        files = _standard_library_files(root) if path is None else _text_files(root)
        self.sequence_length = sequence_length
        self.tokens = _tokenize(_read(files, max_bytes))
        if len(self.tokens) <= sequence_length:
            raise DataError(
                f"the text of {str(root)!r} gives {len(self.tokens)} tokens, but one sample takes "
                f"sequence_length + 1 = {sequence_length + 1}; give more text or a shorter sequence_length"
            )

    def __len__(self) -> int:
        # The last label of a window is the first token of the next one.
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.sequence_length
        window = torch.from_numpy(self.tokens[start : start + self.sequence_length + 1].astype(np.int64))
        return window[:-1], window[1:]


def decode(tokens: Iterable[int]) -> bytes:
    """The text of ``tokens``; specials are left out."""
    return bytes(token for token in map(int, tokens) if token < BEGIN_OF_DOCUMENT)


def _tokenize(documents: Iterable[bytes]) -> npt.NDArray[np.uint16]:
    """All documents in one array, each after `BEGIN_OF_DOCUMENT`."""
    begin = np.array([BEGIN_OF_DOCUMENT], dtype=np.uint16)
    parts = [np.empty(0, dtype=np.uint16)]
    for document in documents:
        parts += [begin, np.frombuffer(document, dtype=np.uint8).astype(np.uint16)]
    return np.concatenate(parts)


def _read(files: Iterable[Path], max_bytes: int | None) -> Iterator[bytes]:
    """Contents of the non-empty files, cut after ``max_bytes`` in all."""
    num_left = max_bytes
    for file in files:
        if num_left == 0:
            return
        try:
            with file.open("rb") as stream:
                content = stream.read() if num_left is None else stream.read(num_left)
        except OSError as error:
            raise _unreadable(error) from error
        if num_left is not None:
            num_left -= len(content)
        if content:
            yield content


def _standard_library_files(root: Path) -> list[Path]:
    files = _files_below(root, (".py",), _EXCLUDED_FOLDERS)
    if not files:
        raise DataError(
            f"the standard library in {str(root)!r} has no source files; pass path= to a text file or folder"
        )
    return files


def _text_files(root: Path) -> list[Path]:
    if not root.is_dir():
        return [root]
    files = _files_below(root, TEXT_SUFFIXES)
    if not files:
        raise DataError(
            f"the folder {str(root)!r} has no text files; pass a file, or a folder with files that end in "
            f"one of {' '.join(TEXT_SUFFIXES)}"
        )
    return files


def _files_below(root: Path, suffixes: tuple[str, ...], excluded: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files in ``root`` and its folders, in the order of their relative paths."""

    def fail(error: OSError) -> None:
        raise _unreadable(error) from error

    files = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name not in excluded]
        files += [Path(folder, name) for name in names if name.lower().endswith(suffixes)]
    return sorted(filter(Path.is_file, files), key=lambda file: file.relative_to(root).as_posix())


def _unreadable(error: OSError) -> DataError:
    return DataError(
        f"cannot read the text in {str(error.filename)!r}: {error.strerror}; "
        f"make it readable or pass another path"
    )
