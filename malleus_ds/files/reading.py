"""From a YAML or JSON file to plain data, without keys that silently replace each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class FileError(ValueError):
    """A file or a text of the user that cannot be used: names it, the key, the value and the fix."""


def read_text(path: str | Path) -> str:
    """The text of a file. Raises `FileError` when there is none, or it is not text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such file; give the path of an existing one") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not a text file in UTF-8; give one") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); give a readable file") from error


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """The mapping at the top of a JSON file (suffix ``.json``) or a YAML file. Raises `FileError`."""
    text = read_text(path)
    return parse_json(text, path) if Path(path).suffix == ".json" else _parse_yaml(text, path)


def parse_json(text: str, where: str | Path) -> dict[Any, Any]:
    """The mapping that a JSON text holds. Raises `FileError`, which names ``where``."""
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except json.JSONDecodeError as error:
        raise FileError(
            f"{where}: not JSON: {error.msg} (line {error.lineno}, column {error.colno}); mend it there"
        ) from error
    return _mapping(data, where)


def _unique(pairs: Iterable[tuple[Any, Any]], where: str | Path) -> dict[Any, Any]:
    data: dict[Any, Any] = {}
    for key, value in pairs:
        if key in data:
            raise FileError(f"{where}: key {key!r} is there twice, last with {value!r}; keep one of them")
        data[key] = value
    return data


def _mapping(data: Any, where: str | Path) -> dict[Any, Any]:
    if data is None:
        raise FileError(f"{where}: empty; write 'key: value' lines")
    if not isinstance(data, dict):
        raise FileError(f"{where}: {shown(data)} where keys and values belong; write 'key: value' lines")
    return data


def shown(value: Any) -> str:
    """A value of the user in an error: on one line, and not longer than that."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse_yaml(text: str, path: str | Path) -> dict[Any, Any]:
    import yaml  # type: ignore[import-untyped]  # Here: it costs start-up time.

    # The C parser, where it was built, reads the file of a large cluster 10 times faster.
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Safe, with 1e3 as a number: YAML 1.2 and JSON have it so, for PyYAML it is a text."""

    exponent = re.compile(r"[-+]?(\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+.0123456789"))
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return _mapping(None, path)
        _check_keys(root, path)
        return _mapping(loader.construct_document(root), path)
    except yaml.YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise FileError(f"{path}: not YAML: {problem}{place}; mend it there") from error


def _check_keys(root: Any, path: str | Path) -> None:
    """Raise `FileError` for a key that a mapping of PyYAML's nodes has twice: the last would win."""
    nodes, visited = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in visited or isinstance(node.value, str):
            continue
        visited.add(id(node))
        keys = set[str]()
        for child in node.value:  # A pair in a mapping, a node in a list.
            key, value = child if isinstance(child, tuple) else (None, child)
            nodes.append(value)
            if key is None or not isinstance(key.value, str):
                continue
            if key.value in keys:
                line = key.start_mark.line + 1
                raise FileError(f"{path}: key {key.value!r} is there twice (line {line}); keep one of them")
            keys.add(key.value)
