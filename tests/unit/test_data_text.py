from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from malleus_ds.data import VOCABULARY_SIZE, ByteTextDataset, DataError
from malleus_ds.data.text import BEGIN_OF_DOCUMENT, _standard_library_files, decode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.MD").write_bytes("fir\u00df\xff".encode("latin-1"))
    (tmp_path / "sub" / "c.py").write_bytes(b"third\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"not text")
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    return tmp_path


def test_a_folder_is_its_text_files_in_order_each_after_a_document_token(folder: Path) -> None:
    dataset = ByteTextDataset(2, folder)
    begin = [BEGIN_OF_DOCUMENT]
    expected = [*begin, *b"fir\xdf\xff", *begin, *b"second", *begin, *b"third\n"]
    assert dataset.tokens.tolist() == expected
    assert decode(dataset.tokens) == b"fir\xdf\xffsecondthird\n"


@pytest.mark.parametrize("sequence_length", [1, 2, 3, 6, 19])
def test_windows_cover_the_text_once_with_next_token_labels(folder: Path, sequence_length: int) -> None:
    dataset = ByteTextDataset(sequence_length, folder)
    corpus = torch.from_numpy(dataset.tokens.astype(np.int64))
    samples = [dataset[i] for i in range(len(dataset))]
    covered = len(samples) * sequence_length
    assert len(corpus) - sequence_length <= covered < len(corpus)
    assert torch.equal(torch.cat([tokens for tokens, _ in samples]), corpus[:covered])
    assert torch.equal(torch.cat([labels for _, labels in samples]), corpus[1 : covered + 1])
    assert all(t.dtype == torch.int64 and t.shape == (sequence_length,) for pair in samples for t in pair)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_one_file_of_any_suffix(folder: Path) -> None:
    assert decode(ByteTextDataset(3, str(folder / "image.png")).tokens) == b"not text"


@pytest.mark.parametrize("max_bytes", [4, 5, 6, 11, 16, 17, 100])
def test_max_bytes_cuts_the_text(folder: Path, max_bytes: int) -> None:
    text = b"fir\xdf\xffsecondthird\n"
    assert decode(ByteTextDataset(2, folder, max_bytes).tokens) == text[:max_bytes]


def test_the_default_corpus_is_the_standard_library() -> None:
    dataset = ByteTextDataset(128)
    tokens = dataset.tokens
    assert tokens.max() == BEGIN_OF_DOCUMENT < VOCABULARY_SIZE
    assert tokens.nbytes == 2 * len(tokens) > 2 * 5e6
    source = Path(ast.__file__).read_bytes()
    documents = np.flatnonzero(tokens == BEGIN_OF_DOCUMENT)
    lengths = np.diff(np.append(documents, len(tokens))) - 1
    starts = documents[lengths == len(source)]
    assert source in [decode(tokens[start : start + len(source) + 1]) for start in starts]
    assert np.array_equal(tokens, ByteTextDataset(128).tokens)


def test_the_standard_library_is_taken_without_installed_packages_and_tests(tmp_path: Path) -> None:
    names = ["a.py", "json/b.py", "json/tests/c.py", "site-packages/d.py", "test/e.py", "lib2to3/tests/f.py"]
    for name in ["json/note.txt", "idlelib/idle_test/g.py", *names]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert _standard_library_files(tmp_path) == [tmp_path / "a.py", tmp_path / "json" / "b.py"]


def test_errors_name_the_path_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.txt.*No such file"):
        ByteTextDataset(4, tmp_path / "missing.txt")
    with pytest.raises(DataError, match="no text files; pass a file"):
        ByteTextDataset(4, tmp_path)
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(DataError, match=r"gives 4 tokens.*sequence_length \+ 1 = 5.*give more text"):
        ByteTextDataset(4, tmp_path)
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(DataError, match="gives 0 tokens"):
        ByteTextDataset(4, tmp_path)
    with pytest.raises(DataError, match="sequence_length is 0"):
        ByteTextDataset(0, tmp_path)
    with pytest.raises(DataError, match="max_bytes is 0"):
        ByteTextDataset(4, tmp_path, max_bytes=0)
