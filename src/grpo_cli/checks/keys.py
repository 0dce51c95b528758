"""The schema read as a list of dotted keys: what there is, what type it has, and what a wrong name stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from grpo_cli.checks.engine import lookup
from grpo_cli.schema import Config

Model = type[BaseModel]


def known_keys(resolved: Mapping[str, Any]) -> Iterator[str]:
    """Every key that the schema has for the chosen options, dotted; elements of lists left out."""
    for section in Config.model_fields:
        yield from (f"{section}.{key}" for key in _fields(model_of(section, resolved)))


def _fields(model: Model) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for inner in _inner_models(field.annotation):
            yield from (f"{name}.{key}" for key in _fields(inner))


def _inner_models(annotation: Any) -> list[Model]:
    """The single group of keys that an annotation is, or may be; none for lists and plain values."""
    options = get_args(annotation) if _is_union(annotation) else (annotation,)
    return [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) is Union or isinstance(annotation, UnionType)


def members(section: str) -> dict[str, Model]:
    """Option name -> schema of a group whose options differ in their keys; empty for the other groups."""
    return _tagged(Config.model_fields[section].annotation) if section in Config.model_fields else {}


def term_models() -> dict[str, Model]:
    """Name -> schema of the built-in reward terms."""
    return _tagged(get_args(members_of_list("reward", "terms"))[0])


def members_of_list(section: str, key: str) -> Any:
    """The annotation of a list in a group that has one schema."""
    model: Any = Config.model_fields[section].annotation
    return model.model_fields[key].annotation


def _tagged(annotation: Any) -> dict[str, Model]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if not _is_union(annotation):
        return {}
    found = [member for member in get_args(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]
    return {tag(member): member for member in found if "name" in member.model_fields}


def tag(member: Model) -> str:
    """The `name` that chooses this schema."""
    return get_args(member.model_fields["name"].annotation)[0]


def model_of(section: str, resolved: Mapping[str, Any]) -> Model:
    """The schema of a group, by its `name` where the options differ."""
    options = members(section)
    if not options:
        return Config.model_fields[section].annotation  # type: ignore[return-value]
    name = lookup(resolved, f"{section}.name")
    known = options.get(name) if isinstance(name, str) else None
    return known or closest_member(options, resolved.get(section))


def closest_member(options: Mapping[str, Model], values: Any) -> Model:
    """The option whose keys are most like those that are there: what a wrong `name` was probably meant to be."""
    keys = set(values) if isinstance(values, Mapping) else set()
    return min(options.values(), key=lambda member: len(keys.symmetric_difference(member.model_fields)))


def annotation_of(key: str, resolved: Mapping[str, Any]) -> Any:
    """The schema's type of a dotted key; None where it has none."""
    section, *parts = key.split(".")
    models = [model_of(section, resolved)] if section in Config.model_fields else []
    annotation: Any = None
    path = section
    for part in parts:
        path = f"{path}.{part}"
        if part.isdigit():
            element = next((option for option in _lists(annotation)), None)
            known = _tagged(element)
            models = [known[name]] if (name := lookup(resolved, f"{path}.name")) in known else []
            annotation = element
            continue
        field = next((model.model_fields[part] for model in models if part in model.model_fields), None)
        annotation = field.annotation if field else None
        models = _inner_models(annotation)
    return annotation


def _lists(annotation: Any) -> Iterator[Any]:
    """The element types of the lists that an annotation allows."""
    for option in get_args(annotation) if _is_union(annotation) else (annotation,):
        if get_origin(option) is list:
            yield get_args(option)[0]


def nullable(key: str, resolved: Mapping[str, Any]) -> bool:
    """Whether null is a value of this key."""
    annotation = annotation_of(key, resolved)
    return _is_union(annotation) and type(None) in get_args(annotation)


def choices(key: str, resolved: Mapping[str, Any]) -> list[Any]:
    """The listed values of an enumerated key, null among them where it is one."""
    annotation = annotation_of(key, resolved)
    listed: list[Any] = []
    for option in get_args(annotation) if _is_union(annotation) else (annotation,):
        listed += get_args(option) if get_origin(option) is Literal else [None] * (option is type(None))
    return listed


def dotted(loc: tuple[int | str, ...]) -> str:
    """pydantic's place of an error as a dotted key, without the option names that it puts between."""
    parts = [str(part) for part in loc]
    if len(parts) > 1 and members(parts[0]):
        del parts[1]
    if len(parts) > 3 and parts[:2] == ["reward", "terms"]:
        del parts[3]
    return ".".join(parts)
