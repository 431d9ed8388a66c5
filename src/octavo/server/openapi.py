"""The OpenAPI document of a server, made of the tables of its dialects and the types of bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatchmethod
from typing import Any

import msgspec
from msgspec import inspect

from octavo import __version__
from octavo.server import replies
from octavo.server.dialect import (
    AnyRoute,
    BodyRoute,
    Dialect,
    FetchRoute,
    FixedRoute,
    GenerateRoute,
    ModelRoute,
    ModelsRoute,
    Object,
    RefusedRoute,
    StoredRoute,
)
from octavo.server.endpoint import Endpoint
from octavo.server.paging import asked
from octavo.server.parsing import Fields

REFUSALS = ("400", "401", "403", "404", "408", "413", "429", "431", "500", "503")
ANY: Object = {}


class Schemas:
    """JSON Schemas of types. components: those of structs, by name."""

    def __init__(self) -> None:
        self.components: dict[str, Object] = {}

    def of(self, kind: Any) -> Object:
        return self._schema(inspect.type_info(kind))

    @singledispatchmethod
    def _schema(self, kind: inspect.Type) -> Object:
        return ANY  # of Raw and Any

    @_schema.register
    def _(self, kind: inspect.Metadata) -> Object:
        return self._schema(kind.type) | (kind.extra_json_schema or {})

    @_schema.register
    def _(self, kind: inspect.StrType) -> Object:
        return _with({"type": "string"}, minLength=kind.min_length)

    @_schema.register
    def _(self, kind: inspect.IntType) -> Object:
        return _with({"type": "integer"}, minimum=kind.ge, maximum=kind.le)

    @_schema.register
    def _(self, kind: inspect.FloatType) -> Object:
        return {"type": "number"}

    @_schema.register
    def _(self, kind: inspect.BoolType) -> Object:
        return {"type": "boolean"}

    @_schema.register
    def _(self, kind: inspect.NoneType) -> Object:
        return {"type": "null"}

    @_schema.register
    def _(self, kind: inspect.LiteralType) -> Object:
        return {"enum": sorted(kind.values, key=str)}

    @_schema.register
    def _(self, kind: inspect.UnionType) -> Object:
        structs = [t for t in kind.types if isinstance(t, inspect.StructType)]
        tags = [t.tag_field for t in structs[:1]] if len(structs) > 1 else []  # tells them apart
        return {
            "anyOf": [
                self._schema(t) | ({"required": tags} if tags and t in structs else {})
                for t in kind.types
            ]
        }

    @_schema.register
    def _(self, kind: inspect.ListType) -> Object:
        return {"type": "array", "items": self._schema(kind.item_type)}

    @_schema.register
    def _(self, kind: inspect.TupleType) -> Object:
        items = {"anyOf": [self._schema(t) for t in kind.item_types]}
        count = len(kind.item_types)
        return {"type": "array", "items": items, "minItems": count, "maxItems": count}

    @_schema.register
    def _(self, kind: inspect.DictType) -> Object:
        return {"type": "object", "additionalProperties": self._schema(kind.value_type)}

    @_schema.register
    def _(self, kind: inspect.TypedDictType) -> Object:
        name = _component(kind.cls)
        if name not in self.components:
            self.components[name] = {}  # where it holds itself
            required = [f.encode_name for f in kind.fields if f.required]
            made = {
                "type": "object", "required": required,
                "properties": {f.encode_name: self._schema(f.type) for f in kind.fields},
            }  # fmt: skip
            chosen = not required  # clients say which fields they want
            self.components[name] = made if chosen else made | {"additionalProperties": False}
        return {"$ref": f"#/components/schemas/{name}"}

    @_schema.register
    def _(self, kind: inspect.StructType) -> Object:
        name = _component(kind.cls)
        if name not in self.components:
            self.components[name] = {}  # where a struct holds itself
            self.components[name] = self.struct(kind)
        return {"$ref": f"#/components/schemas/{name}"}

    def struct(self, kind: inspect.StructType, more: Mapping[str, Object] | None = None) -> Object:
        """An object with the fields of a struct and `more`, and no others."""
        tagged = {} if kind.tag_field is None else {kind.tag_field: {"const": kind.tag}}
        fields = {f.encode_name: self._schema(f.type) for f in kind.fields}
        required = [f.encode_name for f in kind.fields if f.required]
        return {
            "type": "object", "properties": {**(more or {}), **tagged, **fields},
            "required": required, "additionalProperties": False,
        }  # fmt: skip


def _with(schema: Object, **limits: Any) -> Object:
    return schema | {k: v for k, v in limits.items() if v is not None}


def _component(kind: type) -> str:
    """The name of a struct, with its module's: several have a Message."""
    *_, dialect, module = kind.__module__.split(".")
    return f"{dialect}.{module}.{kind.__name__}"


def _body(schemas: Schemas, body: type[msgspec.Struct], fields: Fields) -> Object:
    """What a body may be: its own fields, and those that any body of its dialect may have."""
    more: dict[str, Object] = dict.fromkeys(fields.ignored, ANY)
    for name, accepted in fields.unsupported.items():
        more[name] = {"enum": [None, *accepted]}
    kind = inspect.type_info(body)
    assert isinstance(kind, inspect.StructType)
    name = _component(body)
    schemas.components[name] = schemas.struct(kind, more)
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _operation(path: str, method: str, content: Mapping[str, Object], error: str) -> Object:
    """An operation without a body. error: the schema of what it refuses with."""
    refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    id = "_".join(re.findall(r"\w+", path)) or "root"
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    return {
        "operationId": f"{method}_{id}", "tags": [error.removesuffix(".Error")],
        **({"parameters": parameters} if parameters else {}),
        "responses": {"200": {"description": "OK", "content": dict(content)}}
        | {status: {"description": "Refused", "content": refusal} for status in REFUSALS},
    }  # fmt: skip


def _answer(schemas: Schemas, kind: Any, media: str = "application/json") -> dict[str, Object]:
    return {media.partition(";")[0]: {"schema": schemas.of(kind)}}


def method_of(route: AnyRoute) -> str:
    """The method of a route's requests."""
    if isinstance(route, RefusedRoute):
        return route.method
    return "POST" if isinstance(route, BodyRoute) else "GET"


def _operations(
    schemas: Schemas, dialect: Dialect, route: AnyRoute, error: str
) -> Iterable[tuple[str, str, Object]]:
    """The operations of a route, by path and method."""
    path = re.sub(r":path(?=\})", "", route.path)
    if isinstance(route, FixedRoute):
        said = _answer(schemas, route.answer, route.media_type)
        return [(path, "get", _operation(path, "get", said, error))]
    if isinstance(route, RefusedRoute):
        method = route.method.lower()
        made = _operation(path, method, {}, error)
        del made["responses"]["200"]
        return [(path, method, made | {"deprecated": True, "description": route.reason})]
    if isinstance(route, ModelRoute):
        made = _operation(path, "get", _answer(schemas, route.answer), error)
        return [(path, "get", _asking(made, {"model": {"type": "string"}}))]
    if isinstance(route, ModelsRoute):
        return [(path, "get", _operation(path, "get", _answer(schemas, route.answer), error))]
    content = _answer(schemas, route.answer)
    if isinstance(route, GenerateRoute | StoredRoute | FetchRoute):
        told = route if isinstance(route, FetchRoute) else route.writer
        media = told.media_type.partition(";")[0]  # type: ignore[union-attr]
        content[media] = {"schema": ANY}  # of each event or line
    made = _operation(path, "post", content, error)
    made["requestBody"] = _body(schemas, route.body, dialect.fields)
    out = [(path, "post", made)]
    if isinstance(route, StoredRoute):
        one, kept = path + "/{id}", route.answer
        whole: Object = {"stream": {"const": "false"}}
        for each, method, kind, query in (
            (one, "get", kept, whole), (one, "delete", replies.Deleted, {}),
            (one + "/cancel", "post", kept, {}),
            (one + "/input_items", "get", replies.Items, asked()),
        ):  # fmt: skip
            made = _operation(each, method, _answer(schemas, kind), error)
            out.append((each, method, _asking(made, query)))
    return out


def _own(schemas: Schemas, one: Endpoint, error: str) -> Object:
    """The operation of an endpoint of the server itself."""
    content = _answer(schemas, one.answer, one.media)
    made = _asking(_operation(one.path, one.method.lower(), content, error), one.query)
    if one.form:
        form = {
            "type": "object", "properties": dict(one.form), "required": [*one.form],
            "additionalProperties": False,
        }  # fmt: skip
        content = {"multipart/form-data": {"schema": form}}
        made["requestBody"] = {"required": True, "content": content}
    if one.body is not None:
        made["requestBody"] = _body(schemas, one.body, Fields())
    return made


def _asking(operation: Object, query: Mapping[str, Object]) -> Object:
    """The operation with what its URL may ask."""
    more = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    found = operation.get("parameters", []) + more
    return operation | {"parameters": found} if found else operation


def document(dialects: Sequence[Dialect], own: Iterable[Endpoint] = ()) -> bytes:
    """The document as JSON. own: what the server has besides its dialects; its errors are those of
    the first."""
    schemas = Schemas()
    paths: dict[str, Object] = {}
    for dialect in dialects:
        error = f"{dialect.name}.Error"
        schemas.components[error] = dict(dialect.error_schema)
        for route in dialect.routes:
            for path, method, operation in _operations(schemas, dialect, route, error):
                paths.setdefault(path, {})[method] = operation
    for one in own:
        made = _own(schemas, one, f"{dialects[0].name}.Error")
        paths.setdefault(one.path, {})[one.method.lower()] = made
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Octavo", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": schemas.components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"bearer": []}, {"key": []}],
        }
    )
