"""From YAML text to plain mappings, and from validation failures to sentences for the operator."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from tiercache.errors import ConfigError

HERE = "<here>"
"""Stands in a validator's message for the dotted name of the section it belongs to."""

_SECRET_KEYS = {"api_keys", "admin_keys", "keys"}


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key written twice instead of letting the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is there twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping a YAML file holds; an empty file is an empty mapping. ConfigError otherwise."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from None
    try:
        value = yaml.load(text, Loader=_Loader)  # the loader is a safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: the file should hold sections such as `tiers:`, not {value!r}")
    return value


def explain_problems(root: type[BaseModel], error: ValidationError) -> Iterator[str]:
    """One line for each failure: dotted name, what is wrong, what would be right."""
    for problem in error.errors(include_url=False):
        location = tuple(part for part in problem["loc"] if part != "[key]")
        name = dotted_name(location)
        if problem["type"] == "extra_forbidden":
            yield f"{name}: unknown key; {_suggestion(root, location)}"
        elif problem["type"] == "invalid_key":
            yield f"{name}: keys should be text"
        elif problem["type"] == "tuple_type":
            yield f"{name}: should be a list, such as [one, two]"
        elif problem["type"] == "dict_type":
            yield f"{name}: should be names with a section each (got {problem['input']!r})"
        elif problem["type"] == "model_type":
            names = ", ".join(_section_at(root, location).model_fields)
            yield f"{name}: should be a section with keys of: {names} (got {problem['input']!r})"
        else:
            yield _explain_value(name, location, problem)


def _explain_value(name: str, location: tuple[int | str, ...], problem: Mapping[str, Any]) -> str:
    reason = problem.get("ctx", {}).get("error")
    if reason is None:
        message = problem["msg"].replace("Input should be", "should be", 1)
    elif HERE in str(reason) or not name:
        return str(reason).replace(HERE, name)
    else:
        message = str(reason)
    if _SECRET_KEYS.intersection(map(str, location)):
        return f"{name}: {message}"
    return f"{name}: {message} (got {problem['input']!r})"


def dotted_name(location: tuple[int | str, ...]) -> str:
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return parts.removeprefix(".")


def _section_at(root: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    kind: Any = root
    for part in location:
        if get_origin(kind) is dict:  # sections by a name the operator chose
            kind = get_args(kind)[1]
        else:
            kind = kind.model_fields[str(part)].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, BaseModel)
    return kind


def _suggestion(root: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The nearest valid name: in the same section if one is close, else anywhere."""
    key = str(location[-1])
    prefix = dotted_name(location[:-1])
    siblings = list(_section_at(root, location[:-1]).model_fields)
    near = difflib.get_close_matches(key, siblings, n=1)
    if near:
        return f"did you mean {f'{prefix}.{near[0]}' if prefix else near[0]}?"
    everywhere = list(_all_names(root))
    for name in everywhere:
        if difflib.get_close_matches(key, [name.rpartition(".")[2]], n=1, cutoff=0.8):
            return f"did you mean {name}?"
    return f"{prefix or 'the file'} has: {', '.join(siblings)}"


def _all_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _all_names(field.annotation, f"{prefix}{name}.")
